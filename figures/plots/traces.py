"""Figures 01, 02, 03 and 05: what the quantisers do, drawn from their traces."""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from figures import style
from figures.data import Tidy

RULES = ("mxfp4", "mxfp4_w2d", "mxfp4_decode", "mxfp4_ocp", "mxfp4_rceil", "mxfp4_even")
CLIP = "#D55E00"
LINE = "#0072B2"
TOP_CODE = 6.0


def data_scale_rounding(tidy: Tidy) -> pd.DataFrame:
    """The trace with used_range = amax / (6 x scale): above 1 the largest value is clipped."""
    frame = tidy.table("scale_rounding").copy()
    frame["used_range"] = frame["amax"] / (TOP_CODE * frame["scale"])
    return frame


def caption_scale_rounding(tidy: Tidy) -> str:
    frame = data_scale_rounding(tidy)
    clipped = frame.groupby("rule")["used_range"].max()
    most = ", ".join(
        f"{rule} up to {clipped[rule]:.2f}×"
        for rule in style.in_order(clipped.index, RULES)
        if clipped[rule] > 1.0001
    )
    return (
        "One block, rescaled to every amax, quantised under each E8M0 scale rule. Top: amax over the "
        "largest value that the scale represents (6 × scale); above 1 (shaded) the block's largest value "
        "is clipped"
        + (f" ({most})" if most else "")
        + ". Bottom: squared error of the block relative to its energy. Under each title: the "
        "operands of this study that use the rule. Computed by running the quantisers."
    )


def _users(tidy: Tidy) -> dict[str, str]:
    """Which operands of the study's routes use each format."""
    if not tidy.has("operands"):
        return {}
    frame = tidy.table("operands")
    names = {"x": "X", "w": "W", "dy": "dY"}
    return {
        rule: ", ".join(names[o] for o in ("x", "w", "dy") if o in set(group["operand"]))
        for rule, group in frame.groupby("format")
    }


def draw_scale_rounding(tidy: Tidy) -> Figure:
    frame = data_scale_rounding(tidy)
    rules, users = style.in_order(frame["rule"], RULES), _users(tidy)
    n = len(rules)
    figure, axes = style.new(
        style.PAGE, 2.75, 2, n, margins=(0.48, 0.08, 0.38, 0.36), sharex=True, sharey="row",
        hspace=0.14, wspace=0.12,
        height_ratios=(1, 1),
    )  # fmt: skip
    top = max(1.1, frame["used_range"].max() * 1.05)
    for column, rule in enumerate(rules):
        mine = frame[frame["rule"] == rule].sort_values("amax")
        upper, lower = axes[0, column], axes[1, column]
        upper.axhspan(1, top, color=CLIP, alpha=0.12, lw=0)
        upper.axhline(1, color=CLIP, lw=0.6)
        breaks = mine["scale"].diff().fillna(0) != 0
        for _, piece in mine.groupby(breaks.cumsum()):
            upper.plot(piece["amax"], piece["used_range"], color=LINE)
            lower.plot(piece["amax"], 100 * piece["mse_relative"], color=LINE)
        upper.set_title(rule, pad=11, loc="left")
        upper.text(
            0, 1.03, users.get(rule, "for comparison"), transform=upper.transAxes, fontsize=6.5,
            color=style.GREY,
            va="bottom",
        )  # fmt: skip
        upper.set_xscale("log", base=2)
        low, high = frame["amax"].min(), frame["amax"].max()
        powers = [2.0**k for k in range(int(np.floor(np.log2(low))), int(np.ceil(np.log2(high))) + 1)]
        powers = [p for p in powers if low * 0.98 <= p <= high * 1.02]
        step = max(1, int(np.ceil(len(powers) / 5)))
        lower.xaxis.set_major_locator(FixedLocator(powers[::step]))
        lower.xaxis.set_minor_locator(NullLocator())
        lower.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        lower.set_xlim(low, high)
    axes[0, 0].set_ylim(0, top)
    axes[1, 0].set_ylim(0, 100 * frame["mse_relative"].max() * 1.08)
    axes[0, 0].set_ylabel("amax / (6 × scale)")
    axes[1, 0].set_ylabel("error energy (%)")
    figure.supxlabel("amax of the block", fontsize=7, y=0.015)
    figure.align_ylabels(axes[:, 0])
    return figure


