"""What the doctor says of routes and machines."""

from __future__ import annotations

import pytest

from fp4core.ops import linear
from fp4core.ops.doctor import carriers, group_recipe, how
from fp4core.recipe import load_recipe


@pytest.mark.parametrize(
    ("route", "sm", "kinds"),
    [
        ("mxfp4_sr", 90, "fp8 fp8 fp8"),
        ("mxfp4_sr", 80, "bf16 bf16 bf16"),
        ("operand_hybrid_h32", 90, "fp8 bf16 fp8"),
        ("nvfp4_cta", 90, "bf16 bf16 bf16"),
        ("bf16", 90, "plain plain plain"),
    ],
)
def test_carriers_of_a_route(route, sm, kinds):
    found = carriers(group_recipe(load_recipe(route), 0), sm)
    assert " ".join(found[c] for c in ("fprop", "dgrad", "wgrad")) == kinds


@pytest.mark.parametrize(
    ("route", "sm", "words"),
    [
        ("mxfp4_sr", 90, "exactly, by carriers (fprop FP8, dgrad FP8, wgrad FP8)"),
        ("ue5m3", 90, "exactly, by carriers (fprop BF16, dgrad BF16, wgrad BF16)"),
        (
            "mxfp4_sr",
            100,
            "exactly, by carriers (fprop FP8, dgrad FP8, wgrad FP8); by FP4 Tensor Cores where the study "
            "says backend: native, which has never run",
        ),
        # no FP4 Tensor Core takes its block scales
        ("ue5m3", 103, "exactly, by carriers (fprop BF16, dgrad BF16, wgrad BF16)"),
        ("mxfp4_sr", 120, "exactly, by carriers (fprop FP8, dgrad FP8, wgrad FP8)"),
        ("bf16", 90, "BF16 products"),
    ],
)
def test_a_line_per_route(route, sm, words):
    assert how(load_recipe(route), sm) == words


def test_auto_never_means_what_has_never_run():
    """The line above and the choice of ``auto`` are one: a GPU of any kind gets the carriers."""
    assert {linear.preferred_backend(load_recipe(r), "auto") for r in ("mxfp4_sr", "ue5m3", "bf16")} == {
        "auto"
    }
    assert linear.preferred_backend(load_recipe("mxfp4_sr"), "native") == "native"
    assert linear.preferred_backend(load_recipe("bf16"), "native") == "native"
    assert linear.preferred_backend(load_recipe("ue5m3"), "native") == "carrier"
    assert linear.preferred_backend(load_recipe("ue5m3"), "reference") == "reference"


def test_without_a_gpu_the_reference_runs_it_and_the_reason_is_given():
    assert how(load_recipe("mxfp4_sr"), 0).startswith("exactly but slowly, on the reference: ")
