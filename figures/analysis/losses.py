"""Endpoint loss, validation NLL and data-gradient error, compared with bf16."""

from __future__ import annotations

import numpy as np
import pandas as pd

from figures import published, stats
from figures.analysis.cache import cached
from figures.data import REFERENCE, Tidy

NAN = float("nan")


@cached
def endpoint(tidy: Tidy) -> pd.DataFrame:
    """Per route: step, loss (mean over seeds) and its seed interval, excess over bf16 in percent, paired p.

    Columns: step, seeds, loss, low, high, excess, excess_low, excess_high, p, p_holm; indexed by route.
    """
    frame = tidy.table("endpoint")
    by_route = {route: group.set_index("seed")["loss"] for route, group in frame.groupby("route")}
    reference = by_route.get(REFERENCE, pd.Series(dtype=float))
    rows = []
    for route in tidy.ordered(by_route):
        losses = by_route[route]
        mean = stats.estimate(losses)
        both = pd.concat([losses, reference], axis=1, keys=["route", "bf16"]).dropna()
        excess = 100 * (both["route"] - both["bf16"]) / both["bf16"]
        found = stats.estimate(excess, test=True) if route != REFERENCE else stats.Estimate(0.0, NAN, NAN, 0)
        if route != REFERENCE and both.empty:
            found = stats.Estimate(NAN, NAN, NAN, 0)
        step = int(frame.loc[frame["route"] == route, "step"].max())
        values = (mean.mean, mean.low, mean.high, found.mean, found.low, found.high, found.p)
        rows.append((route, step, mean.n, *values))
    columns = ["route", "step", "seeds", "loss", "low", "high", "excess", "excess_low", "excess_high", "p"]
    result = pd.DataFrame(rows, columns=columns).set_index("route")
    if REFERENCE in result.index and not np.isfinite(result.loc[REFERENCE, "loss"]):
        result.loc[REFERENCE, "excess"] = NAN
    result["p_holm"] = stats.holm(result["p"])
    return result


@cached
def validation(tidy: Tidy) -> pd.DataFrame:
    """Per route and step: NLL with its sequence-level interval, and the paired difference to bf16.

    Columns: route, step, seeds, nll, se, low, high, difference, difference_low, difference_high, p,
    p_holm, paired
    (sequences in the pairing; 0 when the sequence table has none). With several seeds every sequence is first
    averaged over the seeds that both routes have; seed_difference_low/high is the interval over seeds.
    """
    frame = tidy.table("validation")
    columns: list[dict] = []
    sequences = tidy.table("validation_sequences") if tidy.has("validation_sequences") else None
    pairs = _sequence_differences(sequences) if sequences is not None else {}
    reference = frame[frame["route"] == REFERENCE].set_index(["step", "seed"])["nll"]
    for (route, step), group in frame.groupby(["route", "step"]):
        nll, n = float(group["nll"].mean()), int(group["sequences"].iloc[0])
        se = float(np.sqrt((group["se"] ** 2).mean())) if group["se"].notna().any() else NAN
        low, high = stats.interval_from_se(nll, se, n)
        paired = pairs.get((route, step), stats.Estimate(NAN, NAN, NAN, 0))
        seeds = [seed for seed in group["seed"] if (step, seed) in reference.index]
        per_seed = [
            float(group.set_index("seed")["nll"][seed] - reference[(step, seed)])
            for seed in seeds
            if route != REFERENCE
        ]
        over_seeds = stats.estimate(per_seed, test=True)
        difference = paired.mean if paired.n else over_seeds.mean
        columns.append(
            {
                "route": route,
                "step": int(step),
                "seeds": len(group),
                "nll": nll,
                "se": se,
                "low": low,
                "high": high,
                "difference": difference,
                "difference_low": paired.low,
                "difference_high": paired.high,
                "p": paired.p,
                "paired": paired.n,
                "seed_difference_low": over_seeds.low,
                "seed_difference_high": over_seeds.high,
                "seed_p": over_seeds.p,
            }
        )
    result = pd.DataFrame(columns)
    place = {slug: index for index, slug in enumerate(tidy.ordered(result["route"]))}
    result = result.sort_values(["step", "route"], key=lambda s: s.map(place) if s.name == "route" else s)
    result["p_holm"] = NAN
    for _, index in result.groupby("step").groups.items():
        result.loc[index, "p_holm"] = stats.holm(result.loc[index, "p"])
    return result.reset_index(drop=True)


def _sequence_differences(frame: pd.DataFrame) -> dict[tuple[str, int], stats.Estimate]:
    """Paired t test per (route, step) over sequences, each averaged over the seeds that both routes have."""
    result: dict[tuple[str, int], stats.Estimate] = {}
    for step, at_step in frame.groupby("step"):
        wide = at_step.pivot(index=["seed", "sequence"], columns="route", values="nll")
        if REFERENCE not in wide:
            continue
        for route in wide.columns.drop(REFERENCE):
            difference = (wide[route] - wide[REFERENCE]).dropna().groupby("sequence").mean()
            result[(route, int(step))] = stats.estimate(difference, test=True)
    return result


def last_shared_step(tidy: Tidy) -> int | None:
    """Last step at which most routes that did not diverge were validated; ties go to the later step."""
    frame = validation(tidy).dropna(subset=["nll"])
    sound = frame[frame["route"].map(lambda route: tidy.status.get(route) != "diverged")]
    counts = (sound if len(sound) else frame).groupby("step")["route"].nunique()
    return None if counts.empty else int(max(counts.index, key=lambda step: (counts[step], step)))


def published_excess(route: str) -> float | None:
    """The report's endpoint excess over BF16 in percent, from its raw losses."""
    loss = published.number("table07_endpoint_loss", route, "loss")
    reference = published.number("table07_endpoint_loss", REFERENCE, "loss")
    return None if loss is None else 100 * (loss - reference) / reference


@cached
def dgrad(tidy: Tidy) -> pd.DataFrame:
    """Per layer and component, over batches and seeds: mean error energies and geometric-mean ratio.

    Columns: layer, component, error_mxfp4, error_nvfp4_cta, ratio, lower (comparisons where CTA-local is
    lower), n.
    """
    frame = tidy.table("dgrad")
    order = {name: index for index, name in enumerate(dict.fromkeys(frame["component"]))}
    rows = []
    for (layer, component), group in frame.groupby(["layer", "component"]):
        ratio = stats.geometric_mean(group["ratio"])
        lower = int((group["ratio"] > 1).sum())
        means = (float(group["error_mxfp4"].mean()), float(group["error_nvfp4_cta"].mean()))
        rows.append((int(layer), component, *means, ratio, lower, len(group)))
    columns = ["layer", "component", "error_mxfp4", "error_nvfp4_cta", "ratio", "lower", "n"]
    result = pd.DataFrame(rows, columns=columns)
    result["_order"] = result["component"].map(order)
    return result.sort_values(["layer", "_order"]).drop(columns="_order").reset_index(drop=True)
