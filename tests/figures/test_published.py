"""Published values: every digit kept, and the report's own statements follow from them."""

from __future__ import annotations

import csv
from decimal import Decimal

import pytest

from figures import analysis, published

ROUTES = {
    "bf16", "te_nvfp4", "te_nvfp4_bf16x4", "nvfp4_global", "mxfp4_sr", "mxfp4_sr_h32", "nvfp4_cta",
    "nvfp4_cta_h16",
    "depth_hybrid_27_5", "operand_hybrid_h16", "operand_hybrid_h32",
}  # fmt: skip
DIGITS = [
    ("table06_throughput", "mxfp4_sr", "tokens_per_s", None, "37876.75"),
    ("table06_throughput", "nvfp4_cta", "tokens_per_s", None, "33243.757890411216"),
    ("table06_throughput", "te_nvfp4", "mfu", None, "63.988517427610"),
    ("table06_throughput", "nvfp4_cta", "memory_gib", None, "115.51499999999999"),
    ("table07_endpoint_loss", "te_nvfp4_bf16x4", "loss", 38140, "2.385180711746216"),
    ("table07_endpoint_loss", "nvfp4_global", "loss", 38140, "2.4282"),
    ("table08_downstream", "bf16", "mmlu/acc", 38000, "0.28635522005412334"),
    ("table09_production", "mxfp4_sr", "tokens_per_s", None, "39306.59362767252"),
    ("table09_production", "depth_hybrid_27_5", "memory_gib_range", None, "228.28-233.42"),
    ("table10_output_head", "lowp", "difference_percent", None, "-0.16"),
    ("table12_dgrad_error", "", "geometric_mean_ratio", None, "1.292"),
    ("fig09_validation_nll", "operand_hybrid_h32", "nll", 38147, "2.465324638295908"),
]


@pytest.mark.parametrize(("table", "route", "metric", "step", "digits"), DIGITS)
def test_digits_are_those_of_the_ledgers(table, route, metric, step, digits):
    assert published.text(table, route, metric, step) == digits


def test_rows_are_complete_and_name_their_source():
    with published.PATH.open(newline="", encoding="utf-8") as file:
        assert tuple(next(csv.reader(file))) == published.COLUMNS
    assert len(published.rows()) == 231
    assert {row["route"] for row in published.rows() if row["table"] == "table07_endpoint_loss"} == ROUTES
    assert all(row["source"] for row in published.rows())
    keys = [(row["table"], row["route"], row["metric"], row["step"]) for row in published.rows()]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("route", "excess"),
    [("te_nvfp4_bf16x4", "0.87"), ("te_nvfp4", "1.34"), ("mxfp4_sr_h32", "2.11"), ("nvfp4_global", "2.69"),
     ("operand_hybrid_h32", "4.00"), ("mxfp4_sr", "6.53")],
)  # fmt: skip
def test_excess_over_bf16_is_the_reports(route, excess):
    assert f"{analysis.published_excess(route):.2f}" == excess


@pytest.mark.parametrize(
    ("task", "points"),
    [
        ("mmlu/acc", -1.66),
        ("hellaswag/acc_norm", -2.02),
        ("winogrande/acc", 0.79),
        ("arc_challenge/acc_norm", -2.39),
    ],
)  # fmt: skip
def test_downstream_differences_are_the_reports(task, points):
    hybrid, pure = (
        published.number("table08_downstream", r, task) for r in ("operand_hybrid_h32", "mxfp4_sr_h32")
    )
    assert round(100 * (hybrid - pure), 2) == points


def test_mfu_follows_from_rate_flops_and_peak():
    flops = 57_914_449_920
    for route in ROUTES:
        rate = published.number("table06_throughput", route, "tokens_per_s")
        given = published.number("table06_throughput", route, "mfu")
        assert 100 * flops * rate / 2500e12 == pytest.approx(given, rel=1e-9), route
    for route in ("mxfp4_sr", "nvfp4_cta"):
        rate = published.number("table09_production", route, "tokens_per_s")
        given = published.number("table09_production", route, "mfu")
        assert 100 * flops * rate / 2250e12 == pytest.approx(given, rel=1e-3), route


def test_scores_are_whole_numbers_of_items():
    for row in published.rows():
        if row["table"] == "table08_downstream" and row["route"]:
            items = published.number("table08_downstream", "", row["metric"].split("/")[0] + "/items")
            assert float(row["value"]) * items == pytest.approx(round(float(row["value"]) * items), abs=1e-6)


def test_a_fact_with_several_steps_needs_a_step():
    with pytest.raises(ValueError, match="5 steps"):
        published.text("fig09_validation_nll", "bf16", "nll")
    assert published.text("fig09_validation_nll", "bf16", "nll", 38000) == "2.4302059501379722"
    assert published.text("table07_endpoint_loss", "depth_hybrid_global_27_5", "loss") is None
    assert Decimal(published.text("fig09_validation_nll", "mxfp4_sr_h32", "nll", 38000)) < Decimal("2.43")


def test_frontier_of_the_report():
    frame = analysis.published_speed_quality(Order())
    assert set(frame.loc[frame["frontier"], "route"]) == {
        "bf16", "te_nvfp4_bf16x4", "te_nvfp4", "mxfp4_sr_h32", "mxfp4_sr",
    }  # fmt: skip


class Order:
    """Stands in for a study: keeps any order of routes."""

    def ordered(self, slugs):
        return sorted(set(slugs))