ARROW = {"arrowstyle": "-|>", "lw": 0.6, "mutation_scale": 5, "shrinkA": 0, "shrinkB": 0}
COLUMNS = ("element", "block", "chunk", "stripe", "tensor")
COLUMN_TITLES = {
    "element": "one element",
    "block": "one block (2D: tile)",
    "chunk": "one 128×128 chunk",
    "stripe": "one 256-row stripe",
    "tensor": "the whole tensor",
}
CHIPS = {"codes": "#8ec5ea", "block scale": "#f2c879", "outer scale": "#8fd3b6"}


def data_execution_routes(tidy: Tidy) -> pd.DataFrame:
    return tidy.table("execution_routes")


def _patterns(frame: pd.DataFrame) -> list[tuple[list[str], list[tuple[str, str]]]]:
    """(formats, [(step, column), ...]) of every distinct order of steps; a tile counts as a block."""
    found: dict[tuple, list[str]] = {}
    for name in style.in_order(frame["format"], style.FORMAT_ORDER):
        steps = frame[frame["format"] == name].sort_values("step_order")
        key = tuple((row.step, "block" if row.domain == "tile" else row.domain) for row in steps.itertuples())
        found.setdefault(key, []).append(name)
    return [(names, list(key)) for key, names in found.items()]


def caption_execution_routes(tidy: Tidy) -> str:
    return (
        "How much of the tensor must have been seen before each part of a quantised operand is complete, "
        "found by changing single elements and looking which codes and scales move. Amax steps are outlined, "
        "parts of the result filled. What stands furthest to the right decides when a producer can release "
        "its output. Formats with the same order share a row; a two-dimensional block counts as a tile. "
        "Formulas: Table 2."
    )


def draw_execution_routes(tidy: Tidy) -> Figure:
    patterns = _patterns(data_execution_routes(tidy))
    present = [c for c in COLUMNS if any(c == column for _, steps in patterns for _, column in steps)]
    chip, pitch, label, head = 0.17, 0.2, 1.6, 0.4
    width = (style.PAGE - label - 0.06) / len(present)
    wrapped = [textwrap.wrap(", ".join(names), 24, break_long_words=False) for names, _ in patterns]
    deep = [max(sum(column == c for _, column in steps) for c in present) for _, steps in patterns]
    heights = [max(pitch * n, 0.135 * len(lines)) + 0.14 for n, lines in zip(deep, wrapped)]
    figure, grid = style.new(style.PAGE, head + sum(heights) + 0.04, margins=(0, 0, 0, 0))
    axes = grid[0, 0]
    axes.set_axis_off()
    axes.set_xlim(0, style.PAGE)
    axes.set_ylim(head + sum(heights) + 0.04, 0)
    axes.text(0.06, 0.25, "must have seen", fontsize=6.5, va="center", color=style.GREY)
    for place, column in enumerate(present):
        x = label + width * place
        axes.text(x + 0.02, 0.25, COLUMN_TITLES[column], va="center", fontweight="bold", fontsize=6.8)
    y = head
    for (_, steps), lines, height in zip(patterns, wrapped, heights):
        axes.plot([0.06, style.PAGE - 0.06], [y, y], color=style.FAINT, lw=0.5)
        axes.text(0.06, y + 0.08, "\n".join(lines), fontsize=6.5, va="top", linespacing=1.25)
        previous = None
        for place, column in enumerate(present):
            mine = [step for step, where in steps if where == column]
            x = label + width * place
            for index, step in enumerate(mine):
                top = y + 0.07 + pitch * index
                color = CHIPS.get(step, "#ffffff" if step.endswith("amax") else "#e4e4e4")
                box = FancyBboxPatch(
                    (x, top), width - 0.28, chip, boxstyle="round,pad=0,rounding_size=0.03", fc=color,
                    ec=style.INK, lw=0.5,
                )  # fmt: skip
                axes.add_patch(box)
                text = textwrap.shorten(step, int((width - 0.3) / 0.05), placeholder="…")
                axes.text(
                    x + (width - 0.28) / 2, top + chip / 2, text, fontsize=6.5, ha="center", va="center"
                )
            if mine:
                level = y + 0.07 + chip / 2
                if previous is not None:
                    axes.annotate("", (x, level), (previous, level), arrowprops=ARROW)
                previous = x + width - 0.28
        y += height
    return figure
