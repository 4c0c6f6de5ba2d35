"""Formats on a real pretrained model (optional): four tasks by forward pass, NLL, and the Dgrad diagnostic.

What a tiny model trained for minutes cannot show: activations and gradients with the outliers of a trained
Llama of 30 blocks. SmolLM2-135M (`eval.smollm2`) is scored with each route's Fprop (`fp4core.convert` on
transformers' own model; nothing was trained in FP4, so this is post-training quantisation), item by item
against the same path with BF16 operands, and `eval.dgrad` measures dX = dY W on its own tensors. The text is
the study's validation stream, decoded and tokenised again for this model.

    model/           the gated Hugging Face directory
    dgrad.json       dgrad.csv, dgrad.md; tidy/ for table 12 and figure 12
    scores/*.json    one record a route, items and NLL included; scores.csv, scores.md
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval import benchmarks, dgrad, lm_tasks, score, smollm2, stream, validate
from eval import job as jobs
from fp4core import records
from fp4core.recipe import Recipe, digest, load_recipe

if TYPE_CHECKING:
    import numpy as np

SCHEMA = "fp4core.pretrained"
CONTROL = "bf16"
SEED = 1234  # of the choice of items
MODEL = "SmolLM2-135M-Instruct (a Llama of 30 blocks whose weights were stored in 4 bits)"
# the metric that is compared: one of each task, as in the study's own tables
PRIMARY = {"mmlu": "acc", "hellaswag": "acc_norm", "winogrande": "acc", "arc_challenge": "acc_norm"}
SCORE_COLUMNS = [
    "route",
    "task",
    "metric",
    "n",
    "value",
    "low",
    "high",
    "chance",
    "at_chance",
    "difference",
] + ["difference_low", "difference_high", "lost", "gained", "p", "p_holm", "truncated"]
NOTES = {
    "scores": """
`low`, `high`: 95% Wilson interval of a score; `at_chance`: it contains a guess's score. `difference`: against
the same items (tasks: a fraction) or sequences (NLL: nats/token, with a 95% paired t interval) under BF16;
blank in BF16's own rows. `lost`, `gained`: items that BF16 answers and the format does not, and the reverse.
`p`: exact McNemar test on those; `p_holm`: adjusted by Holm over all formats and the compared metric of each
task, blank for the other metric. `truncated`: prompts that did not fit and lost their beginning.
"""
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that can change a number, apart from bytes and routes.

    `items` per task (MMLU: as many subjects, one item each), no shots; `sequences` of `length` targets for
    NLL, the first `gradients` of them for Dgrad; `batch` requests at a time.
    """

    items: int = 10
    sequences: int = 4
    gradients: int = 2
    length: int = 256
    batch: int = 32
    max_length: int = 512
    threads: int = 2

    def part(self, stage: str) -> dict[str, int]:
        """The fields that can change the numbers of "dgrad" or of "scores"."""
        everything = dataclasses.asdict(self)
        if stage == "dgrad":
            return {name: everything[name] for name in ("gradients", "length", "threads")}
        return {name: value for name, value in everything.items() if name != "gradients"}


@dataclasses.dataclass(frozen=True)
class Model:
    """The gated directory and its text: `rows` int64 [sequences, length + 1]."""

    directory: Path
    config: Any
    rows: np.ndarray
    inputs: dict[str, str]


def select(items: int) -> dict[str, benchmarks.Selection]:
    """`items` questions of each task without shots; of MMLU one question of each of `items` subjects."""
    chosen = {}
    for name in benchmarks.BENCHMARKS:
        source = benchmarks.load(name)
        limit = 1 if name == "mmlu" else items
        one = benchmarks.select(source, shots=0, limit=limit, seed=SEED)
        # hashing the subjects' names spreads the choice; it needs no generator
        subjects = sorted(one.scored, key=lambda s: records.sha256_bytes(f"{SEED}|{s}".encode()))[:items]
        kept = [s for s in one.scored if s in subjects]
        scored, ids = ({s: held[s] for s in kept} for held in (one.scored, one.ids))
        chosen[name] = dataclasses.replace(one, scored=scored, ids=ids)
    return chosen


