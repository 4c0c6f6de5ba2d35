"""Figures 11 and 12: speed against quality, and the data-gradient error map."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from figures import analysis, captions, labels, published, stats, style
from figures.data import Tidy
from figures.numbers import count


def data_speed_quality(tidy: Tidy) -> pd.DataFrame:
    """Measured and published points: source, route, tokens_per_s, excess (%), intervals, frontier."""
    measured = analysis.speed_quality(tidy)
    columns = ["route", "tokens_per_s", "p10", "p90", "excess", "excess_low", "excess_high", "frontier"]
    given = analysis.published_speed_quality(tidy).reindex(columns=columns)
    parts = [measured[columns].assign(source="measured"), given.assign(source="published")]
    return pd.concat([part for part in parts if len(part)])[["source", *columns]].reset_index(drop=True)


def caption_speed_quality(tidy: Tidy) -> str:
    diverged = [r for r in tidy.ordered(tidy.status) if tidy.status[r] == "diverged"]
    return captions.join(
        "Throughput against endpoint-loss excess over BF16. Line: the frontier, routes that no other beats "
        "in both. Right and down is better. Bars: 10th to 90th percentile of the rate over the probe window"
        + (", 95% intervals of the excess over seeds." if len(tidy.seeds) > 1 else "."),
        captions.setting(tidy),
        captions.seeds(tidy),
        "On a CPU FP4 is emulated: the measured rates rank the emulation's cost, not hardware."
        if tidy.on_cpu
        else "",
        captions.published_setting("table06_throughput"),
        "Not shown, diverged: " + ", ".join(tidy.label(r) for r in diverged) + "." if diverged else "",
    )


def draw_speed_quality(tidy: Tidy) -> Figure:
    frame, looks = data_speed_quality(tidy), style.looks(tidy)
    figure, grid = style.new(style.PAGE, 3.1, 1, 2, margins=(0.52, 0.1, 0.38, 0.22), wspace=0.2)
    for axes, source, letter in zip(grid[0], ("measured", "published"), "ab"):
        mine = frame[frame["source"] == source]
        title = f"measured, {tidy.meta.get('device', '')}" if source == "measured" else "published, GB200, 8B"
        style.panel(axes, letter, title[:58])
        axes.set_xlabel(
            "throughput (1000 tokens/s per device)"
            if mine["tokens_per_s"].max() >= 5000
            else "throughput (tokens/s per device)"
        )
        if mine.empty:
            axes.text(
                0.5, 0.5, "no route has both a rate and an endpoint", transform=axes.transAxes, ha="center"
            )
            continue
        _scatter(axes, mine, looks)
    grid[0, 0].set_ylabel("endpoint-loss excess over BF16 (%)")
    return figure


def _scatter(axes, mine: pd.DataFrame, looks) -> None:
    """Points with their bars, the frontier, and labels that keep clear of all of them."""
    unit = 1000.0 if mine["tokens_per_s"].max() >= 5000 else 1.0
    x, y = mine["tokens_per_s"] / unit, mine["excess"]
    low, high = mine["excess_low"].fillna(y).min(), mine["excess_high"].fillna(y).max()
    left, right = mine["p10"].fillna(x * unit).min() / unit, mine["p90"].fillna(x * unit).max() / unit
    x_span, y_span = (right - left) or right, (high - low) or 1.0
    axes.set_xlim(left - 0.12 * x_span, right + 0.13 * x_span)
    axes.set_ylim(min(low, 0) - 0.1 * y_span, high + 0.1 * y_span)
    axes.axhline(0, color=style.FAINT, lw=0.6, zorder=0)
    front = mine[mine["frontier"]].sort_values("tokens_per_s")
    front_x, front_y = (front["tokens_per_s"] / unit).tolist(), front["excess"].tolist()
    axes.step(front_x, front_y, where="post", color=style.GREY, lw=0.8, zorder=0)
    points, bars = [], [((x0, y0), (x1, y0)) for x0, x1, y0 in zip(front_x, front_x[1:], front_y)]
    bars += [((x1, y0), (x1, y1)) for x1, y0, y1 in zip(front_x[1:], front_y, front_y[1:])]
    for row in mine.itertuples():
        look = looks.get(row.route) or style.look(row.route)
        px = row.tokens_per_s / unit
        if np.isfinite(row.p10) and np.isfinite(row.p90):
            axes.hlines(row.excess, row.p10 / unit, row.p90 / unit, color=look.color, lw=0.5, alpha=0.6)
            bars.append(((row.p10 / unit, row.excess), (row.p90 / unit, row.excess)))
        if np.isfinite(row.excess_low):
            axes.vlines(px, row.excess_low, row.excess_high, color=look.color, lw=0.7)
            bars.append(((px, row.excess_low), (px, row.excess_high)))
        axes.plot(
            px,
            row.excess,
            look.marker,
            color=look.color,
            ms=7 if look.marker == "*" else 5,
            mew=0.5,
            mec="white",
        )
        points.append({"x": px, "y": row.excess, "text": look.short, "color": look.color})
    labels.beside_points(axes, points, avoid=[_bar_box(axes, *bar) for bar in bars])


def _bar_box(axes, start: tuple[float, float], end: tuple[float, float]) -> Bbox:
    """Window box of a horizontal or vertical line between two data points, one point thick."""
    (x0, y0), (x1, y1) = axes.transData.transform([start, end])
    half = axes.figure.dpi / 144
    return Bbox.from_extents(min(x0, x1) - half, min(y0, y1) - half, max(x0, x1) + half, max(y0, y1) + half)


def data_dgrad(tidy: Tidy) -> pd.DataFrame:
    return analysis.dgrad(tidy)


def caption_dgrad(tidy: Tidy) -> str:
    raw = tidy.table("dgrad")
    if raw.empty:
        return captions.join("Not measured in this study.", captions.setting(tidy))
    ratio, lower = stats.geometric_mean(raw["ratio"]), int((raw["ratio"] > 1).sum())
    given = published.text("table12_dgrad_error", "", "geometric_mean_ratio")
    return captions.join(
        "Error energy of the data gradient under MXFP4 over that under CTA-local NVFP4, on identical saved "
        f"tensors (geometric mean over {count(raw['batch'].nunique(), 'batch', 'batches')}). Above 1 "
        "CTA-local is closer to the unquantised gradient; hatched cells are below 1.",
        f"Geometric mean {ratio:.3f}; CTA-local lower in {lower:,} of {len(raw):,} comparisons.",
        f"Published: {given}, 288 of 288.",
        captions.setting(tidy),
        captions.first_seed(tidy),
    )


def draw_dgrad(tidy: Tidy) -> Figure:
    frame = data_dgrad(tidy)
    if frame.empty:
        figure, grid = style.new(style.COLUMN, 0.8, margins=(0.1, 0.1, 0.1, 0.1))
        grid[0, 0].set_axis_off()
        grid[0, 0].text(0.5, 0.5, "not measured", ha="center", va="center", color=style.GREY)
        return figure
    components, layers = list(dict.fromkeys(frame["component"])), sorted(frame["layer"].unique())
    table = frame.pivot(index="component", columns="layer", values="ratio").reindex(
        index=components, columns=layers
    )
    values = table.to_numpy(float)
    small = len(layers) <= 12
    width = style.COLUMN if small else style.PAGE
    lane = 0.24 if small else 0.3
    left = 0.16 + 0.055 * max(len(component) for component in components)
    figure, grid = style.new(width, lane * len(components) + 0.5, margins=(left, 0.62, 0.4, 0.1))
    axes = grid[0, 0]
    reach = max(1.5, float(np.nanmax(np.maximum(values, 1 / values))))
    image = axes.imshow(
        values, cmap="PuOr", norm=LogNorm(1 / reach, reach), aspect="auto", interpolation="nearest"
    )
    axes.set_yticks(range(len(components)), [c.replace("_", " ") for c in components])
    every = max(1, len(layers) // 16)
    axes.set_xticks(range(0, len(layers), every), [str(v) for v in layers[::every]])
    axes.tick_params(length=0)
    axes.set_xlabel("block")
    for spine in axes.spines.values():
        spine.set_visible(False)
    for row in range(len(components)):
        for column in range(len(layers)):
            value = values[row, column]
            if not np.isfinite(value):
                continue
            if small:
                dark = abs(np.log(value)) > 0.62 * np.log(reach)
                axes.text(
                    column, row, f"{value:.2f}", ha="center", va="center", fontsize=6,
                    color="white" if dark else style.INK,
                )  # fmt: skip
            if value < 1:
                axes.fill_between(
                    [column - 0.5, column + 0.5],
                    row - 0.5,
                    row + 0.5,
                    fc="none",
                    ec=style.INK,
                    hatch="////",
                    lw=0,
                )
    box = axes.get_position()
    bar = figure.add_axes((1 - 0.5 / width, box.y0, 0.09 / width, box.height))
    figure.colorbar(image, cax=bar)
    bar.set_yticks([1 / reach, 1.0, reach])
    bar.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.2f}"))
    bar.yaxis.set_minor_locator(NullLocator())
    bar.set_ylabel("error ratio", fontsize=6.5, labelpad=1)
    bar.tick_params(length=2, width=0.5, labelsize=6)
    return figure
