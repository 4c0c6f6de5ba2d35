"""The first page's table: one row per route with its status, rate, losses and verdict."""

from __future__ import annotations

import numpy as np
import pandas as pd

from figures import analysis, stats
from figures.data import REFERENCE, Tidy
from figures.summary import verdicts as validation_verdicts
from figures.tables.model import Column, Table


def headline(tidy: Tidy) -> Table:
    """One row per route: status, rate, endpoint excess, validation difference and verdict."""
    ends = analysis.endpoint(tidy) if tidy.has("endpoint") else pd.DataFrame()
    rates = (
        analysis.throughput(tidy).drop_duplicates("route").set_index("route")
        if tidy.has("throughput")
        else None
    )
    verdicts = validation_verdicts(tidy) if tidy.has("validation") else pd.DataFrame()
    rows: list[dict[str, object]] = []
    for route in tidy.slugs:
        known = route in verdicts.index and np.isfinite(verdicts.loc[route, "verdict_p"])
        row: dict[str, object] = {
            "route": route,
            "label": tidy.label(route),
            "status": tidy.status.get(route),
        }
        if rates is not None and route in rates.index:
            row["ratio"] = float(rates.loc[route, "ratio"])
        if route in ends.index and route != REFERENCE:
            row["excess"] = float(ends.loc[route, "excess"])
            row["published_excess"] = analysis.published_excess(route)
        if known:
            mine = verdicts.loc[route]
            row["difference"] = float(mine["difference"])
            row["interval"] = (mine["verdict_low"], mine["verdict_high"])
            row["p"] = float(mine["verdict_p"])
        row["verdict"] = _verdict(tidy, route, verdicts.loc[route] if known else None)
        rows.append(row)
    step = analysis.last_shared_step(tidy) if tidy.has("validation") else None
    return Table(
        name="summary_routes",
        title="All routes at a glance",
        caption="Rate and losses against BF16"
        + (f"; validation at step {step:,}, paired, Holm-adjusted over the routes." if step else "."),
        columns=[
            Column("route", "Slug", csv_only=True),
            Column("label", "Route"),
            Column("status", "Run", csv_only=True),
            Column("verdict", "Verdict on validation"),
            Column("ratio", "Rate, × BF16", decimals=2),
            Column("excess", "measured", "Endpoint excess %", 2, signed=True),
            Column("published_excess", "published", "Endpoint excess %", 2, signed=True),
            Column("difference", "nats/token", "Validation NLL − BF16", 4, signed=True),
            Column("interval", "95%", "Validation NLL − BF16", 4, signed=True, interval=True),
            Column("p", "p", "Validation NLL − BF16", 3, p=True),
        ],
        rows=rows,
        notes=["Blank: the reference itself, not measured, or not published."],
    )


def _verdict(tidy: Tidy, route: str, row: pd.Series | None) -> str:
    if route == REFERENCE:
        return "reference"
    if tidy.status.get(route) == "diverged":
        return "diverged"
    if row is None:
        return "not tested"
    if not row["verdict_p"] < stats.ALPHA:
        return "not distinguishable"
    word = "worse" if row["difference"] > 0 else "better"
    return f"{word} than BF16" if row["by_seeds"] else f"{word}, this run"
