"""The cost model against this project's own measurements: nothing is fitted here.

Records of ``bench linear``, ``block``, ``step``, ``boundary`` and ``scale`` in one folder; those that are not
there are left out. A row's ``what`` says what was timed:

    linear     the linears of one block, encoding included; also the BF16 linears of the same run
    block      whole blocks, one by one
    step       several blocks, with or without head and cross entropy
    boundary   one block's products, and everything between products but attention (weights encoded before)
    scale      the trainer on whole GPUs, a micro-step
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fp4core.bench.cost_chips import CHIPS, NVLINK_GBPS, Chip
from fp4core.bench.cost_time import Calibration, Layout, blocks_ms, boundary_seconds, estimate
from fp4core.bench.cost_work import boundaries, fused_producers
from fp4core.recipe import ModelConfig, Recipe

SEQUENCE = 8192


def _recomputed(policy: str) -> int | None:
    """Every how many blocks one is recomputed, 0 for none; None for "selective", which is not modelled."""
    known = {"none": 0, "full": 1}
    return int(policy.removeprefix("selective-")) if policy.startswith("selective-") else known.get(policy)


@dataclasses.dataclass(frozen=True)
class _Model:
    """The model's side of a comparison."""

    recipes: dict[str, Recipe]
    config: ModelConfig
    calibration: Calibration

    def milliseconds(self, route: str, chip: Chip, tokens: int, **options: Any) -> float:
        return blocks_ms(
            self.recipes[route],
            self.config,
            chip,
            self.calibration,
            tokens=tokens,
            sequence=min(SEQUENCE, tokens),
            **options,
        )


