"""A cost model that explains the published rates, and what it predicts for other chips.

    python -m fp4core bench cost-model [--chip GB200 --chip H200] [--measured DIR] [--out FILE]

Counts come from each route's operations, bytes, machine instructions and launches (``cost_work``), chips
from their data sheets (``cost_chips``), times from two formulas (``cost_time``). Two numbers are
calibrated, on one published rate each; the error on every other published rate is printed beside it.
Nothing here is a measurement: the JSON says so, and so does every column that holds a figure of the
model's. Imports neither torch nor Triton.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from fp4core.bench.cost_chips import CHIPS, NVLINK_GBPS
from fp4core.bench.cost_fit import (
    FITTED,
    SEQUENCE,
    Published,
    against_published,
    calibrate,
    errors,
    gaps,
    other_fits,
    published,
    why_bf16_waits,
)
from fp4core.bench.cost_measured import against_measured, summary
from fp4core.bench.cost_time import Calibration, Layout, estimate
from fp4core.recipe import Recipe, Study, list_routes, load_recipe, load_study

LABEL = "predictions of a cost model, not measurements"
RESULTS = Path(__file__).parent / "results"


def predictions(
    recipes: dict[str, Recipe], study: Study, cal: Calibration, chip_names: list[str]
) -> list[dict[str, Any]]:
    """Every route on every chip: 32 GPUs as published, or for chips without FP4 units one node of eight.

    The largest batch of 8, 4, 2 or 1 sequences whose estimated memory leaves a fifth of the chip free;
    every 32nd block recomputed. ue5m3 is left out where FP4 units would be used: none takes its scales.
    """
    rows = []
    for name in chip_names:
        chip = CHIPS[name]
        gpus = 32 if chip.fp4_tflops else 8
        here = cal if chip.fp4_tflops else dataclasses.replace(cal, exchange_gbps=NVLINK_GBPS)
        for route, recipe in recipes.items():
            if chip.fp4_tflops and route == "ue5m3":
                continue
            for batch in (8, 4, 2, 1):
                layout = Layout(batch, study.train.global_batch // (gpus * batch), 32, gpus, gpus)
                e = estimate(recipe, study.model, layout, chip, here, SEQUENCE)
                if e.memory_gib <= 0.8 * chip.memory_gib or batch == 1:
                    break
            rows.append(
                {
                    "chip": name,
                    "route": route,
                    "gpus": gpus,
                    "local_batch": batch,
                    "model_tokens_per_s": e.tokens_per_s,
                    "model_memory_gib": e.memory_gib,
                    "waits_for_exchange": e.waits,
                    "model_us_per_token": e.parts,
                }
            )
    return rows


def other_formula(
    recipes: dict[str, Recipe], study: Study, rates: list[Published], measured: Path
) -> dict[str, Any]:
    """Errors, published and measured, if producers hid behind products; calibrated on the same two rates."""
    cal = calibrate(recipes, study.model, rates, overlap=True)
    return {
        "formula": "T_serial + max(T_gemm, T_reduce + T_quant + T_layout)",
        "issue": cal.issue,
        "errors": errors(against_published(recipes, study.model, rates, cal)),
        "measured_summary": summary(against_measured(recipes, study.model, cal, measured)),
    }


def record(measured: Path, chip_names: list[str]) -> dict[str, Any]:
    """Everything the command prints, as JSON-ready data."""
    study = load_study("report")
    recipes = {route: load_recipe(route) for route in list_routes()}
    rates = published()
    cal = calibrate(recipes, study.model, rates)
    compared = against_published(recipes, study.model, rates, cal)
    own = against_measured(recipes, study.model, cal, measured)
    return {
        "schema": {"name": "fp4core.cost_model", "version": 1},
        "kind": LABEL,
        "calibration": {
            "issue": cal.issue,
            "exchange_gbps": cal.exchange_gbps,
            "fitted_on": FITTED,
        },
        "chips": {name: dataclasses.asdict(chip) for name, chip in CHIPS.items()},
        "published": compared,
        "errors": errors(compared),
        "other_fits": other_fits(recipes, study.model, rates),
        "gaps": gaps(recipes, study.model, rates, cal),
        "why_bf16_waits": why_bf16_waits(rates, study.model),
        "predictions": predictions(recipes, study, cal, chip_names),
        "measured": own,
        "measured_summary": summary(own),
        "other_formula": other_formula(recipes, study, rates, measured),
    }


def _table(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """Rows as aligned text; ``columns``: key -> heading."""

    def cell(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else ""
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
        return "" if value is None else str(value)

    cells = [list(columns.values()), *([cell(r.get(c)) for c in columns] for r in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(v.ljust(w) for v, w in zip(line, widths)).rstrip() for line in cells)


def report(found: dict[str, Any]) -> str:
    """The record as text."""
    cal, e, waits = found["calibration"], found["errors"], found["why_bf16_waits"]
    flat = [
        {
            "route": g["route"],
            "gap": g["gap_us"],
            "geometry": g["geometry_first"]["geometry_us"],
            "arithmetic": g["geometry_first"]["arithmetic_us"],
            "late": g["arithmetic_first"]["arithmetic_us"],
            "scaling": g["scaling_us"],
        }
        for g in found["gaps"]
    ]
    parts = [
        f"Cost model: {LABEL}.",
        f"Calibrated: producers fill {cal['issue']:.3f} of issue slots (fitted on {FITTED['issue']}), "
        f"parameters move at {cal['exchange_gbps']:.1f} GB/s per GPU (fitted on {FITTED['exchange_gbps']}).",
        "",
        _table(
            found["published"],
            {
                "chip": "chip",
                "route": "route",
                "local_batch": "batch",
                "published_tokens_per_s": "published tok/s",
                "model_tokens_per_s": "model tok/s",
                "error_percent": "error %",
                "fitted": "fitted",
                "waits_for_exchange": "waits",
                "published_memory_gib": "published GiB",
                "model_memory_gib": "model GiB",
            },
        ),
        "; ".join(
            f"{part['predicted']} rates predicted{where}: mean error {part['mean_percent']:.1f}%, "
            f"largest {part['largest_percent']:.1f}%"
            for where, part in [("", e), *((f" on {chip}", one) for chip, one in e["by_chip"].items())]
        )
        + f". Memory, nothing fitted: {e['memory']['mean_percent']:.0f}%, largest "
        f"{e['memory']['largest_percent']:.0f}%.",
        _fits(found["other_fits"]),
        "",
        "What separates each route from BF16, microseconds per token by the model (GB200):",
        _table(
            flat,
            {
                "route": "route",
                "gap": "gap",
                "geometry": "batch, recomputation, sharding",
                "arithmetic": "then arithmetic",
                "late": "arithmetic alone, in BF16's layout",
                "scaling": "scaling beyond mxfp4_sr",
            },
        ),
        f"Published alone: a micro-step of bf16 lasts {waits['bf16_micro_step_s']:.3f} s, of mxfp4_sr (twice "
        f"the tokens) {waits['mxfp4_sr_micro_step_s']:.3f} s; BF16 in all blocks would explain "
        f"{waits['bf16_blocks_us']:.1f} of the {waits['gap_us']:.1f} us between bf16 and te_nvfp4.",
        "",
        "Predictions by chip:",
        _table(
            found["predictions"],
            {
                "chip": "chip",
                "route": "route",
                "gpus": "GPUs",
                "local_batch": "batch",
                "model_tokens_per_s": "model tok/s",
                "model_memory_gib": "model GiB",
                "waits_for_exchange": "waits",
            },
        ),
    ]
    if found["measured"]:
        columns = {"benchmark": "bench", "chip": "chip", "route": "route", "what": "what", "tokens": "tokens"}
        columns |= {"measured_ms": "measured ms", "model_ms": "model ms", "error_percent": "error %"}
        heads = {
            "benchmark": "bench",
            "times": "times",
            "mean_error_percent": "mean error %",
            "mean_absolute_percent": "mean absolute %",
            "largest_percent": "largest %",
            "ratios_to_bf16": "ratios to BF16",
            "ratio_mean_absolute_percent": "their mean absolute error %",
        }
        parts += [
            "",
            "Against this project's own measurements, nothing fitted:",
            _table(found["measured"], columns),
            "",
            _table(found["measured_summary"], heads),
        ]
    return "\n".join([*parts, "", _other(found["other_formula"])])


def _fits(fits: list[dict[str, Any]]) -> str:
    fits = [fit for fit in fits if fit["route"] != FITTED["issue"]]
    means = [fit["mean_percent"] for fit in fits]
    slots = [fit["issue"] for fit in fits]
    return (
        f"Issue slots fitted on any other GB200 route instead: {min(slots):.2f} to {max(slots):.2f}, "
        f"mean error {min(means):.1f}% to {max(means):.1f}%."
    )


def _other(other: dict[str, Any]) -> str:
    chips = ", ".join(
        f"{chip} {part['mean_percent']:.1f}%" for chip, part in other["errors"]["by_chip"].items()
    )
    ratios = ", ".join(
        f"{row['benchmark']} {row['ratio_mean_absolute_percent']:.1f}%"
        for row in other["measured_summary"]
        if row["ratio_mean_absolute_percent"] is not None
    )
    own = f"; ratios to BF16 of our own measurements: {ratios}" if ratios else ""
    return f"Mean errors of the other formula, {other['formula']}: {chips}{own}."


def main(argv: list[str]) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m fp4core bench cost-model", description=LABEL)
    parser.add_argument("--chip", action="append", choices=sorted(CHIPS), help="default: all")
    parser.add_argument("--measured", type=Path, default=RESULTS, help="folder of measured benchmark records")
    parser.add_argument("--out", type=Path, help="also write everything as JSON")
    options = parser.parse_args(argv)
    if options.measured != RESULTS and not options.measured.is_dir():
        raise ValueError(
            f"--measured {options.measured}: no such folder; needed one with records of `bench step`"
        )
    found = record(options.measured, options.chip or list(CHIPS))
    print(report(found))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        temporary = options.out.with_name(f".{options.out.name}.tmp")
        temporary.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
        os.replace(temporary, options.out)
        print("written", options.out)
    return 0
