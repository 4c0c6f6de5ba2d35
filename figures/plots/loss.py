"""Figures 07 and 08: training loss (EMA over 31 logged points), relative difference to bf16, raw
endpoints."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from figures import analysis, captions, labels, stats, style
from figures.data import REFERENCE, Tidy
from figures.numbers import fixed

LONG = 240  # points of the longest history from which on others can be sparse beside it
GAP = 10  # usual step distances that end a stretch of a history
POINTS = 700


def _curves(tidy: Tidy) -> dict[str, pd.DataFrame]:
    """Per route: step, ema (mean over seeds), low, high (seed interval), raw, relative, relative_low,
    relative_high.

    The relative difference is 100 (L_bf16 - L) / L_bf16 of the EMA at the steps that both routes logged,
    paired by seed. Where a history is sparse beside the others (stretches of fewer points than the average
    spans, with gaps between them) it is not smoothed: its ema is then the raw loss, compared with the raw
    loss of bf16, and the average starts anew after it.
    """
    if "loss_curves" in tidy.cache:
        return tidy.cache["loss_curves"]  # type: ignore[return-value]
    frame = tidy.table("losses")
    raw: dict[str, dict[int, pd.Series]] = {}
    for (route, seed), group in frame.sort_values("step").groupby(["route", "seed"], sort=False):
        group = group[np.isfinite(group["loss"])]
        if len(group):
            raw.setdefault(route, {})[int(seed)] = group.set_index("step")["loss"]
    longest = max((loss for by_seed in raw.values() for loss in by_seed.values()), key=len)
    usual = float(np.median(np.diff(longest.index))) if len(longest) > LONG else np.inf
    smooth = {
        route: {seed: _smoothed(loss, usual) for seed, loss in by_seed.items()}
        for route, by_seed in raw.items()
    }
    result = {}
    for route in tidy.ordered(raw):
        alone = pd.DataFrame({seed: found.isna() for seed, found in smooth[route].items()})
        sparse = alone.eq(True).any(axis=1)
        per_seed = pd.DataFrame({s: found.fillna(raw[route][s]) for s, found in smooth[route].items()})
        reference, raw_reference = smooth.get(REFERENCE, {}), raw.get(REFERENCE, {})
        shared = [seed for seed in per_seed if seed in reference]
        relative = pd.DataFrame(
            {
                # raw against raw where there is no average: one lags where the loss falls
                s: _percent_below(reference[s], smooth[route][s]).fillna(
                    _percent_below(raw_reference[s], raw[route][s][smooth[route][s].isna()])
                )
                for s in shared
            }
        ).reindex(per_seed.index)
        out = pd.DataFrame({"step": per_seed.index, "ema": per_seed.mean(axis=1).to_numpy()})
        out["low"], out["high"] = _band(per_seed)
        out["relative"] = relative.mean(axis=1).to_numpy() if shared else np.nan
        out["relative_low"], out["relative_high"] = _band(relative) if shared else (np.nan, np.nan)
        out["sparse"] = sparse.to_numpy()
        result[route] = out.reset_index(drop=True)
    tidy.cache["loss_curves"] = result
    return result


def _smoothed(loss: pd.Series, usual: float) -> pd.Series:
    """EMA of every stretch of a history without a gap; NaN in stretches shorter than the average's span,
    where the history has several."""
    steps = loss.index.to_numpy()
    stretch = np.concatenate([[0], np.cumsum(np.diff(steps) > GAP * usual)])
    parts = [loss[stretch == number] for number in range(stretch[-1] + 1)]
    if len(parts) == 1:
        return pd.Series(stats.ema(loss), index=loss.index)
    short = [len(part) < stats.EMA_SPAN for part in parts]
    values = [np.full(len(p), np.nan) if s else stats.ema(p) for p, s in zip(parts, short)]
    return pd.Series(np.concatenate(values), index=loss.index)


def _percent_below(reference: pd.Series, loss: pd.Series) -> pd.Series:
    """100 (reference - loss) / reference at the steps of ``loss``; NaN where one of them has none."""
    at = reference.reindex(loss.index)
    return 100 * (at - loss) / at


def _band(per_seed: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """95% t interval over seeds at every step; NaN with one seed."""
    if per_seed.shape[1] < 2:
        return np.full(len(per_seed), np.nan), np.full(len(per_seed), np.nan)
    from scipy.stats import t

    n = per_seed.count(axis=1).to_numpy()
    mean, deviation = per_seed.mean(axis=1).to_numpy(), per_seed.std(axis=1, ddof=1).to_numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        half = t.ppf(0.975, np.maximum(n - 1, 1)) * deviation / np.sqrt(n)
    half = np.where(n > 1, half, np.nan)
    return mean - half, mean + half


def _thinned(curve: pd.DataFrame) -> pd.DataFrame:
    """At most 700 rows of what is smoothed, and every sparse point."""
    dense = np.flatnonzero(~curve["sparse"].to_numpy(bool))
    keep = np.union1d(stats.thin(dense, POINTS), np.flatnonzero(curve["sparse"].to_numpy(bool)))
    return curve.iloc[keep]


def data_loss(tidy: Tidy) -> pd.DataFrame:
    """What the figure plots: at most 700 points per route, EMA taken over all points before."""
    frames = [_thinned(curve).assign(route=route) for route, curve in _curves(tidy).items()]
    columns = ["route", "step", "ema", "low", "high", "relative", "relative_low", "relative_high", "sparse"]
    return pd.concat(frames)[columns].reset_index(drop=True)


def data_zoom(tidy: Tidy) -> pd.DataFrame:
    """The last quarter of the steps, thinned after the cut."""
    curves = _curves(tidy)
    start = _zoom_start(curves)
    frames = [_thinned(curve[curve["step"] >= start]).assign(route=route) for route, curve in curves.items()]
    return pd.concat(frames)[["route", "step", "ema", "low", "high", "sparse"]].reset_index(drop=True)


def _zoom_start(curves: dict[str, pd.DataFrame]) -> float:
    return 0.75 * max(curve["step"].max() for curve in curves.values())


def _bands_note(tidy: Tidy) -> str:
    return "Bands and bars: 95% t intervals over seeds." if len(tidy.seeds) > 1 else ""


def _sparse_note(tidy: Tidy) -> str:
    sparse = [route for route, curve in _curves(tidy).items() if curve["sparse"].any()]
    if not sparse:
        return ""
    named = ", ".join(f"{tidy.label(r)} ({int(_curves(tidy)[r]['sparse'].sum())} points)" for r in sparse)
    return f"Sparse histories are drawn as points with a LOWESS guide that no number uses: {named}."


def caption_loss(tidy: Tidy) -> str:
    return captions.join(
        "(a) Training loss, exponential moving average over 31 logged points (EMA-31). (b) Relative "
        "difference 100 (L_BF16 − L)/L_BF16 of the EMA-31 losses, thin, with LOWESS as a visual guide "
        "only, thick; below zero is worse than BF16. (c) The same of the raw losses at the last shared "
        "step, in percent.",
        captions.setting(tidy),
        captions.seeds(tidy),
        _bands_note(tidy),
        _sparse_note(tidy),
        captions.diverged(tidy),
    )


def caption_zoom(tidy: Tidy) -> str:
    return captions.join(
        "Training loss over the last quarter of the steps, EMA-31. Labels in the order of the curves' ends.",
        captions.setting(tidy),
        captions.seeds(tidy),
        _bands_note(tidy),
        _sparse_note(tidy),
        captions.diverged(tidy),
    )


def _sound(tidy: Tidy, curves: dict[str, pd.DataFrame]) -> list[str]:
    """Routes that set the axis limits: those that did not diverge."""
    good = [route for route in curves if tidy.status.get(route) != "diverged"]
    return good or list(curves)


def _guide(x: pd.Series, y: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """LOWESS curve over a quarter of the points (more where that is fewer than 20), broken where
    there are no data."""
    points = int(np.isfinite(y).sum())
    gx, gy = stats.lowess(x, y, min(0.9, max(0.25, 20 / max(points, 1))))
    steps = np.diff(gx)
    gaps = np.flatnonzero(steps > 8 * np.median(steps)) + 1 if steps.size else []
    return np.insert(gx, gaps, np.nan), np.insert(gy, gaps, np.nan)


def _draw_curve(axes, curve: pd.DataFrame, look: style.Look, place: int) -> None:
    """One EMA curve with a few markers, staggered by route; points and LOWESS where it is sparse."""
    curve = _thinned(curve)
    points = curve[curve["sparse"]]
    if len(points):
        axes.plot(points["step"], points["ema"], look.marker, ms=2.0, color=look.color, alpha=0.8, mew=0)
        guide = _guide(points["step"], points["ema"])
        axes.plot(*guide, color=look.color, lw=0.8, ls=look.dash)
        curve = curve.assign(ema=curve["ema"].mask(curve["sparse"]))  # the line stops where points begin
    if curve["ema"].isna().all():
        return
    if curve["low"].notna().any():
        axes.fill_between(curve["step"], curve["low"], curve["high"], color=look.color, alpha=0.15, lw=0)
    every = max(1, len(curve) // 6)
    start = (place * every // 12) % every
    axes.plot(
        curve["step"], curve["ema"], color=look.color, ls=look.dash, lw=0.9, marker=look.marker, ms=2.6,
        markevery=(start, every), mew=0.4,
    )  # fmt: skip


def draw_loss(tidy: Tidy) -> Figure:
    curves, looks = _curves(tidy), style.looks(tidy)
    if REFERENCE not in curves:
        return _draw_without_reference(tidy, curves, looks)
    figure, grid = style.new(
        style.PAGE, 3.2, 1, 3, margins=(0.47, 1.5, 0.36, 0.2), width_ratios=(1, 1, 0.22), wspace=0.36
    )
    left, middle, right = grid[0]
    box_m, box_r = middle.get_position(), right.get_position()
    right.set_position([box_m.x1 + 0.014, box_r.y0, box_r.x1 - box_m.x1 - 0.014, box_r.height])
    sound = _sound(tidy, curves)
    last = max(curve["step"].max() for curve in curves.values())
    for place, (route, curve) in enumerate(curves.items()):
        look = looks.get(route) or style.look(route)
        _draw_curve(left, curve, look, place)
        if route == REFERENCE:
            middle.axhline(0, color=look.color, lw=1.1)
            continue
        thin = _thinned(curve)
        if thin["relative_low"].notna().any():
            middle.fill_between(
                thin["step"], thin["relative_low"], thin["relative_high"], color=look.color, alpha=0.12, lw=0
            )
        points = thin[thin["sparse"]]
        middle.plot(
            points["step"], points["relative"], look.marker, color=look.color, alpha=0.4, ms=1.6, mew=0
        )
        line = thin["relative"].mask(thin["sparse"])
        middle.plot(thin["step"], line, color=look.color, alpha=0.4, lw=0.5)
        guide = _guide(thin["step"], thin["relative"])
        middle.plot(*guide, color=look.color, ls=look.dash, lw=1.1)
    late = [curve[curve["step"] >= 0.1 * last] for route, curve in curves.items() if route in sound]
    left.set_ylim(_range(*(curve[["ema", "low", "high"]] for curve in late), pad=0.04))
    ends = analysis.endpoint(tidy)
    final = -ends.loc[[r for r in sound if r in ends.index], ["excess", "excess_low", "excess_high"]]
    bands = [curve[["relative", "relative_low", "relative_high"]] for curve in late]
    middle.set_ylim(_range(*bands, final, [0.0], pad=0.06))
    for axes in (left, middle):
        axes.set_xlim(0, last)
        axes.set_xlabel("optimizer step")
    left.set_ylabel("training loss, EMA-31 (nats/token)")
    middle.set_ylabel(r"$100\,(L_{\mathrm{BF16}} - L)\,/\,L_{\mathrm{BF16}}$ (%)", labelpad=1)
    style.panel(left, "a")
    style.panel(middle, "b")
    _endpoints(tidy, right, middle.get_ylim(), ends, looks)
    return figure


def _range(*values: object, pad: float) -> tuple[float, float]:
    """Limits that hold all finite ``values``, intervals as well as means, and ``pad`` of their span."""
    found = np.concatenate([np.asarray(part, dtype=float).ravel() for part in values])
    found = found[np.isfinite(found)]
    low, high = found.min(), found.max()
    return low - pad * ((high - low) or 1), high + pad * ((high - low) or 1)


def _endpoints(tidy: Tidy, axes, limits: tuple[float, float], ends: pd.DataFrame, looks) -> None:
    """Markers at minus the endpoint excess, with the seed interval and labels to the right."""
    axes.set_ylim(limits)
    axes.set_xlim(-1, 1)
    axes.set_xticks([])
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    style.panel(axes, "c", "endpoint")
    axes.axhline(0, color="black", lw=0.5)
    entries = []
    for place, (route, row) in enumerate(ends.iterrows()):
        look = looks.get(route) or style.look(route)
        x = 1.7 * (place + 0.5) / len(ends) - 0.85
        if not np.isfinite(row["excess"]):
            text = f"{look.short} {tidy.status.get(route, 'no endpoint')}"
            entries.append({"x": 1, "y": limits[0], "text": text, "color": look.color, "marker": look.marker})
            continue
        y = -row["excess"]
        if np.isfinite(row["excess_low"]):
            axes.plot([x, x], [-row["excess_high"], -row["excess_low"]], color=look.color, lw=0.8)
        inside = limits[0] <= y <= limits[1]
        axes.plot(
            x, np.clip(y, *limits), look.marker if inside else "v", color=look.color, ms=3.6, clip_on=False
        )
        text = look.short if route == REFERENCE else f"{look.short} {fixed(y, 2, signed=True)}"
        entries.append({"x": x, "y": y, "text": text, "color": look.color})
    labels.at_ends(axes, entries, offset=1, reach=8)


def _draw_without_reference(tidy: Tidy, curves, looks) -> Figure:
    """Losses alone: without bf16 there is nothing to compare with."""
    figure, grid = style.new(style.COLUMN, 2.8, margins=(0.42, 1.15, 0.36, 0.1))
    _draw_ends(tidy, grid[0, 0], curves, looks, 0.0)
    return figure


def draw_zoom(tidy: Tidy) -> Figure:
    curves, looks = _curves(tidy), style.looks(tidy)
    figure, grid = style.new(style.COLUMN, 2.9, margins=(0.52, 1.38, 0.36, 0.08))
    _draw_ends(tidy, grid[0, 0], curves, looks, _zoom_start(curves))
    return figure


def _draw_ends(tidy: Tidy, axes, curves: dict[str, pd.DataFrame], looks, start: float) -> None:
    """Curves from ``start`` with labels at their ends; limits from the routes that did not diverge."""
    last = max(curve["step"].max() for curve in curves.values())
    visible = {route: curve[curve["step"] >= start] for route, curve in curves.items()}
    skip = 0.08 * last if start == 0 else 0.0
    sound = [visible[r].loc[visible[r]["step"] >= skip, ["ema", "low", "high"]] for r in _sound(tidy, curves)]
    axes.set_ylim(_range(*sound, pad=0.05))
    axes.set_xlim(start, last)
    entries = []
    for place, (route, curve) in enumerate(visible.items()):
        look = looks.get(route) or style.look(route)
        text, diverged = look.short, tidy.status.get(route) == "diverged"
        if curve.empty:
            entries.append(
                {
                    "x": last,
                    "y": axes.get_ylim()[1],
                    "text": f"{text} {tidy.status.get(route, '')}",
                    "color": look.color,
                }
            )
            continue
        _draw_curve(axes, curve, look, place)
        end = curve.iloc[-1]
        entries.append(
            {
                "x": end["step"],
                "y": np.clip(end["ema"], *axes.get_ylim()),
                "text": f"{text} diverged" if diverged else text,
                "color": look.color,
            }
        )
    for entry, route in zip(entries, visible):
        entry["marker"] = (looks.get(route) or style.look(route)).marker
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss, EMA-31 (nats/token)")
    labels.at_ends(axes, entries)
