"""Figures 09 and 10: validation NLL per checkpoint and downstream scores against bf16."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from figures import analysis, captions, labels, published, stats, style
from figures.data import REFERENCE, Tidy
from figures.numbers import as_read, count, fixed


def data_validation(tidy: Tidy) -> pd.DataFrame:
    return analysis.validation(tidy)


def caption_validation(tidy: Tidy) -> str:
    frame = analysis.validation(tidy)
    raw = tidy.table("validation")
    paired = int(frame["paired"].max())
    difference = (
        "(b) Difference to BF16, paired by seed, with 95% t intervals over seeds."
        if _by_seed(tidy)
        else f"(b) Difference to BF16 on the same {paired:,} sequences, with 95% paired t intervals."
        if paired
        else "(b) Difference to BF16; the inputs hold no per-sequence losses, so no interval is known."
    )
    streams = raw["stream_sha256"].dropna().unique()
    return captions.join(
        f"(a) Mean NLL on the fixed validation stream ({int(raw['sequences'].max()):,} sequences, "
        f"{int(raw['tokens'].max()):,} targets) at every checkpoint, with 95% sequence-level intervals; "
        "routes are shifted sideways within a checkpoint. Small axes, where present: the last shared "
        "checkpoint closer. The intervals of (a) are wide because sequences "
        "differ among themselves; they do not compare routes.",
        difference,
        f"Labels: value at step {analysis.last_shared_step(tidy):,}.",
        captions.setting(tidy),
        captions.seeds(tidy),
        f"Stream SHA-256 {streams[0][:12]}." if len(streams) == 1 else "",
        captions.diverged(tidy),
    )


def _by_seed(tidy: Tidy) -> bool:
    """Whether differences carry intervals over seeds, as the report's verdicts do; else over sequences."""
    return len(tidy.seeds) > 1 and bool(analysis.validation(tidy)["seed_p"].notna().any())


def _limits(tidy: Tidy, frame: pd.DataFrame, columns: tuple[str, ...]) -> tuple[float, float]:
    sound = frame[frame["route"].map(lambda r: tidy.status.get(r) != "diverged")]
    values = (sound if len(sound) else frame)[list(columns)].to_numpy(float)
    values = values[np.isfinite(values)]
    low, high = (values.min(), values.max()) if values.size else (0.0, 1.0)
    pad = 0.05 * ((high - low) or 1.0)
    return low - pad, high + pad


def draw_validation(tidy: Tidy) -> Figure:
    frame, looks = analysis.validation(tidy), style.looks(tidy)
    routes = tidy.ordered(frame["route"])
    others = [
        r for r in routes if r != REFERENCE and frame.loc[frame["route"] == r, "difference"].notna().any()
    ]
    # without single sequences the values are a ledger's, and keep the six decimals that the report prints
    decimals = 4 if frame["difference_low"].notna().any() else 6
    between = 1.95 if decimals == 4 else 2.12  # inches, for the labels of (a)
    if others:
        figure, grid = style.new(
            style.PAGE,
            3.4,
            1,
            2,
            margins=(0.48, 1.42, 0.36, 0.2),
            width_ratios=(1, 0.92),
            wspace=2 * between / (5.16 - between),
        )
        left, right = grid[0]
    else:
        figure, grid = style.new(style.COLUMN, 2.9, margins=(0.48, 1.45, 0.36, 0.2))
        left, right = grid[0, 0], None
    ticks = _ticks(tidy, frame)
    gap = min(np.diff(ticks), default=max(ticks))
    left.set_ylim(*_limits(tidy, frame, ("low", "high", "nll")))
    columns = ("nll", "low", "high")
    _points(tidy, left, frame, routes, gap, columns, looks, value=lambda v: fixed(as_read(v), decimals))
    left.set_ylabel("validation NLL (nats/token)")
    _closer(tidy, left, frame, routes, looks)
    style.panel(left, "a")
    if right is not None:
        right.axhline(0, color="black", lw=0.8)
        prefix = "seed_" if _by_seed(tidy) else ""
        columns = ("difference", f"{prefix}difference_low", f"{prefix}difference_high")
        low, high = _limits(tidy, frame, columns)
        right.set_ylim(min(low, -0.03 * (high - low)), max(high, 0.03 * (high - low)))
        _points(tidy, right, frame, others, gap, columns, looks, value=lambda v: fixed(v, 4, signed=True))
        right.set_ylabel("NLL − NLL of BF16 (nats/token)")
        style.panel(right, "b")
    for axes in (left, right):
        if axes is not None:
            short = max(ticks) >= 10_000
            axes.set_xticks(ticks, [f"{step / 1000:g}k" if short else str(step) for step in ticks])
            axes.set_xlabel("checkpoint (step)")
    return figure


