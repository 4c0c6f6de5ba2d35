"""Facts that several tables, figures and the report's conclusions share: one computation each, kept per
study.

All comparisons are against the `bf16` route and paired: by seed for endpoint losses, by sequence for
validation, by
item for downstream scores. Families for Holm's correction: the routes of one endpoint; the routes of one
checkpoint;
the routes x tasks of the downstream scores (primary metrics).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from figures import published, stats
from figures.data import REFERENCE, Tidy

TASKS = {
    "mmlu": ("MMLU", "acc"),
    "hellaswag": ("HellaSwag", "acc_norm"),
    "winogrande": ("WinoGrande", "acc"),
    "arc_challenge": ("ARC-Challenge", "acc_norm"),
}
NAN = float("nan")


def _cached(function):
    def wrapper(tidy: Tidy):
        if function.__name__ not in tidy.cache:
            tidy.cache[function.__name__] = function(tidy)
        return tidy.cache[function.__name__]

    wrapper.__doc__ = function.__doc__
    wrapper.__name__ = function.__name__
    return wrapper


@_cached
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


@_cached
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


@_cached
def downstream(tidy: Tidy) -> pd.DataFrame:
    """Per task, metric and route: score, chance, paired difference to bf16 in points, McNemar and Holm.

    Columns: task, metric, route, primary, seeds, step, value (fraction, mean over seeds), se, low, high,
    n, shots,
    truncated, chance, at_chance, difference, difference_low, difference_high (points), p, p_holm, disagree.
    Items of several seeds are pooled for McNemar's test.
    """
    frame = tidy.table("downstream")
    items = tidy.table("downstream_items") if tidy.has("downstream_items") else None
    pairs = _item_pairs(items) if items is not None else {}
    reference = frame[frame["route"] == REFERENCE].groupby(["task", "metric"])["value"].mean()
    rows = []
    for (task, metric, route), group in frame.groupby(["task", "metric", "route"]):
        value, n = float(group["value"].mean()), int(group["n"].sum())
        low, high = stats.wilson(round(value * n), n)
        difference = 100 * (value - reference.get((task, metric), NAN)) if route != REFERENCE else NAN
        pair = pairs.get((task, metric, route), {})
        rows.append(
            {
                "task": task,
                "metric": metric,
                "route": route,
                "primary": metric == TASKS.get(task, ("", metric))[1],
                "seeds": len(group),
                "step": int(group["step"].max()),
                "value": value,
                "se": float(group["se"].mean()),
                "low": low,
                "high": high,
                "n": int(group["n"].iloc[0]),
                "shots": int(group["shots"].iloc[0]),
                "truncated": int(group["truncated"].max()),
                "chance": float(group["chance"].iloc[0]),
                "at_chance": stats.at_chance(value, n, float(group["chance"].iloc[0])),
                "difference": difference,
                "difference_low": pair.get("low", NAN),
                "difference_high": pair.get("high", NAN),
                "p": pair.get("p", NAN),
                "disagree": pair.get("disagree", NAN),
            }
        )
    result = pd.DataFrame(rows)
    place = {slug: index for index, slug in enumerate(tidy.ordered(result["route"]))}
    tasks = {task: index for index, task in enumerate(TASKS)}
    result["_route"] = result["route"].map(place)
    result["_task"] = result["task"].map(lambda task: tasks.get(task, len(tasks)))
    result = result.sort_values(["_task", "task", "metric", "_route"]).drop(columns=["_route", "_task"])
    result["p_holm"] = NAN
    family = result["primary"] & (result["route"] != REFERENCE)
    result.loc[family, "p_holm"] = stats.holm(result.loc[family, "p"])
    return result.reset_index(drop=True)


def _item_pairs(items: pd.DataFrame) -> dict[tuple[str, str, str], dict[str, float]]:
    """Per task, metric and route: McNemar's p and the paired interval of the difference, in points."""
    result = {}
    for (task, metric), group in items.groupby(["task", "metric"]):
        wide = group.pivot(index=["seed", "item"], columns="route", values="correct")
        if REFERENCE not in wide:
            continue
        for route in wide.columns.drop(REFERENCE):
            both = wide[[REFERENCE, route]].dropna()
            found = stats.estimate(100 * (both[route] - both[REFERENCE]))
            result[(task, metric, route)] = {
                "p": stats.mcnemar(both[REFERENCE], both[route]),
                "low": found.low,
                "high": found.high,
                "disagree": int((both[route] != both[REFERENCE]).sum()),
            }
    return result


