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
from figures.schema import TidyError

RULES = ("mxfp4", "mxfp4_w2d", "mxfp4_decode", "mxfp4_ocp", "mxfp4_rceil", "mxfp4_even")
CLIP = "#D55E00"
LINE = "#0072B2"
FORMAT_ORDER = ("mxfp4", "mxfp4_w2d", "nvfp4_te", "nvfp4", "nvfp4_w2d", "nvfp4_cta", "nvfp4_cta_w2d", "ue5m3")
TOP_CODE = 6.0


def _in_order(names, order) -> list[str]:
    seen = list(dict.fromkeys(names))
    return [name for name in order if name in seen] + [name for name in seen if name not in order]


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
        for rule in _in_order(clipped.index, RULES)
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
    rules, users = _in_order(frame["rule"], RULES), _users(tidy)
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
    for name in _in_order(frame["format"], FORMAT_ORDER):
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


def data_cta_scaling(tidy: Tidy) -> pd.DataFrame:
    return tidy.table("scaling_domains")


def _panels(frame: pd.DataFrame) -> list[tuple[str, str, np.ndarray]]:
    """(title, remark, grid) of every panel: amax, then each format's outer scale and chunk factor."""

    def grid(rows: pd.DataFrame, column: str) -> np.ndarray:
        return rows.pivot(index="row_chunk", columns="col_chunk", values=column).to_numpy(dtype=float)

    panels = []
    formats = _in_order(frame["format"], FORMAT_ORDER)
    first = frame[frame["format"] == formats[0]]
    if first["amax"].notna().all():
        panels.append(("amax", "input, per chunk", grid(first, "amax")))
    for name in formats:
        mine = frame[frame["format"] == name]
        if mine["chunk_factor"].notna().all() and mine["outer_scale"].nunique() > 1:
            panels.append((name, "factor g, per chunk", grid(mine, "chunk_factor")))
        values = grid(mine, "outer_scale")
        distinct = len(np.unique(values))
        per_row = distinct > 1 and all(len(set(row)) == 1 for row in values)
        if distinct == 1:
            remark = "outer: 1 value"
        elif per_row:
            remark = f"outer: {distinct} stripes"
        else:
            remark = f"outer: {distinct} values"
        panels.append((name, remark, values))
    return panels


def caption_cta_scaling(tidy: Tidy) -> str:
    frame = data_cta_scaling(tidy)
    rows, columns = frame["row_chunk"].max() + 1, frame["col_chunk"].max() + 1
    return (
        f"Outer scales of one matrix of {rows}×{columns} chunks of 128×128 values, per format, as powers of "
        "two below each panel's largest. A constant and a tensor scale are one value; CTA-local NVFP4 "
        "computes a factor per chunk and folds it into the block scales under one outer scale per 256-row "
        "stripe. Computed by running the quantisers."
    )


