"""Downstream scores: paired differences to bf16 in points, McNemar's test, chance."""

from __future__ import annotations

import pandas as pd

from figures import stats
from figures.analysis.cache import cached
from figures.data import REFERENCE, Tidy

TASKS = {
    "mmlu": ("MMLU", "acc"),
    "hellaswag": ("HellaSwag", "acc_norm"),
    "winogrande": ("WinoGrande", "acc"),
    "arc_challenge": ("ARC-Challenge", "acc_norm"),
}
NAN = float("nan")


@cached
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
                "truncated": float(group["truncated"].max()),
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