@_cached
def throughput(tidy: Tidy) -> pd.DataFrame:
    """Throughput per geometry and route, medians averaged over seeds, with the ratio to bf16.

    Columns: those of throughput.csv less seed, plus seeds, ratio, low and high (seed interval of the rate).
    """
    frame = tidy.table("throughput")
    rows = []
    for (geometry, route), group in frame.groupby(["geometry", "route"]):
        rate = stats.estimate(group["tokens_per_s"])
        first = group.iloc[0].to_dict()
        means = {key: float(group[key].mean()) for key in ("p10", "p90", "mfu", "memory_gib")}
        changes = {"tokens_per_s": rate.mean, "low": rate.low, "high": rate.high, "seeds": len(group)}
        rows.append({**first, **means, **changes, "geometry": geometry, "route": route})
    result = pd.DataFrame(rows).drop(columns="seed")
    reference = result[result["route"] == REFERENCE].set_index("geometry")["tokens_per_s"]
    result["ratio"] = result["tokens_per_s"] / result["geometry"].map(reference).astype(float)
    place = {slug: index for index, slug in enumerate(tidy.ordered(result["route"]))}
    result["_place"] = result["route"].map(place)
    order = {"selected": 0, "matched": 1}
    result["_geometry"] = result["geometry"].map(order)
    return (
        result.sort_values(["_geometry", "_place"])
        .drop(columns=["_place", "_geometry"])
        .reset_index(drop=True)
    )


@_cached
def speed_quality(tidy: Tidy) -> pd.DataFrame:
    """Per route: rate in the selected geometry (else matched), endpoint excess, and whether it is on the
    frontier."""
    rates = throughput(tidy)
    for geometry in ("selected", "matched"):
        chosen = rates[rates["geometry"] == geometry]
        if len(chosen):
            break
    frame = chosen.set_index("route")[["tokens_per_s", "p10", "p90"]].join(endpoint(tidy), how="inner")
    frame = frame.dropna(subset=["tokens_per_s", "excess"]).reset_index()
    frame["frontier"] = frontier(frame["tokens_per_s"], frame["excess"])
    return frame


def published_speed_quality(tidy: Tidy) -> pd.DataFrame:
    """The report's rate and endpoint excess per route of this study that it compared."""
    reference = published.number("table07_endpoint_loss", REFERENCE, "loss")
    rows = []
    for row in published.rows():
        if row["table"] == "table07_endpoint_loss" and row["metric"] == "loss":
            rate = published.number("table06_throughput", row["route"], "tokens_per_s")
            if rate is not None:
                rows.append((row["route"], rate, 100 * (float(row["value"]) - reference) / reference))
    frame = pd.DataFrame(rows, columns=["route", "tokens_per_s", "excess"])
    frame["frontier"] = frontier(frame["tokens_per_s"], frame["excess"])
    known = tidy.ordered(frame["route"])
    return frame.set_index("route").loc[known].reset_index()


def frontier(rate, excess) -> np.ndarray:
    """True where no other point is at least as fast and as close to bf16, and better in one."""
    rate, excess = np.asarray(rate, dtype=float), np.asarray(excess, dtype=float)
    better = (rate[None] >= rate[:, None]) & (excess[None] <= excess[:, None])
    strictly = (rate[None] > rate[:, None]) | (excess[None] < excess[:, None])
    return ~(better & strictly).any(axis=1)


def published_excess(route: str) -> float | None:
    """The report's endpoint excess over BF16 in percent, from its raw losses."""
    loss = published.number("table07_endpoint_loss", route, "loss")
    reference = published.number("table07_endpoint_loss", REFERENCE, "loss")
    return None if loss is None else 100 * (loss - reference) / reference


@_cached
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