# corners of panel (a) for the closer view: x, y, width, height in shares of the axes
CORNERS = ((0.56, 0.55, 0.44, 0.4), (0.64, 0.6, 0.36, 0.35), (0.2, 0.06, 0.44, 0.36))


def _closer(tidy: Tidy, axes, frame, routes, looks) -> None:
    """The last shared checkpoint at its own scale, in a corner that no point or curve enters.

    Left out where the panel itself shows it well enough, or no corner is free.
    """
    shared = analysis.last_shared_step(tidy)
    mine = frame[(frame["step"] == shared) & frame["nll"].notna()].set_index("route")
    low, high = _limits(tidy, mine.reset_index(), ("low", "high", "nll"))
    bottom, top = axes.get_ylim()
    box = next((corner for corner in CORNERS if _is_free(axes, corner)), None)
    if box is None or high - low > 0.4 * (top - bottom):
        return
    inset = axes.inset_axes(box)
    for place, route in enumerate([route for route in routes if route in mine.index]):
        look, row = looks.get(route) or style.look(route), mine.loc[route]
        inset.vlines(place, row["low"], row["high"], color=look.color, lw=0.7)
        inset.plot(place, row["nll"], look.marker, color=look.color, ms=2.8, mew=0)
    inset.set_xlim(-1, len(mine))
    inset.set_ylim(low, high)
    inset.set_xticks([])
    inset.spines["bottom"].set_visible(False)
    inset.yaxis.set_major_locator(MaxNLocator(4))
    inset.tick_params(labelsize=6)
    inset.set_title(f"step {shared:,}, closer", fontsize=6.5, fontweight="normal", color=style.GREY, pad=2)


def _is_free(axes, corner: tuple[float, float, float, float]) -> bool:
    """Whether no curve of ``axes`` comes into ``corner`` or its ticks; curves are looked at in 200 points."""
    x, y, width, height = corner
    x0, x1, y0, y1 = x - 0.14, x + width, y - 0.03, y + height + 0.05
    for line in axes.lines:
        if line.get_transform() != axes.transData:
            continue  # leaders of labels, outside
        points = axes.transAxes.inverted().transform(axes.transData.transform(line.get_xydata()))
        if not len(points):
            continue
        at = np.linspace(0, len(points) - 1, 200)
        px, py = (np.interp(at, np.arange(len(points)), points[:, k]) for k in (0, 1))
        if ((px > x0) & (px < x1) & (py > y0) & (py < y1)).any():
            return False
    return True


def _ticks(tidy: Tidy, frame: pd.DataFrame) -> list[int]:
    """Checkpoints to name on the axis, a sixth of the range apart: the last shared one and back from there.

    Checkpoints that fewer than half as many routes have as the commonest are drawn without a tick.
    """
    counts = frame.groupby("step")["route"].nunique()
    steps = [int(step) for step in counts.index[counts >= counts.max() / 2]]
    kept = [analysis.last_shared_step(tidy) or steps[-1]]
    for step in reversed(steps):
        if kept[-1] - step >= 0.16 * (steps[-1] - steps[0]):
            kept.append(step)
    return kept[::-1]


def _points(tidy: Tidy, axes, frame, routes, gap, columns, looks, value) -> None:
    """Dodged points with intervals and thin lines; labels at the last shared checkpoint."""
    middle, low, high = columns
    steps, shared = sorted(frame["step"].unique()), analysis.last_shared_step(tidy)
    width = gap * min(0.5, 0.06 * (len(routes) - 1))
    room = 0.6 * width + 0.03 * max(steps)
    axes.set_xlim(min(steps) - room, max(steps) + room)
    entries = []
    for place, route in enumerate(routes):
        look = looks.get(route) or style.look(route)
        mine = frame[(frame["route"] == route) & frame[middle].notna()].sort_values("step")
        if mine.empty:
            continue
        shift = width * (place / max(1, len(routes) - 1) - 0.5)
        x = mine["step"] + shift
        axes.plot(x, mine[middle], color=look.color, ls=look.dash, lw=0.6, alpha=0.6)
        axes.vlines(x, mine[low], mine[high], color=look.color, lw=0.7)
        axes.plot(x, mine[middle], look.marker, color=look.color, ms=2.8, mew=0)
        at_shared = mine[mine["step"] == shared]
        end = at_shared.iloc[0] if len(at_shared) else mine.iloc[-1]
        text = f"{look.short} {value(float(end[middle]))}"
        if at_shared.empty:
            state = tidy.status.get(route)
            text = f"{look.short} " + ("diverged" if state == "diverged" else f"to step {int(end['step']):,}")
        entries.append(
            {
                "x": end["step"] + shift,
                "y": end[middle],
                "text": text,
                "color": look.color,
                "marker": look.marker,
            }
        )
    labels.at_ends(axes, entries)


