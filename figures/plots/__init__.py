"""The twelve figures: which tidy tables each needs, how to draw it, its caption, and the data it plots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from figures.data import Tidy
from figures.plots import evaluation, grids, loss, operands, schedule, traces, tradeoff


@dataclass(frozen=True)
class Entry:
    """One figure. data(tidy) is exactly what draw(tidy) plots; caption(tidy) states device, scale and
    seeds."""

    name: str
    title: str
    needs: tuple[str, ...]
    draw: Callable[[Tidy], Figure]
    caption: Callable[[Tidy], str]
    data: Callable[[Tidy], pd.DataFrame]


def _entry(name: str, title: str, needs: tuple[str, ...], module, key: str) -> Entry:
    return Entry(
        name,
        title,
        needs,
        getattr(module, f"draw_{key}"),
        getattr(module, f"caption_{key}"),
        getattr(module, f"data_{key}"),
    )


FIGURES = (
    _entry("fig01_scale_rounding", "E8M0 scale rules", ("scale_rounding",), traces, "scale_rounding"),
    _entry(
        "fig02_execution_routes",
        "Where each scale completes",
        ("execution_routes",),
        traces,
        "execution_routes",
    ),
    _entry("fig03_cta_scaling", "Outer-scale domains", ("scaling_domains",), grids, "cta_scaling"),
    _entry("fig04_operand_map", "Operand map", ("routes", "operands"), operands, "operand_map"),
    _entry("fig05_weight_2d", "One weight encoding, two layouts", ("weight_2d",), grids, "weight_2d"),
    _entry(
        "fig06_fusion_schedule",
        "Serial and fused boundaries",
        ("meta", "routes", "boundary"),
        schedule,
        "schedule",
    ),
    _entry("fig07_training_loss", "Training loss", ("meta", "routes", "losses", "endpoint"), loss, "loss"),
    _entry(
        "fig08_training_loss_zoom", "Training loss, last quarter", ("meta", "routes", "losses"), loss, "zoom"
    ),
    _entry(
        "fig09_validation_nll", "Validation NLL", ("meta", "routes", "validation"), evaluation, "validation"
    ),
    _entry(
        "fig10_downstream_delta",
        "Downstream scores",
        ("meta", "routes", "downstream"),
        evaluation,
        "downstream",
    ),
    _entry(
        "fig11_speed_quality",
        "Speed and quality",
        ("meta", "routes", "throughput", "endpoint"),
        tradeoff,
        "speed_quality",
    ),
    _entry("fig12_dgrad_error", "Data-gradient error", ("meta", "dgrad"), tradeoff, "dgrad"),
)