def against_measured(
    recipes: dict[str, Recipe], config: ModelConfig, cal: Calibration, folder: Path
) -> list[dict[str, Any]]:
    """One row per measured time in ``folder``; none where there is none.

    Raises ValueError for a file that is no record of those benchmarks.
    """
    model, rows = _Model(recipes, config, cal), []
    for name, compare in _COMPARED.items():
        path = folder / f"{name}.json"
        if path.is_file():
            try:
                rows += list(compare(model, json.loads(path.read_text())))
            except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                raise ValueError(f"{path}: not a record of `bench {name}` ({error!r})") from None
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per benchmark: number of times, mean signed and absolute error, largest; and errors of ratios to BF16.

    A ratio leaves out what is alike for all routes, such as the clock of a run.
    """
    found = []
    for name in dict.fromkeys(row["benchmark"] for row in rows):
        own = [row for row in rows if row["benchmark"] == name]
        errors = [row["error_percent"] for row in own]
        base = {_alike(row): row for row in own if row["route"] == "bf16"}
        ratios = []
        for row in own:
            control = base.get(_alike(row))
            if control is not None and row is not control:
                one, two = (r["model_ms"] / r["measured_ms"] for r in (row, control))
                ratios.append(100 * (two / one - 1))
        found.append(
            {
                "benchmark": name,
                "times": len(own),
                "mean_error_percent": sum(errors) / len(errors),
                "mean_absolute_percent": sum(map(abs, errors)) / len(errors),
                "largest_percent": max(errors, key=abs),
                "ratios_to_bf16": len(ratios),
                "ratio_mean_absolute_percent": sum(map(abs, ratios)) / len(ratios) if ratios else None,
            }
        )
    return found


def _alike(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["what"], row["tokens"], row["chip"]


def _row(
    benchmark: str, chip: Chip, route: str, what: str, tokens: int, measured: float, predicted: float
) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "chip": chip.name,
        "route": route,
        "what": what,
        "tokens": tokens,
        "measured_ms": measured,
        "model_ms": predicted,
        "error_percent": 100 * (predicted / measured - 1),
    }


def _chip(name: str) -> Chip | None:
    return next((chip for key, chip in CHIPS.items() if key in name), None)


def _linear(model: _Model, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    chip = _chip(record["environment"]["gpu"])
    seen, what = set(), "a block's linears"
    for row in record["rows"]:
        if chip is None or row["route"] not in model.recipes or row["linears"] != "block":
            continue
        tokens = row["tokens"]
        if row.get("bf16_ms") and tokens not in seen:
            seen.add(tokens)
            predicted = model.milliseconds("bf16", chip, tokens, linears_only=True)
            yield _row("linear", chip, "bf16", what, tokens, row["bf16_ms"], predicted)
        predicted = model.milliseconds(row["route"], chip, tokens, linears_only=True)
        yield _row("linear", chip, row["route"], what, tokens, row["ms"], predicted)


def _step(benchmark: str) -> Callable[[_Model, dict[str, Any]], Iterator[dict[str, Any]]]:
    def compare(model: _Model, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        chip = _chip(record["environment"]["gpu"])
        for row in record["rows"]:
            route, blocks, head = row["route"], row["blocks"], bool(row.get("head"))
            if chip is None or route not in model.recipes or row.get("schedule") == "layers":
                continue
            predicted = model.milliseconds(route, chip, row["tokens"], blocks=blocks, head=head)
            what = f"{blocks} blocks" + (", head" if head else "")
            yield _row(benchmark, chip, route, what, row["tokens"], row["ms"], predicted)

    return compare


def _boundary(model: _Model, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Sums over a block: backward kernels serve two boundaries at once, so single ones do not compare."""
    totals: dict[tuple[Any, ...], float] = {}
    for row in record["rows"]:
        chip = _chip(row["device"])
        if chip is None or chip.fp4_tflops is not None or row["route"] not in model.recipes:
            continue
        products = row["stage"] == "gemm"
        key = (chip.name, row["route"], row["tokens"], products, None if products else row["schedule"])
        totals[key] = totals.get(key, 0.0) + row["milliseconds"]
    for (name, route, tokens, products, schedule), measured in totals.items():
        chip, recipe = CHIPS[name], model.recipes[route]
        fused = schedule == "fused" and fused_producers(recipe)
        linear = recipe.for_block(0, model.config.blocks)
        times = [
            boundary_seconds(b, chip, model.calibration, tokens)
            for b in boundaries(linear, model.config, fused=fused)
        ]
        if products:
            # every product was timed in both schedules, once each
            measured, what, stages = measured / 2, "products", ("gemm",)
        else:
            what, stages = f"between products, {schedule}", ("element", "reduce", "quantise", "layout")
        predicted = 1e3 * tokens * sum(t[stage] for t in times for stage in stages)
        yield _row("boundary", chip, route, what, tokens, measured, predicted)


def _scale(model: _Model, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in record["rows"]:
        job = row["job"]
        every = _recomputed(job["activation_checkpoint"])
        if not row.get("tokens_per_s_per_gpu") or every is None or job["route"] not in model.recipes:
            continue
        if row.get("carrier", {}).get("bf16"):
            continue  # contractions that left FP8 are not what the model counts
        chip = _chip(row["device"]["name"])
        if chip is None:
            continue
        gpus = job["gpus"]
        layout = Layout(
            job["local_batch"], job["accumulation"], every, gpus, gpus, reshard=not job["keep_gathered"]
        )
        config = dataclasses.replace(model.config, blocks=job["blocks"])
        cal = dataclasses.replace(model.calibration, exchange_gbps=NVLINK_GBPS)
        e = estimate(model.recipes[job["route"]], config, layout, chip, cal, job["sequence"])
        tokens = job["local_batch"] * job["sequence"]
        what = f"{job['blocks']} blocks, {gpus} GPU, {job['accumulation']} micro-steps"
        measured = 1e3 * tokens / row["tokens_per_s_per_gpu"]
        yield _row("scale", chip, job["route"], what, tokens, measured, 1e3 * tokens / e.tokens_per_s)


_COMPARED: dict[str, Callable[[_Model, dict[str, Any]], Iterator[dict[str, Any]]]] = {
    "linear": _linear,
    "block": _step("block"),
    "step": _step("step"),
    "boundary": _boundary,
    "scale": _scale,
}