def text_rows(job: jobs.Job, tokenizer: Path, *, sequences: int, length: int) -> tuple[np.ndarray, str]:
    """(token ids int64 [sequences, length + 1], SHA-256 of the validation stream they were made of)."""
    import numpy as np
    from tokenizers import Tokenizer

    found = stream.validation(job)
    path, _ = job.data_file("tokenizer.json")
    text = Tokenizer.from_file(str(path)).decode(found.rows.reshape(-1).tolist(), skip_special_tokens=True)
    ids = np.array(Tokenizer.from_file(str(tokenizer)).encode(text).ids, dtype=np.int64)
    wanted = sequences * (length + 1)
    if len(ids) < wanted:
        raise ValueError(
            f"the validation stream of study {job.study.study} gives {len(ids)} tokens, needed {wanted}; "
            "lower --sequences or --length, or take another --study"
        )
    return ids[:wanted].reshape(sequences, length + 1), found.sha256


def run_dgrad(model: Model, settings: Settings, device: str) -> dict[str, Any]:
    """The diagnostic's record: rows, their geometric mean, and the NLL that the gradients are of."""
    import torch

    from fp4core.model import build_model

    native = build_model(model.config, CONTROL, device, seed=None)
    _load(native, model.directory)
    rows = []
    for batch in range(settings.gradients):
        native.zero_grad(set_to_none=True)
        ids = torch.from_numpy(model.rows[batch : batch + 1]).to(device)
        for row in dgrad.measure(native, ids):
            rows.append({"batch": batch, **row, "ratio": row["error_mxfp4"] / row["error_nvfp4_cta"]})
        print(f"pretrained: dgrad, sequence {batch + 1} of {settings.gradients}", flush=True)
    components = {}
    for component in dgrad.COMPONENTS:
        ratios = [row["ratio"] for row in rows if row["component"] == component]
        components[component] = {
            "ratio": dgrad.geometric_mean(ratios),
            "min": min(ratios),
            "max": max(ratios),
        }
    ratios = [row["ratio"] for row in rows]
    return {
        "rounding": "nearest",
        "geometric_mean_ratio": dgrad.geometric_mean(ratios),
        "nvfp4_cta_lower": sum(ratio > 1 for ratio in ratios),
        "comparisons": len(ratios),
        "components": components,
        "rows": rows,
    }


def run_scores(model: Model, recipe: Recipe, settings: Settings, device: str) -> dict[str, Any]:
    """One route's record: NLL of each sequence in our model, tasks and items in transformers'."""
    import fp4core
    from fp4core.model import build_model

    native = build_model(model.config, recipe, device, seed=None)
    _load(native, model.directory)
    nll = validate.sequence_nll(native, model.rows, batch=1, device=device)
    del native
    found = score.score(
        model.directory,
        select(settings.items),
        batch_size=settings.batch,
        max_length=settings.max_length,
        seed=SEED,
        device=device,
        prepare=lambda loaded: fp4core.convert(loaded, recipe),
    )
    return {"nll": nll, "task_hashes": found.task_hashes, "tasks": found.tasks, "items": found.items}


def _load(native: Any, directory: Path) -> None:
    from safetensors.torch import load_file

    from fp4core.model import from_hf_state_dict

    from_hf_state_dict(native, load_file(directory / "model.safetensors"))


