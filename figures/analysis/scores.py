"""Downstream scores: paired differences to bf16 in points, their tests, chance."""

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

    Columns: task, metric, route, primary, seeds, step, value (fraction, mean over seeds), se, low, high, n,
    shots, truncated, chance, at_chance, difference, difference_low, difference_high (points), p, p_mcnemar
    (answers of all seeds pooled), p_holm, disagree.
    With one seed the difference is paired by item (exact McNemar test); with several it is paired by seed
    (t test and interval over seeds), since a question asked of three runs is not three questions. The Wilson
    interval of a score is over items for the same reason, whatever the number of seeds.
    """
    frame = tidy.table("downstream")
    items = tidy.table("downstream_items") if tidy.has("downstream_items") else None
    pairs = _item_pairs(items) if items is not None else {}
    reference = frame[frame["route"] == REFERENCE].set_index(["task", "metric", "seed"])["value"]
    rows = []
    for (task, metric, route), group in frame.groupby(["task", "metric", "route"]):
        value, n = float(group["value"].mean()), int(group["n"].iloc[0])
        low, high = stats.wilson(round(value * n), n)
        pair = dict(pairs.get((task, metric, route), {}))
        difference = NAN
        if route != REFERENCE:
            by_seed = group.set_index("seed")["value"]
            shared = [seed for seed in by_seed.index if (task, metric, seed) in reference.index]
            over_seeds = stats.estimate(
                [100 * (by_seed[seed] - reference[task, metric, seed]) for seed in shared], test=True
            )
            difference = over_seeds.mean
            if over_seeds.n > 1:
                pair |= {"p": over_seeds.p, "low": over_seeds.low, "high": over_seeds.high}
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
                "n": n,
                "shots": int(group["shots"].iloc[0]),
                "truncated": float(group["truncated"].max()),
                "chance": float(group["chance"].iloc[0]),
                "at_chance": stats.at_chance(value, n, float(group["chance"].iloc[0])),
                "difference": difference,
                "difference_low": pair.get("low", NAN),
                "difference_high": pair.get("high", NAN),
                "p": pair.get("p", NAN),
                "p_mcnemar": pairs.get((task, metric, route), {}).get("p", NAN),
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
    """Per task, metric and route: McNemar's p and the paired interval of the difference, in points.

    They hold for one seed; `disagree` counts the answers of all seeds.
    """
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
