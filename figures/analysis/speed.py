"""Throughput, and the frontier of speed and quality."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from figures import published, stats
from figures.analysis.cache import cached
from figures.analysis.losses import endpoint
from figures.data import REFERENCE, Tidy


@cached
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


@cached
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


def frontier(rate: ArrayLike, excess: ArrayLike) -> np.ndarray:
    """True where no other point is at least as fast and as close to bf16, and better in one."""
    rate, excess = np.asarray(rate, dtype=float), np.asarray(excess, dtype=float)
    better = (rate[None] >= rate[:, None]) & (excess[None] <= excess[:, None])
    strictly = (rate[None] > rate[:, None]) | (excess[None] < excess[:, None])
    return ~(better & strictly).any(axis=1)
