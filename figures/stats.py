"""Intervals and paired tests, all from statsmodels; smoothing for the loss curves.

Every interval is 95%. One value has no interval: the functions then give NaN, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

ALPHA = 0.05
EMA_SPAN = 31


@dataclass(frozen=True)
class Estimate:
    """Mean of n values with its 95% interval (NaN for n < 2) and the p value of mean = 0 where it was
    tested."""

    mean: float
    low: float
    high: float
    n: int
    p: float = float("nan")


def estimate(values: ArrayLike, *, test: bool = False) -> Estimate:
    """Mean and t interval of ``values``, NaN dropped; with ``test`` the two-sided p value against a mean
    of zero.

    Apply it to paired differences for a paired t test. Identical values have no spread: the interval is
    their value
    and no p value is given.
    """
    from statsmodels.stats.weightstats import DescrStatsW

    array = np.asarray(values, dtype=float)
    array = array[np.isfinite(array)]
    if array.size == 0:
        return Estimate(np.nan, np.nan, np.nan, 0)
    if array.size == 1:
        return Estimate(float(array[0]), np.nan, np.nan, 1)
    mean = float(array.mean())
    if np.ptp(array) == 0:
        return Estimate(mean, mean, mean, array.size)
    described = DescrStatsW(array)
    low, high = described.tconfint_mean(alpha=ALPHA)
    p = float(described.ttest_mean(0.0)[1]) if test else np.nan
    return Estimate(mean, float(low), float(high), array.size, p)


def interval_from_se(mean: float, se: float, n: int) -> tuple[float, float]:
    """95% t interval of a mean from its standard error over n units; (nan, nan) when either is missing."""
    from scipy.stats import t

    if not np.isfinite(mean) or not np.isfinite(se) or n < 2:
        return np.nan, np.nan
    half = float(t.ppf(1 - ALPHA / 2, n - 1)) * se
    return mean - half, mean + half


def holm(p_values: ArrayLike) -> np.ndarray:
    """Holm-adjusted p values; NaN stays NaN and counts as no test.

    The same numbers as statsmodels' ``multipletests(method="holm")`` (a test compares them), which collects
    garbage on every call and so costs more than all else in a table.
    """
    p = np.asarray(p_values, dtype=float)
    adjusted = np.full(p.shape, np.nan)
    tested = np.flatnonzero(np.isfinite(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(factors * p[order]))
    return adjusted


def mcnemar(reference: ArrayLike, other: ArrayLike) -> float:
    """Exact McNemar p value of paired 0/1 outcomes; 1.0 when no pair disagrees, NaN without pairs."""
    from statsmodels.stats.contingency_tables import mcnemar as test

    a, b = np.asarray(reference, dtype=int), np.asarray(other, dtype=int)
    if a.size == 0:
        return np.nan
    table = [[int(((a == i) & (b == j)).sum()) for j in (1, 0)] for i in (1, 0)]
    if table[0][1] + table[1][0] == 0:
        return 1.0
    return float(min(1.0, test(table, exact=True).pvalue))


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95% Wilson interval of a proportion."""
    from statsmodels.stats.proportion import proportion_confint

    low, high = proportion_confint(successes, n, alpha=ALPHA, method="wilson")
    return float(low), float(high)


def at_chance(value: float, n: int, chance: float) -> bool:
    """Whether the 95% Wilson interval of a score contains the score of a guess."""
    low, high = wilson(round(value * n), n)
    return low <= chance <= high


def ema(values: ArrayLike, span: int = EMA_SPAN) -> np.ndarray:
    """Exponential moving average over logged points, weight 2/(span + 1), started at the first value."""
    return pd.Series(np.asarray(values, dtype=float)).ewm(span=span, adjust=False).mean().to_numpy()


def lowess(x: ArrayLike, y: ArrayLike, fraction: float = 0.25) -> tuple[np.ndarray, np.ndarray]:
    """LOWESS curve through (x, y), a guide for the eye. At most 400 points enter; no number is taken
    from it."""
    from statsmodels.nonparametric.smoothers_lowess import lowess as smooth

    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    keep = np.isfinite(x) & np.isfinite(y)
    x, y = thin(x[keep], 400), thin(y[keep], 400)
    if x.size < 5:
        return x, y
    result = smooth(y, x, frac=fraction, it=0, return_sorted=True)
    return result[:, 0], result[:, 1]


def thin(values: np.ndarray, most: int) -> np.ndarray:
    """At most ``most`` elements, evenly spaced by index, ends kept."""
    if len(values) <= most:
        return values
    return values[np.unique(np.linspace(0, len(values) - 1, most).round().astype(int))]


def geometric_mean(values: ArrayLike) -> float:
    """Geometric mean of positive values; NaN when there is none."""
    array = np.asarray(values, dtype=float)
    array = array[np.isfinite(array) & (array > 0)]
    return float(np.exp(np.log(array).mean())) if array.size else float("nan")