def draw_cta_scaling(tidy: Tidy) -> Figure:
    panels = _panels(data_cta_scaling(tidy))
    columns = min(len(panels), 7)
    rows = -(-len(panels) // columns)
    size = (style.PAGE - 0.1 - 0.62) / columns
    figure, axes = style.new(
        style.PAGE,
        rows * (size + 0.34) + 0.04,
        rows,
        columns,
        margins=(0.06, 0.62, 0.06, 0.34),
        wspace=0.1,
        hspace=0.36,
    )
    relative = [np.log2(values / np.nanmax(values)) for _, _, values in panels]
    low = min(-1.0, float(np.floor(min(np.nanmin(v) for v in relative))))
    image = None
    for place, ((title, remark, _), values) in enumerate(zip(panels, relative)):
        ax = axes[place // columns, place % columns]
        image = ax.imshow(values, cmap="cividis", vmin=low, vmax=0, interpolation="nearest")
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_title(title, pad=11)
        ax.text(0, 1.03, remark, transform=ax.transAxes, fontsize=6.5, color=style.GREY, va="bottom")
        for spine in ax.spines.values():
            spine.set_visible(False)
        ax.set_xticks(np.arange(-0.5, values.shape[1]), minor=True)
        ax.set_yticks(np.arange(-0.5, values.shape[0]), minor=True)
        ax.grid(which="minor", color="white", lw=0.6)
        ax.tick_params(which="both", length=0)
    for place in range(len(panels), rows * columns):
        axes[place // columns, place % columns].set_axis_off()
    box = axes[0, columns - 1].get_position()
    bar = figure.add_axes((1 - 0.52 / style.PAGE, box.y0, 0.09 / style.PAGE, box.height))
    figure.colorbar(image, cax=bar, ticks=sorted({0, int(low / 2), int(low)}))
    bar.set_ylabel("log2 (value / largest)", fontsize=6.5)
    bar.tick_params(length=2, width=0.5)
    bar.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0f}".replace("-", "−")))
    return figure


def data_weight_2d(tidy: Tidy) -> pd.DataFrame:
    """The trace with the format and the view split."""
    frame = tidy.table("weight_2d").copy()
    frame[["format", "view"]] = frame["layout"].str.split("/", expand=True)
    return frame


def _views(frame: pd.DataFrame) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(format, values from W, values from its transpose) for every format with both views; 2D formats
    first."""
    found = []
    for name in sorted(frame["format"].unique(), key=lambda n: (not n.endswith("_w2d"), n)):
        grids = [
            frame[(frame["format"] == name) & (frame["view"] == view)].pivot(
                index="row", columns="col", values="value"
            )
            for view in ("row", "column")
        ]
        if all(len(grid) for grid in grids):
            found.append((name, grids[0].to_numpy(float), grids[1].to_numpy(float)))
    return found


def caption_weight_2d(tidy: Tidy) -> str:
    parts = []
    for name, row, column in _views(data_weight_2d(tidy)):
        differ = 100 * float(np.mean(row != column))
        parts.append(f"{name}: {differ:.1f}% of the decoded values differ")
    return (
        "One small weight, quantised from W (for Fprop) and from its transpose (for Dgrad), both in W's "
        "orientation, and the size of their difference (darkest: the largest). Two-dimensional blocks give "
        "one encoding for both layouts; one-dimensional blocks give two. "
        + "; ".join(parts)
        + ". Computed by running the quantisers."
    )


def draw_weight_2d(tidy: Tidy) -> Figure:
    views = _views(data_weight_2d(tidy))
    if not views:
        raise TidyError("weight_2d.csv holds no format with both views: needed FORMAT/row and FORMAT/column")
    n = len(views)
    figure, axes = style.new(
        style.COLUMN, 0.24 + 1.06 * n, n, 3, margins=(0.16, 0.5, 0.17, 0.18), wspace=0.06, hspace=0.18
    )
    limit = float(np.quantile(np.abs(np.concatenate([row.ravel() for _, row, _ in views])), 0.99)) or 1.0
    most = max(float(np.abs(row - column).max()) for _, row, column in views) or 1.0
    for place, (name, row, column) in enumerate(views):
        difference = row - column
        for ax, values in zip(axes[place], (row, column)):
            image = ax.imshow(values, cmap="PuOr", vmin=-limit, vmax=limit, interpolation="nearest")
        axes[place, 2].imshow(
            np.abs(difference), cmap="Greys", vmin=0, vmax=0.6 * most, interpolation="nearest"
        )
        for ax, title in zip(axes[place], ("from W", "from Wᵀ", "|difference|")):
            ax.set_xticks([])
            ax.set_yticks([])
            for spine in ax.spines.values():
                spine.set(visible=True, color=style.FAINT)
            if place == 0:
                ax.set_title(title, loc="center", pad=3)
        axes[place, 0].set_ylabel(name, fontsize=6.5, labelpad=2)
        share = 100 * float(np.mean(difference != 0))
        remark = f"{share:.1f}% differ" if share else "0 everywhere"
        axes[place, 2].set_xlabel(remark, fontsize=6.5, labelpad=2)
    top, bottom = axes[0, 2].get_position(), axes[-1, 2].get_position()
    bar = figure.add_axes((1 - 0.42 / style.COLUMN, bottom.y0, 0.08 / style.COLUMN, top.y1 - bottom.y0))
    figure.colorbar(image, cax=bar, extend="both")
    bar.set_ylabel("decoded value", fontsize=6.5, labelpad=1)
    bar.tick_params(length=2, width=0.5, labelsize=6)
    return figure
