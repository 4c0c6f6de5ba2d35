"""Tables 07, 08 and 12: loss, downstream scores and data-gradient error."""

from __future__ import annotations

import numpy as np

from figures import analysis, captions, published, stats
from figures.data import REFERENCE, Tidy
from figures.numbers import as_read, count, decimals_for, percent
from figures.tables.model import Column, Table
from figures.tables.speed import minus

CHANCE = "†"


def endpoint_loss(tidy: Tidy) -> Table:
    """table07: raw loss at the last shared step, excess over bf16; measured, published, difference."""
    frame, name = analysis.endpoint(tidy), "table07_endpoint_loss"
    several = int(frame["seeds"].max()) > 1
    rows: list[dict[str, object]] = []
    for route, row in frame.iterrows():
        given, given_excess = published.text(name, route, "loss"), analysis.published_excess(route)
        control = route == REFERENCE
        rows.append(
            {
                "route": route,
                "label": tidy.label(route),
                "step": int(row["step"]),
                "seeds": int(row["seeds"]),
                "loss": as_read(row["loss"]),
                "interval": (row["low"], row["high"]),
                "excess": None if control else row["excess"],
                "excess_interval": (row["excess_low"], row["excess_high"]),
                "p": row["p"],
                "p_holm": row["p_holm"],
                "published_loss": given,
                "published_excess": None if control else given_excess,
                "difference_loss": minus(row["loss"], given),
                "difference_excess": None if control else minus(row["excess"], given_excess),
            }
        )
    test = "p: paired t test against BF16 over seeds, Holm-adjusted over the routes." if several else ""
    return Table(
        name=name,
        title="Endpoint loss",
        caption=captions.join(
            f"Raw training loss (nats/token) at step {int(frame['step'].max()):,}, the last that all routes "
            "share, and its excess over BF16.",
            captions.setting(tidy),
            captions.seeds(tidy),
            captions.published_setting(name),
        ),
        columns=[
            Column("route", "Slug", csv_only=True),
            Column("label", "Route"),
            Column("step", "Step", csv_only=True),
            Column("seeds", "Seeds", csv_only=True),
            Column("loss", "Loss", "Measured", 6, best="min"),
            *([Column("interval", "95%", "Measured", 4, interval=True)] if several else []),
            Column("excess", "Excess %", "Measured", 2, signed=True, best="min"),
            *(
                [
                    Column("excess_interval", "95%", "Measured", 2, signed=True, interval=True),
                    Column("p", "p", csv_only=True),
                    Column("p_holm", "p", "Measured", 3, p=True),
                ]
                if several
                else []
            ),
            Column("published_loss", "Loss", "Published", 6, best="min"),
            Column("published_excess", "Excess %", "Published", 2, signed=True, best="min"),
            Column("difference_loss", "Loss", "Difference", 6, signed=True),
            Column("difference_excess", "Excess, points", "Difference", 2, signed=True),
        ],
        rows=rows,
        notes=[
            *([test] if test else []),
            "Published losses carry the digits that the report prints. Difference: measured minus "
            "published; losses of different models and data differ for that reason alone, the excess is "
            "the comparable number.",
            "Blank: the reference itself, a route that diverged or was not run, or not published.",
            *([captions.diverged(tidy)] if captions.diverged(tidy) else []),
        ],
    )


def _truncated(most: float) -> str:
    """'no prompt truncated, ', '3 prompts truncated, ', '' where nobody counted."""
    if np.isnan(most):
        return ""
    return f"{count(int(most), 'prompt') if most else 'no prompt'} truncated, "


