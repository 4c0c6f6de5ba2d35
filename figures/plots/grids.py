"""Figures 03 and 05: outer-scale domains and two-dimensional weights, as maps of traced values."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from figures import style
from figures.data import Tidy
from figures.schema import TidyError


def data_cta_scaling(tidy: Tidy) -> pd.DataFrame:
    return tidy.table("scaling_domains")


def _panels(frame: pd.DataFrame) -> list[tuple[str, str, np.ndarray]]:
    """(title, remark, grid) of every panel: amax, then each format's outer scale and chunk factor."""

    def grid(rows: pd.DataFrame, column: str) -> np.ndarray:
        return rows.pivot(index="row_chunk", columns="col_chunk", values=column).to_numpy(dtype=float)

    panels = []
    formats = style.in_order(frame["format"], style.FORMAT_ORDER)
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
