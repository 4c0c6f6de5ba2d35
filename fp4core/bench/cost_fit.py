"""The cost model against what was published: calibration, errors, and what each gap is made of."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

from fp4core.bench.cost_chips import CHIPS
from fp4core.bench.cost_time import Calibration, Estimate, Layout, estimate, exchange_bytes
from fp4core.recipe import ModelConfig, Recipe

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "figures" / "published.csv"
# the two rates that are fitted, and to what: everything else is a prediction
FITTED = {"exchange_gbps": "bf16", "issue": "nvfp4_cta"}
SEQUENCE = 8192


@dataclasses.dataclass(frozen=True)
class Published:
    """One published rate: chip, route, layout, tokens/s per GPU, GiB (None where not published)."""

    chip: str
    route: str
    layout: Layout
    tokens_per_s: float
    memory_gib: float | None


def published(path: Path = PUBLISHED) -> list[Published]:
    """Rates of the report's throughput (GB200) and production (B300) tables. Raises ValueError without them.

    The production table names batch and accumulation only; recomputation and sharding are taken to be those
    of the same routes' GB200 probes.
    """
    if not path.is_file():
        raise ValueError(
            f"{path}: not here; the cost model is calibrated on the published rates of a checkout"
        )
    facts: dict[tuple[str, str], dict[str, str]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["table"] in ("table06_throughput", "table09_production") and row["route"]:
                facts.setdefault((row["table"], row["route"]), {})[row["metric"]] = row["value"]
    found = []
    for (table, route), row in facts.items():
        full = {**facts.get(("table06_throughput", route), {}), **row}
        chip = "GB200" if table == "table06_throughput" else "B300"
        memory = row.get("memory_gib") or row.get("memory_gib_range", "").partition("-")[0]
        found.append(
            Published(
                chip,
                route,
                Layout.published(full),
                float(row["tokens_per_s"]),
                float(memory) if memory else None,
            )
        )
    return found


def calibrate(
    recipes: dict[str, Recipe],
    model: ModelConfig,
    rates: list[Published],
    *,
    overlap: bool = False,
    issue_on: str = FITTED["issue"],
) -> Calibration:
    """Fit the exchange bandwidth and the issue fraction to one published rate each.

    The exchange alone sets the rate of the BF16 route: its arithmetic needs two thirds of its time, and no
    numerics of its own explain the rest (``why_bf16_waits``). The CTA-local route's time grows with what its
    producers issue.
    """
    by_route = {p.route: p for p in rates if p.chip == "GB200"}
    control = by_route[FITTED["exchange_gbps"]]
    seconds = control.layout.local_batch * SEQUENCE / control.tokens_per_s
    cal = Calibration(
        exchange_gbps=exchange_bytes(model, control.layout) / seconds / 1e9,
        fitted_on=(control.route, issue_on),
        overlap=overlap,
    )
    target = by_route[issue_on]
    low, high = 0.05, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        cal = dataclasses.replace(cal, issue=middle)
        found = estimate(recipes[target.route], model, target.layout, CHIPS["GB200"], cal, SEQUENCE)
        low, high = (middle, high) if found.tokens_per_s < target.tokens_per_s else (low, middle)
    return cal


def against_published(
    recipes: dict[str, Recipe], model: ModelConfig, rates: list[Published], cal: Calibration
) -> list[dict[str, Any]]:
    """One row per published rate: the model's, its error, and whether the rate was fitted."""
    rows = []
    for p in rates:
        e = estimate(recipes[p.route], model, p.layout, CHIPS[p.chip], cal, SEQUENCE)
        fitted = p.chip == "GB200" and p.route in cal.fitted_on
        rows.append(
            {
                "chip": p.chip,
                "route": p.route,
                "local_batch": p.layout.local_batch,
                "published_tokens_per_s": p.tokens_per_s,
                "model_tokens_per_s": e.tokens_per_s,
                "error_percent": 100 * (e.tokens_per_s / p.tokens_per_s - 1),
                "fitted": fitted,
                "waits_for_exchange": e.waits,
                "published_memory_gib": p.memory_gib,
                "model_memory_gib": e.memory_gib,
                "model_us_per_token": e.parts,
            }
        )
    return rows