def flips(control: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Per (task, metric): score with its Wilson interval, items lost and gained against the control, exact
    McNemar p; the text's NLL first, its difference paired by sequence with a t interval.

    ValueError unless both records asked the same prompts.
    """
    from statsmodels.stats.proportion import proportion_confint

    if control["task_hashes"] != other["task_hashes"]:
        raise ValueError("the routes were scored on different prompts; delete scores/ and score again")
    mean, low, high = _paired([b - a for a, b in zip(control["nll"], other["nll"], strict=True)])
    own = other is control or control["nll"] == other["nll"]
    rows: list[dict[str, Any]] = [
        {
            "task": "validation text",
            "metric": "nll",
            "n": len(other["nll"]),
            "value": math.fsum(other["nll"]) / len(other["nll"]),
            **({} if own else {"difference": mean, "difference_low": low, "difference_high": high}),
        }
    ]
    for row in other["tasks"]:
        pairs = [
            (a["correct"], b["correct"])
            for a, b in zip(control["items"], other["items"], strict=True)
            if (b["task"], b["metric"]) == (row["task"], row["metric"])
        ]
        lost, gained, n = pairs.count((1, 0)), pairs.count((0, 1)), len(pairs)
        low, high = proportion_confint(sum(b for _, b in pairs), n, method="wilson")
        compared = {"difference": (gained - lost) / n, "lost": lost, "gained": gained}
        rows.append(
            {
                "task": row["task"],
                "metric": row["metric"],
                "n": n,
                "value": row["value"],
                "low": float(low),
                "high": float(high),
                "chance": row["chance"],
                "at_chance": bool(low <= row["chance"] <= high),
                **({} if own else {**compared, "p": mcnemar(lost, gained)}),
                "truncated": row["truncated"],
            }
        )
    return rows


def _paired(differences: list[float]) -> tuple[float, float | None, float | None]:
    """Mean of paired differences with its 95% t interval; no interval for fewer than two."""
    from statsmodels.stats.weightstats import DescrStatsW

    mean = math.fsum(differences) / len(differences)
    if len(differences) < 2:
        return mean, None, None
    low, high = DescrStatsW(differences).tconfint_mean()
    return mean, float(low), float(high)


def holm(p_values: list[float]) -> list[float]:
    """Holm-adjusted p values, in the order given."""
    adjusted, worst = [1.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = worst
    return adjusted


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided p: that many flips one way or fewer, of a fair coin; 1 without flips."""
    n, k = lost + gained, min(lost, gained)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


def write_tables(out: Path, routes: list[str]) -> None:
    """dgrad and scores as CSV and Markdown, and tidy/ for `figures`, from the records alone."""
    found = records.read_json(out / "dgrad.json")
    columns = ["layer", "component", "batch", "error_mxfp4", "error_nvfp4_cta", "ratio"]
    _table(out / "dgrad", columns, found["rows"])
    control = records.read_json(out / "scores" / f"{CONTROL}.json")
    rows = []
    for route in routes:
        other = records.read_json(out / "scores" / f"{route}.json")
        rows += [{"route": route, **row} for row in flips(control, other)]
    family = [row for row in rows if "p" in row and row["metric"] == PRIMARY[row["task"]]]
    for row, p in zip(family, holm([row["p"] for row in family])):
        row["p_holm"] = p
    _table(out / "scores", SCORE_COLUMNS, rows)
    _write_tidy(out / "tidy", found)


def _write_tidy(out: Path, found: dict[str, Any]) -> None:
    """meta.csv and dgrad.csv as `eval.collect` writes them: what figure 12 and table 12 are drawn from."""
    settings, device = found["settings"], found["device"]
    length, count = settings["length"], settings["gradients"]
    batches = f"{count} sequence{'' if count == 1 else 's'} of {length} tokens"
    meta = {
        "study": "pretrained",
        "setting": f"Measured on {MODEL}, {batches}, on {device['name']} ({found['backend']} backend).",
        "device": device["name"],
        "device_kind": device["kind"],
        "backend": found["backend"],
        "date": found["date_utc"],
        "commit": found["commit"] or "unknown",
    }
    _csv(out / "meta.csv", ["key", "value"], [{"key": k, "value": v} for k, v in meta.items()])
    columns = ["seed", "layer", "component", "batch", "error_mxfp4", "error_nvfp4_cta", "ratio"]
    _csv(out / "dgrad.csv", columns, [{"seed": 0, **row} for row in found["rows"]])


def _csv(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    records.write_atomic(path, text.getvalue().encode())


SIGNED = ("difference", "difference_low", "difference_high")
DECIMALS = 4


def _table(stem: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    _csv(stem.with_suffix(".csv"), columns, rows)

    def shown(name: str, value: Any) -> str:
        if value is None or isinstance(value, bool):
            return "yes" if value else ""
        if not isinstance(value, float):
            return str(value)
        return f"{value:{'+' if name in SIGNED else ''}.{DECIMALS}f}"

    text = [c for c in columns if all(isinstance(row.get(c, ""), str) for row in rows)]
    lines = [columns, *([shown(c, row.get(c)) for c in columns] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    rule = ["-" * w if c in text else "-" * (w - 1) + ":" for c, w in zip(columns, widths)]
    aligned = [
        [v.ljust(w) if c in text else v.rjust(w) for c, v, w in zip(columns, line, widths)]
        for line in (lines[0], rule, *lines[1:])
    ]
    said = "".join(f"| {' | '.join(line)} |\n" for line in aligned)
    records.write_atomic(stem.with_suffix(".md"), (said + NOTES.get(stem.name, "")).encode())


def run(job: jobs.Job, recipes: list[Recipe], settings: Settings, out: Path) -> Path:
    """Convert, measure, compare; records that are up to date are kept. Returns the summary's path."""
    import torch

    if recipes[0].route != CONTROL:
        raise ValueError(f"pretrained: got routes {[r.route for r in recipes]}, needed {CONTROL} first")
    source = smollm2.find()
    lm_tasks.go_offline(out / "cache")
    score.quiet()
    device, described = jobs.pick_device(job.study)
    if device == "cpu":
        torch.set_num_threads(settings.threads)
    config, gate = smollm2.convert(source, out / "model", longest=settings.max_length)
    rows, stream_sha256 = text_rows(
        job, out / "model" / "tokenizer.json", sequences=settings.sequences, length=settings.length
    )
    inputs = {
        "gguf_sha256": smollm2.SHA256,
        "model_sha256": records.tree_sha256(gate["files"]),
        "stream_sha256": stream_sha256,
    }
    model = Model(out / "model", config, rows, inputs)

    def keep(path: Path, recipe: Recipe, stage: str, measure: Callable[[], dict[str, Any]]) -> None:
        told = {"settings": settings.part(stage), "package": smollm2.PACKAGE}
        stage_hash = digest(told["settings"])
        identity = {"recipe_hash": recipe.hash, "stage_hash": stage_hash, "inputs": inputs}
        if path.is_file() and identity.items() <= records.read_json(path).items():
            print(f"pretrained: {path.name} is up to date", flush=True)
            return
        _set_aside(path, out / "archive")
        started = time.perf_counter()
        head = records.envelope(
            SCHEMA,
            study="pretrained",
            route=recipe.route,
            seed=None,
            recipe_hash=recipe.hash,
            stage_hash=stage_hash,
            device=described,
            backend="auto" if device == "cuda" else "reference",
            inputs=inputs,
        )
        found = measure()
        records.write_json(path, {**head, **told, "seconds": time.perf_counter() - started, **found})
        print(f"pretrained: {path.name}, {time.perf_counter() - started:.0f} s", flush=True)

    keep(out / "dgrad.json", recipes[0], "dgrad", lambda: run_dgrad(model, settings, device))
    for recipe in recipes:
        path = out / "scores" / f"{recipe.route}.json"
        keep(path, recipe, "scores", lambda recipe=recipe: run_scores(model, recipe, settings, device))
    write_tables(out, [recipe.route for recipe in recipes])
    found = records.read_json(out / "dgrad.json")
    print(
        f"pretrained: CTA-local lower in {found['nvfp4_cta_lower']} of {found['comparisons']}, "
        f"geometric-mean ratio {found['geometric_mean_ratio']:.3f}; see {out}/scores.md and dgrad.md",
        flush=True,
    )
    return out / "dgrad.json"


def _set_aside(path: Path, archive: Path) -> None:
    """Move an old record of other settings, recipe or inputs to ``archive``; nothing is overwritten."""
    if not path.is_file():
        return
    old = records.read_json(path)
    name = f"{path.stem}-{old['recipe_hash']}-{old['stage_hash']}-{records.sha256_file(path)[:8]}.json"
    archive.mkdir(parents=True, exist_ok=True)
    os.replace(path, archive / name)


def main(arguments: list[str]) -> None:
    """python -m eval pretrained --study S --results results/S --out results/pretrained --routes bf16 R ..."""
    parser = argparse.ArgumentParser(prog="python -m eval pretrained", description=__doc__.splitlines()[0])
    parser.add_argument("--study", required=True, help="study whose validation text is used")
    parser.add_argument("--results", required=True, type=Path, help="results/<study>, with its data")
    parser.add_argument("--recipes", type=Path, help="folder with routes/ and studies/ (default: recipes)")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--routes", required=True, nargs="+", help=f"{CONTROL} first")
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--done", type=Path, help="completion marker to write")
    parsed = parser.parse_args(arguments)
    settings = Settings(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(Settings)})
    low = [f"--{k.replace('_', '-')} {v}" for k, v in dataclasses.asdict(settings).items() if v < 1]
    if low or settings.gradients > settings.sequences:
        raise ValueError(
            f"pretrained: got {low[0] if low else f'--gradients {settings.gradients}'}, needed 1 or more, "
            "and no more gradients than sequences"
        )
    study = jobs.recipes.load_study(parsed.study, parsed.recipes)
    recipes = [load_recipe(route, parsed.recipes) for route in parsed.routes]
    job = jobs.Job(study, recipes[0], study.seeds[0], parsed.results)
    path = run(job, recipes, settings, parsed.out)
    if parsed.done:
        stage_hash = digest(dataclasses.asdict(settings))
        records.write_marker(parsed.done, path, recipe_hash=None, stage_hash=stage_hash)
