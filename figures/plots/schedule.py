"""Figure 06: serial and fused schedules of every boundary, from measured times."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from figures import captions, style
from figures.data import Tidy
from figures.numbers import fixed

DIRECTIONS = ("forward", "backward")
STAGES = {"reduce": "#56B4E9", "quantise": "#E69F00", "layout": "#AA4499", "gemm": "#c4c4c4"}


def data_schedule(tidy: Tidy) -> pd.DataFrame:
    """Mean milliseconds per boundary, route, schedule and stage."""
    frame = tidy.table("boundary")
    keys = ["boundary", "route", "schedule", "stage"]
    return frame.groupby(keys, sort=False)["milliseconds"].mean().reset_index()


def caption_schedule(tidy: Tidy) -> str:
    frame = tidy.table("boundary")
    where = ", ".join(f"{d} ({b} backend)" for d, b in sorted(set(zip(frame["device"], frame["backend"]))))
    tokens = ", ".join(f"{t:,}" for t in sorted(set(frame["tokens"])))
    both = set(frame["schedule"]) == {"serial", "fused"}
    return captions.join(
        f"Time of each boundary from the producer's input to the end of the consuming GEMM, {tokens} "
        f"rows, medians on {where}.",
        "Upper bar: serial, one pass per part; lower bar, hatched: fused."
        if both
        else "Only one schedule was measured: this backend has no other.",
        "Numbers: total milliseconds.",
        "On a CPU the parts are emulations and say nothing about FP4 hardware." if tidy.on_cpu else "",
    )  # fmt: skip


def _layout(boundaries: list[str]) -> tuple[int, int, list[tuple[str, str, str]]]:
    """(rows, columns, [(boundary, title, remark), ...]): one row per direction where the names state it."""
    parts = [name.rpartition("_") for name in boundaries]
    if len(boundaries) > 1 and all(direction in DIRECTIONS for _, _, direction in parts):
        bases = list(dict.fromkeys(base for base, _, _ in parts))
        rows = [d for d in DIRECTIONS if any(direction == d for _, _, direction in parts)]
        panels = [(f"{base}_{d}", base.replace("_", " "), d) for d in rows for base in bases]
        return len(rows), len(bases), panels
    columns = 2 if len(boundaries) > 1 else 1
    return (
        -(-len(boundaries) // columns),
        columns,
        [(name, name.replace("_", " "), "") for name in boundaries],
    )


def draw_schedule(tidy: Tidy) -> Figure:
    frame = data_schedule(tidy)
    routes, looks = tidy.ordered(frame["route"]), style.looks(tidy)
    rows, columns, panels = _layout(list(dict.fromkeys(frame["boundary"])))
    schedules = [s for s in ("serial", "fused") if s in set(frame["schedule"])]
    lane = 0.21 if len(schedules) == 2 else 0.15
    inner = lane * len(routes) + 0.1
    height = 0.56 + rows * inner + (rows - 1) * 0.58 + 0.36
    figure, axes = style.new(
        style.PAGE, height, rows, columns, margins=(1.0, 0.1, 0.36, 0.56), hspace=0.58 / inner, wspace=0.12,
        sharey=True,
    )  # fmt: skip
    times = frame.set_index(["boundary", "route", "schedule", "stage"])["milliseconds"].to_dict()
    for place in range(rows * columns):
        ax = axes[place // columns, place % columns]
        boundary, title, remark = panels[place] if place < len(panels) else ("", "", "")
        if boundary not in set(frame["boundary"]):
            ax.set_axis_off()
            continue
        _bars(ax, boundary, routes, schedules, times, lane)
        ax.set_yticks(range(len(routes)), [looks[r].short if r in looks else r for r in routes])
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ax.set_title(f"{'abcdefghijkl'[place]}  {title}", pad=11 if remark else 4)
        if remark:
            ax.text(0, 1.01, remark, transform=ax.transAxes, fontsize=6.5, color=style.GREY, va="bottom")
        if place + columns >= len(panels):
            ax.set_xlabel("time (ms)")
    _legend(figure, height, [s for s in STAGES if s in set(frame["stage"])], len(schedules) == 2)
    return figure


def _bars(ax, boundary: str, routes: list[str], schedules: list[str], times: dict, lane: float) -> None:
    """Stacked bars of one boundary, a pair per route where both schedules exist, totals at their ends."""
    both = len(schedules) == 2
    thick = (0.40 if both else 0.62) * lane
    longest = 0.0
    for index, route in enumerate(routes):
        for which, schedule in enumerate(schedules):
            y = index + ((which - 0.5) * thick / lane * 1.1 if both else 0)
            start = 0.0
            for stage, color in STAGES.items():
                span = float(times.get((boundary, route, schedule, stage), 0.0))
                if span > 0:
                    hatch = "////" if schedule == "fused" else None
                    ax.barh(y, span, thick / lane, start, color=color, ec="white", lw=0.3, hatch=hatch)
                    start += span
            if start:
                text = fixed(start, 2 if start < 10 else 1)
                ax.annotate(
                    text,
                    (start, y),
                    (2, -0.3),
                    textcoords="offset points",
                    va="center",
                    fontsize=5.6,
                    color=style.INK,
                )
            longest = max(longest, start)
    box = ax.get_window_extent().width / ax.figure.dpi
    ax.set_xlim(0, longest * (1 + 0.3 / max(box - 0.3, 0.3)))
    ax.set_ylim(len(routes) - 0.4, -0.6)
    ticks = MaxNLocator(4 if box < 2 else 7, steps=[1, 2, 5, 10]).tick_values(0, ax.get_xlim()[1])
    ax.set_xticks([tick for tick in ticks if 0 <= tick <= 0.92 * ax.get_xlim()[1]])


def _legend(figure: Figure, height: float, stages: list[str], both: bool) -> None:
    handles = [Patch(fc=STAGES[stage], label={"gemm": "GEMM"}.get(stage, stage)) for stage in stages]
    if both:
        handles.append(Patch(fc="white", ec=style.GREY, hatch="////", label="fused schedule", lw=0.4))
    figure.legend(
        handles=handles, loc="upper right", ncols=len(handles), frameon=False, fontsize=6.5, handlelength=1.2,
        columnspacing=1.4, bbox_to_anchor=(1 - 0.05 / style.PAGE, 1 - 0.02 / height), borderpad=0,
        borderaxespad=0.2,
    )  # fmt: skip