def errors(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and largest absolute error, per cent, over the rates that were not fitted, all and by chip; and of
    memory, for which nothing is."""

    def of(found: list[float]) -> dict[str, float]:
        sizes = [abs(error) for error in found]
        return {
            "predicted": len(sizes),
            "mean_percent": sum(sizes) / len(sizes),
            "largest_percent": max(sizes),
        }

    rates = [r for r in rows if not r["fitted"]]
    memory = [
        100 * (r["model_memory_gib"] / r["published_memory_gib"] - 1)
        for r in rows
        if r["published_memory_gib"]
    ]
    by_chip = {
        chip: of([r["error_percent"] for r in rates if r["chip"] == chip])
        for chip in dict.fromkeys(r["chip"] for r in rates)
    }
    return {**of([r["error_percent"] for r in rates]), "by_chip": by_chip, "memory": of(memory)}


def _us(value: Estimate) -> float:
    return 1e6 / value.tokens_per_s


def gaps(
    recipes: dict[str, Recipe], model: ModelConfig, rates: list[Published], cal: Calibration
) -> list[dict[str, Any]]:
    """What separates each GB200 route from BF16, in microseconds per token, by the model.

    ``geometry_first``: BF16 moves to the route's layout, then the arithmetic changes. ``arithmetic_first``:
    the other way round; a rate set by the exchange does not feel the arithmetic. ``scaling``: what reduce,
    quantise and layout cost beyond those of ``mxfp4_sr`` in the same layout.
    """
    chip, control = CHIPS["GB200"], next(p for p in rates if p.route == "bf16")
    rows = []

    def at(route: str, layout: Layout) -> Estimate:
        return estimate(recipes[route], model, layout, chip, cal, SEQUENCE)

    start = at("bf16", control.layout)
    for p in rates:
        if p.chip != "GB200" or p.route == "bf16":
            continue
        end, moved = at(p.route, p.layout), at("bf16", p.layout)
        stayed, plain = at(p.route, control.layout), at("mxfp4_sr", p.layout)
        stages = ("reduce", "quantise", "layout")
        rows.append(
            {
                "route": p.route,
                "gap_us": _us(start) - _us(end),
                "geometry_first": {
                    "geometry_us": _us(start) - _us(moved),
                    "arithmetic_us": _us(moved) - _us(end),
                },
                "arithmetic_first": {
                    "arithmetic_us": _us(start) - _us(stayed),
                    "geometry_us": _us(stayed) - _us(end),
                },
                "scaling_us": sum(end.parts[s] - plain.parts[s] for s in stages),
                "bf16_tokens_per_s_in_this_layout": moved.tokens_per_s,
                "bf16_memory_gib_in_this_layout": moved.memory_gib,
            }
        )
    return rows


def why_bf16_waits(rates: list[Published], model: ModelConfig) -> dict[str, float]:
    """Published numbers alone: micro-step seconds of BF16 and of the fastest FP4 route, and the price of
    BF16 blocks.

    Four BF16 blocks cost ``te_nvfp4_bf16x4`` so little that thirty-two explain ``bf16_blocks_us`` of the
    ``gap_us`` between BF16 and ``te_nvfp4``. And the micro-steps of all FSDP-32 routes are at least as long
    as BF16's or MXFP4's, which last equally long although one holds half the tokens of the other.
    """
    by_route = {p.route: p for p in rates if p.chip == "GB200"}
    us = {name: 1e6 / p.tokens_per_s for name, p in by_route.items()}
    micro = {name: p.layout.local_batch * SEQUENCE / p.tokens_per_s for name, p in by_route.items()}
    return {
        "bf16_micro_step_s": micro["bf16"],
        "mxfp4_sr_micro_step_s": micro["mxfp4_sr"],
        "shortest_fsdp32_micro_step_s": min(micro[n] for n, p in by_route.items() if p.layout.reshard),
        "gap_us": us["bf16"] - us["te_nvfp4"],
        "bf16_blocks_us": (us["te_nvfp4_bf16x4"] - us["te_nvfp4"]) * model.blocks / 4,
    }


def other_fits(
    recipes: dict[str, Recipe], model: ModelConfig, rates: list[Published]
) -> list[dict[str, Any]]:
    """GB200 errors when the issue fraction is fitted on another route: what the choice of the two is worth.

    Routes that the exchange sets (in one fit or the other) say nothing of the fraction and are left out.
    """
    rows = []
    for p in rates:
        if p.chip != "GB200" or p.route == FITTED["exchange_gbps"]:
            continue
        cal = calibrate(recipes, model, rates, issue_on=p.route)
        if estimate(recipes[p.route], model, p.layout, CHIPS[p.chip], cal, SEQUENCE).waits:
            continue
        found = errors(against_published(recipes, model, rates, cal))["by_chip"]["GB200"]
        rows.append({"route": p.route, "issue": cal.issue, **found})
    return rows