def data_downstream(tidy: Tidy) -> pd.DataFrame:
    """Points against bf16, measured (with the paired 95% interval) and published."""
    frame = analysis.downstream(tidy)
    frame = frame[frame["primary"]].copy()
    given, guessing = [], []
    for row in frame.itertuples():
        key = f"{row.task}/{row.metric}"
        value = published.number("table08_downstream", row.route, key)
        reference = published.number("table08_downstream", REFERENCE, key)
        items = published.number("table08_downstream", "", f"{row.task}/items")
        given.append(np.nan if value is None or reference is None else 100 * (value - reference))
        guessing.append(bool(value is not None and items and stats.at_chance(value, int(items), row.chance)))
    frame["published_difference"], frame["published_at_chance"] = given, guessing
    columns = ["task", "metric", "route", "n", "value", "chance", "at_chance", "difference", "difference_low"]
    return frame[[*columns, "difference_high", "p_holm", "published_difference", "published_at_chance"]]


def caption_downstream(tidy: Tidy) -> str:
    frame = analysis.downstream(tidy)
    frame = frame[frame["primary"]]
    unit = "seed" if len(tidy.seeds) > 1 else "item"
    sizes = ", ".join(
        f"{analysis.TASKS.get(task, (task,))[0]} {count(int(n), 'item')}"
        for task, n in frame.groupby("task", sort=False)["n"].first().items()
    )  # fmt: skip
    return captions.join(
        f"Score minus the score of BF16, in percentage points. Top: measured on {sizes}, with 95% intervals "
        f"paired by {unit}. Bottom: published, one trajectory per route, no interval given. Hollow: the "
        "score itself is indistinguishable from guessing.",
        captions.setting(tidy),
        captions.seeds(tidy),
        captions.published_setting("table08_downstream"),
    )


def draw_downstream(tidy: Tidy) -> Figure:
    frame, looks = data_downstream(tidy), style.looks(tidy)
    tasks = list(dict.fromkeys(frame["task"]))
    routes = [r for r in tidy.ordered(frame["route"]) if r != REFERENCE]
    if not routes:
        routes = tidy.ordered(frame["route"])
    lane = 0.155
    height = 2 * lane * len(routes) + 1.25
    figure, grid = style.new(
        style.PAGE, height, 2, len(tasks), margins=(1.1, 0.42, 0.36, 0.34), wspace=0.42,
        hspace=0.5 / (lane * len(routes)),
        sharey=True,
    )  # fmt: skip
    rows = (("difference", "measured"), ("published_difference", "published"))
    for line, (column, title) in enumerate(rows):
        for place, task in enumerate(tasks):
            axes = grid[line, place]
            mine = frame[frame["task"] == task].set_index("route")
            known = mine.loc[[r for r in routes if r in mine.index], column].dropna()
            axes.axvline(0, color="black", lw=0.8)
            for route, value in known.items():
                look = looks.get(route) or style.look(route)
                y, row = routes.index(route), mine.loc[route]
                hollow = bool(row["published_at_chance" if line else "at_chance"])
                if line == 0 and np.isfinite(row["difference_low"]):
                    axes.hlines(y, row["difference_low"], row["difference_high"], color=look.color, lw=0.9)
                axes.plot(
                    value,
                    y,
                    look.marker,
                    ms=3.8,
                    mew=0.7,
                    mec=look.color,
                    mfc="white" if hollow else look.color,
                )
                axes.text(
                    1.02, y, fixed(value, 2, signed=True), transform=axes.get_yaxis_transform(), fontsize=6,
                    va="center", ha="left", color=style.GREY,
                )  # fmt: skip
            axes.set_ylim(len(routes) - 0.4, -0.6)
            axes.set_yticks(range(len(routes)), [(looks.get(r) or style.look(r)).short for r in routes])
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
            axes.grid(axis="y", color=style.FAINT, lw=0.3)
            axes.set_axisbelow(True)
            edges = [known.min() if len(known) else 0, known.max() if len(known) else 0, 0]
            if line == 0 and len(known):
                edges += [
                    mine.loc[known.index, "difference_low"].min(),
                    mine.loc[known.index, "difference_high"].max(),
                ]
            reach = np.nanmax(np.abs(edges)) * 1.08 or 1.0
            axes.set_xlim(-reach, reach)
            name = analysis.TASKS.get(task, (task, ""))[0]
            axes.set_title(name if line == 0 else "", pad=4)
            axes.set_xlabel(f"{title} (points)", labelpad=2)
            if not len(known):
                axes.set_xticks([])
                axes.text(
                    0,
                    (len(routes) - 1) / 2,
                    "not published" if line else "no BF16 score",
                    ha="center",
                    fontsize=6.5,
                )
    return figure
