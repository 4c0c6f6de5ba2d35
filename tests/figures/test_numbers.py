"""Digits, intervals, tests and label positions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, ttest_rel

from figures import labels, stats
from figures.numbers import FIGURE_SPACE, MINUS, decimals_for, fixed, p_equals, p_value, percent

CASES = [
    ("2.4282", 6, {}, "2.4282"),
    ("2.385180711746216", 6, {}, "2.385181"),
    ("37876.75", 1, {}, "37,876.8"),
    ("126.205", 2, {}, "126.21"),
    ("37394", 1, {}, "37,394"),
    (-0.16, 2, {"signed": True}, MINUS + "0.16"),
    (0.79, 2, {"signed": True}, "+0.79"),
    (0.0, 2, {"signed": True}, "0.00"),
    (-0.0001, 2, {"signed": True}, "0.00"),
    (2.0, 3, {}, "2.000"),
    (float("nan"), 2, {}, ""),
    (None, 2, {}, ""),
    ("2.4282", 6, {"pad": True}, "2.4282" + 2 * FIGURE_SPACE),
]


@pytest.mark.parametrize(("value", "decimals", "options", "text"), CASES)
def test_numbers_print_no_digit_that_they_do_not_have(value, decimals, options, text):
    assert fixed(value, decimals, **options) == text


def test_percent_keeps_digits_and_p_values_keep_meaning():
    assert str(percent("0.28635522005412334")) == "28.635522005412334"
    assert [p_value(p) for p in (0.0001, 0.0123, 0.5, math.nan)] == ["<0.001", "0.012", "0.50", ""]
    assert (p_equals(0.0001), p_equals(0.5)) == ("p < 0.001", "p = 0.50")
    assert decimals_for([0.0123, 1.0]) == 4 and decimals_for([]) == 1


def test_one_value_has_no_interval_and_identical_values_no_test():
    single = stats.estimate([1.0], test=True)
    assert (single.mean, single.n) == (1.0, 1) and math.isnan(single.low) and math.isnan(single.p)
    same = stats.estimate([2.0, 2.0], test=True)
    assert same.low == same.high == 2.0 and math.isnan(same.p)


def test_paired_t_is_scipys():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=20), rng.normal(size=20)
    found = stats.estimate(a - b, test=True)
    expected = ttest_rel(a, b)
    interval = expected.confidence_interval()
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_mcnemar_is_the_exact_binomial_test_on_disagreements():
    a = np.array([1] * 9 + [0] * 3 + [1] * 20 + [0] * 7)
    b = np.array([0] * 9 + [1] * 3 + [1] * 20 + [0] * 7)
    assert stats.mcnemar(a, b) == pytest.approx(binomtest(9, 12, 0.5).pvalue)
    assert stats.mcnemar(a, a) == 1.0


def test_holm_steps_down_and_ignores_untested():
    adjusted = stats.holm([0.01, math.nan, 0.04, 0.03])
    assert adjusted[[0, 2, 3]] == pytest.approx([0.03, 0.06, 0.06]) and math.isnan(adjusted[1])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_statsmodels(p_values):
    from statsmodels.stats.multitest import multipletests

    assert stats.holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1])


def test_chance_is_judged_by_the_wilson_interval():
    assert stats.at_chance(0.2518871955561886, 14042, 0.25)
    assert not stats.at_chance(0.28635522005412334, 14042, 0.25)


def test_ema_is_the_published_recurrence():
    # First logged points of the report's snapshot have weight 2/32 on each new point.
    x = np.array([12.26, 11.56, 10.21])
    expected = [x[0], x[0] * 30 / 32 + x[1] * 2 / 32]
    expected.append(expected[1] * 30 / 32 + x[2] * 2 / 32)
    assert stats.ema(x) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-50, 150), min_size=1, max_size=14), st.floats(0.5, 12))
def test_spread_labels_keep_their_distance_order_and_range(wanted, gap):
    placed = labels.spread(wanted, gap, 0.0, 100.0)
    assert placed.min() >= -1e-9 and placed.max() <= 100 + 1e-9
    ordered = placed[np.argsort(wanted, kind="stable")]
    needed = min(gap, 100 / max(1, len(wanted) - 1))
    assert (np.diff(ordered) >= needed - 1e-6).all()


def test_spread_moves_nothing_that_is_free():
    assert labels.spread([10.0, 50.0, 90.0], 5, 0, 100).tolist() == [10.0, 50.0, 90.0]


def test_text_colours_reach_reading_contrast():
    from matplotlib.colors import to_rgb

    from figures.style import LOOKS

    for look in LOOKS.values():
        rgb = np.array(to_rgb(labels.darker(look.color)))
        linear = np.where(rgb <= 0.03928, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        assert 1.05 / (linear @ [0.2126, 0.7152, 0.0722] + 0.05) >= 4.4
