"""What the doctor says of routes and machines."""

from __future__ import annotations

import pytest

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
        ("mxfp4_sr", 100, "natively, FP4 Tensor Cores"),
        ("bf16", 90, "BF16 products"),
    ],
)
def test_a_line_per_route(route, sm, words):
    assert how(load_recipe(route), sm) == words


def test_without_a_gpu_the_reference_runs_it_and_the_reason_is_given():
    assert how(load_recipe("mxfp4_sr"), 0).startswith("exactly but slowly, on the reference: ")
