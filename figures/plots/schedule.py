"""Figure 06: serial and fused schedules of every boundary, from measured times."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from figures import captions, style
from figures.data import Tidy
from figures.numbers import fixed

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


def draw_schedule(tidy: Tidy) -> Figure:
    frame = data_schedule(tidy)
    boundaries = list(dict.fromkeys(frame["boundary"]))
    routes = tidy.ordered(frame["route"])
    looks = style.looks(tidy)
    columns = 2 if len(boundaries) > 1 else 1
    rows = -(-len(boundaries) // columns)
    schedules = [s for s in ("serial", "fused") if s in set(frame["schedule"])]
    lane = 0.21 if len(schedules) == 2 else 0.15
    inner = lane * len(routes) + 0.1
    height = 0.5 + rows * inner + (rows - 1) * 0.52 + 0.36
    figure, axes = style.new(
        style.PAGE,
        height,
        rows,
        columns,
        margins=(1.12, 0.1, 0.36, 0.5),
        hspace=0.52 / inner,
        wspace=0.1,
        sharey=True,
    )
    times = frame.set_index(["boundary", "route", "schedule", "stage"])["milliseconds"]
    thick = lane * 0.40 if len(schedules) == 2 else lane * 0.62
    for place in range(rows * columns):
        ax = axes[place // columns, place % columns]
        if place >= len(boundaries):
            ax.set_axis_off()
            continue
        boundary = boundaries[place]
        longest = 0.0
        for index, route in enumerate(routes):
            for which, schedule in enumerate(schedules):
                y = index + ((which - 0.5) * thick / lane * 1.1 if len(schedules) == 2 else 0)
                start = 0.0
                for stage, color in STAGES.items():
                    span = float(times.get((boundary, route, schedule, stage), 0.0))
                    if span > 0:
                        hatch = "////" if schedule == "fused" else None
                        ax.barh(y, span, thick / lane, start, color=color, ec="white", lw=0.3, hatch=hatch)
                        start += span
                if start:
                    ax.annotate(
                        fixed(start, 2 if start < 10 else 1), (start, y), (2, -0.3),
                        textcoords="offset points",
                        va="center", fontsize=5.6, color=style.INK,
                    )  # fmt: skip
                longest = max(longest, start)
        ax.set_xlim(0, longest * 1.13)
        ax.set_ylim(len(routes) - 0.4, -0.6)
        ax.set_yticks(range(len(routes)), [looks[r].short if r in looks else r for r in routes])
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        style.panel(ax, "abcdefghijkl"[place], boundary.replace("_", " "))
    for column in range(columns):
        last = max(p for p in range(len(boundaries)) if p % columns == column)
        axes[last // columns, column].set_xlabel("time (ms)")
    handles = [Patch(fc=color, label={"gemm": "GEMM"}.get(stage, stage)) for stage, color in STAGES.items()]
    if len(schedules) == 2:
        handles.append(Patch(fc="white", ec=style.GREY, hatch="////", label="fused schedule", lw=0.4))
    figure.legend(
        handles=handles, loc="upper right", ncols=len(handles), frameon=False, fontsize=6.5, handlelength=1.2,
        columnspacing=1.4, bbox_to_anchor=(1 - 0.05 / style.PAGE, 1 - 0.02 / height), borderpad=0,
        borderaxespad=0.2,
    )  # fmt: skip
    return figure