def downstream(tidy: Tidy) -> Table:
    """table08: four tasks; score, interval, paired difference and McNemar's test against bf16; published
    beside it."""
    frame, name = analysis.downstream(tidy), "table08_downstream"
    secondary = frame[~frame["primary"]].set_index(["task", "route"])["value"]
    rows: list[dict[str, object]] = []
    marks: dict[tuple[int, str], str] = {}
    for row in frame[frame["primary"]].itertuples():
        task, control = row.task, row.route == REFERENCE
        metric = f"{task}/{row.metric}"
        given, reference = published.text(name, row.route, metric), published.number(name, REFERENCE, metric)
        items = published.number(name, "", f"{task}/items")
        title = analysis.TASKS.get(task, (task, ""))[0]
        shots, cut = count(row.shots, "shot"), None if np.isnan(row.truncated) else int(row.truncated)
        most = frame.loc[frame["task"] == task, "truncated"].max()  # of all routes: it heads their rows
        index = len(rows)
        published_chance = bool(given and items and stats.at_chance(float(given), int(items), row.chance))
        if row.at_chance:
            marks[index, "value"] = CHANCE
        if published_chance:
            marks[index, "published"] = CHANCE
        other = secondary.get((task, row.route))
        rows.append(
            {
                "task": f"{title}, {row.metric}, {shots}, {count(row.n, 'item')}, {_truncated(most)}"
                f"chance {100 * row.chance:g}%",
                "task_name": task,
                "metric": row.metric,
                "route": row.route,
                "label": tidy.label(row.route),
                "seeds": row.seeds,
                "items": row.n,
                "shots": row.shots,
                "truncated": cut,
                "value": 100 * row.value,
                "interval": (100 * row.low, 100 * row.high),
                "secondary": None if other is None else 100 * float(other),
                "difference": None if control else row.difference,
                "difference_interval": (row.difference_low, row.difference_high),
                "disagree": None if np.isnan(row.disagree) else int(row.disagree),
                "p": row.p,
                "p_mcnemar": row.p_mcnemar,
                "p_holm": row.p_holm,
                "at_chance": row.at_chance,
                "published": percent(given),
                "published_difference": None
                if control or given is None
                else 100 * (float(given) - (reference or 0)),
                "published_at_chance": published_chance if given else None,
                "published_gap": minus(100 * row.value, percent(given)),
            }
        )
    steps = sorted(set(frame["step"]))
    return Table(
        name=name,
        title="Downstream scores",
        caption=captions.join(
            f"Scores in percent at step {', '.join(f'{s:,}' for s in steps)}, BF16 inference, 95% "
            "Wilson intervals over items.",
            captions.setting(tidy),
            captions.seeds(tidy),
            captions.published_setting(name),
        ),
        section="task",
        columns=[
            Column("task", "Task", csv_only=True),
            Column("task_name", "Task name", csv_only=True),
            Column("metric", "Metric", csv_only=True),
            Column("route", "Slug", csv_only=True),
            Column("label", "Route"),
            Column("seeds", "Seeds", csv_only=True),
            Column("items", "Items", csv_only=True),
            Column("shots", "Shots", csv_only=True),
            Column("truncated", "Truncated", csv_only=True),
            Column("value", "Score", "Measured", 2, best="max"),
            Column("interval", "95%", "Measured", 1, interval=True),
            Column("secondary", "acc", "Measured", 2),
            Column("difference", "vs BF16", "Measured", 2, signed=True),
            Column("difference_interval", "95% paired", "Measured", 1, signed=True, interval=True),
            Column("disagree", "Items that differ", csv_only=True),
            Column("p", "p", csv_only=True),
            Column("p_mcnemar", "McNemar p, answers of all seeds", csv_only=True),
            Column("p_holm", "p", "Measured", 3, p=True),
            Column("at_chance", "At chance", csv_only=True),
            Column("published", "Score", "Published", 2, best="max"),
            Column("published_difference", "vs BF16", "Published", 2, signed=True),
            Column("published_at_chance", "Published at chance", csv_only=True),
            Column("published_gap", "Score", "Difference", 2, signed=True),
        ],
        rows=rows,
        marks=marks,
        notes=[
            f"{CHANCE} indistinguishable from guessing: the 95% Wilson interval contains the chance score.",
            "acc: accuracy without length normalisation, where the compared score is acc_norm. vs BF16: "
            + (
                "points, paired by seed. p: paired t test over seeds, Holm-adjusted over all routes and "
                "tasks."
                if len(tidy.seeds) > 1
                else "points, paired by item. p: exact McNemar test on the same items, Holm-adjusted over "
                "all routes and tasks."
            ),
            "Difference: measured minus published, in points. Blank: the reference itself, no such "
            "metric, no spread to test, or not published.",
        ],
    )


def dgrad_error(tidy: Tidy) -> Table:
    """table12: error energies per layer and component, geometric means, the published ratio."""
    frame, name = analysis.dgrad(tidy), "table12_dgrad_error"
    energies = [*frame["error_mxfp4"], *frame["error_nvfp4_cta"]]
    places = decimals_for(energies, 3)
    rows: list[dict[str, object]] = [
        {
            "layer": str(row.layer),
            "component": row.component.replace("_", " "),
            "error_mxfp4": row.error_mxfp4,
            "error_nvfp4_cta": row.error_nvfp4_cta,
            "ratio": row.ratio,
            "lower": f"{row.lower}/{row.n}",
        }
        for row in frame.itertuples()
    ]
    summary = set(range(len(rows), len(rows) + frame["component"].nunique() + (len(rows) > 0)))
    raw = tidy.table("dgrad")
    groups = [(c, raw[raw["component"] == c]) for c in dict.fromkeys(frame["component"])]
    if len(raw):
        groups.append(("all", raw))
    for component, group in groups:
        ratio = stats.geometric_mean(group["ratio"])
        everything = component == "all"
        given = published.text(name, "", "geometric_mean_ratio") if everything else None
        both = [published.text(name, "", key) for key in ("cta_lower", "comparisons")]
        rows.append(
            {
                "layer": "Geometric mean",
                "component": component.replace("_", " "),
                "error_mxfp4": stats.geometric_mean(group["error_mxfp4"]),
                "error_nvfp4_cta": stats.geometric_mean(group["error_nvfp4_cta"]),
                "ratio": ratio,
                "lower": f"{int((group['ratio'] > 1).sum())}/{len(group)}",
                "published_ratio": given,
                "published_lower": "/".join(both) if everything else None,  # type: ignore[arg-type]
                "difference_ratio": minus(ratio, given),
            }
        )
    return Table(
        name=name,
        title="Data-gradient error",
        caption=captions.join(
            "Not measured in this study: the route that it examines diverged." if raw.empty else "",
            "Error energy of dX against the unquantised product on identical saved tensors, relative to "
            f"its energy, averaged over {count(raw['batch'].nunique(), 'batch', 'batches')}; ratio: "
            "geometric mean of MXFP4 error over CTA-local NVFP4 error.",
            captions.setting(tidy),
            captions.first_seed(tidy),
            captions.published_setting(name),
        ),
        columns=[
            Column("layer", "Block"),
            Column("component", "Component"),
            Column("error_mxfp4", "MXFP4", "Measured", places),
            Column("error_nvfp4_cta", "CTA-local NVFP4", "Measured", places),
            Column("ratio", "Ratio", "Measured", 3),
            Column("lower", "CTA-local lower", "Measured"),
            Column("published_ratio", "Ratio", "Published", 3),
            Column("published_lower", "CTA-local lower", "Published"),
            Column("difference_ratio", "Ratio", "Difference", 3, signed=True),
        ],
        rows=rows,
        summary=summary,
        notes=[
            "A ratio above 1: CTA-local NVFP4 has the lower error. Published values exist for the "
            "overall mean only."
        ],
    )
