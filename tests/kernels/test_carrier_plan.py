"""Which carrier holds an operand, and with which reference exponent: the host's side of it."""

from __future__ import annotations

import pytest
import torch

from fp4core import formats
from fp4core.kernels import mx
from fp4core.ops import carrier_groups
from fp4core.ops.carrier_plan import (
    DY_COL,
    RANGE,
    X_COL,
    X_ROW,
    Plan,
    choose_types,
    reference,
)
from fp4core.ops.quantize import quantize
from fp4core.recipe import load_recipe

PREFERRED = ("e5m2", "e4m3")


def recipe(route: str):
    return load_recipe(route).for_block(0, 32)


def test_the_plans_ranges_are_the_kernels():
    assert {k: v for k, v in mx.SPANS.items() if k != "bf16"} == RANGE


@pytest.mark.parametrize("kind", RANGE)
def test_a_reference_leaves_room_above_and_below_the_span(kind):
    low, high, _, _ = RANGE[kind]
    for span in ((-4, -4), (-9, 3), (0, high - low)):
        ref = reference(kind, span)
        below, above = span[0] - ref - low, high - (span[1] - ref)
        assert above >= 0 and 0 <= below - (2 if kind == "e5m2" else 1) * above <= 2


@pytest.mark.parametrize(
    ("left", "right", "kinds"),
    [
        ((-3, 3), (-3, 3), ("e5m2", "e4m3")),
        ((-20, 8), (0, 14), ("e5m2", "e4m3")),
        ((0, 14), (-20, 8), ("e4m3", "e5m2")),
        ((-20, 8), (-20, 8), ("e5m2", "e5m2")),
        ((-20, 9), (0, 1), ("bf16", "bf16")),
        ((0, -1), (-20, 8), ("e4m3", "e5m2")),
        ((30, 40), (0, 1), ("bf16", "bf16")),
    ],
    ids=["preferred", "both full", "swapped", "two wide", "too wide", "all zero", "reference out of range"],
)
def test_types_follow_the_spans(left, right, kinds):
    assert choose_types(left, right, PREFERRED) == kinds


def test_a_plan_moves_references_first_and_widens_for_good():
    plan = Plan.of(recipe("mxfp4_sr"), fp8=True)
    assert plan.adapt({X_ROW: (-2, 3), X_COL: (-1, 4)}) == [] and plan.kinds[X_COL] == "e4m3"
    assert plan.refs[X_COL] == reference("e4m3", (-1, 4))
    changed = plan.adapt({X_COL: (-20, 4), DY_COL: (-18, -9)})
    assert len(changed) == 1 and "e5m2 x e4m3 -> e4m3 x e5m2" in changed[0]
    assert plan.refs[DY_COL] == reference("e4m3", (-18, -9)) and plan.fallbacks == {"wgrad": 1}
    plan.adapt({DY_COL: (-30, -9)})
    assert (plan.kinds[DY_COL], plan.kinds[X_COL]) == ("e5m2", "e5m2")
    plan.adapt({DY_COL: (-60, -9)})
    assert (plan.kinds[DY_COL], plan.kinds[X_COL]) == ("bf16", "bf16") and plan.refs[X_COL] == 0
    plan.adapt({DY_COL: (-10, -9), X_COL: (0, 1)})
    assert plan.kinds[X_COL] == "bf16"


def test_a_contraction_returns_only_where_all_operands_have_room():
    plan = Plan.of(recipe("mxfp4_sr"), fp8=True)
    plan.adapt({DY_COL: (-60, -9)})
    assert not plan.recover({DY_COL: (-10, -9)}, (9, 2))  # nothing known of the other operand
    assert not plan.recover({DY_COL: (-30, -9), X_COL: (0, 1)}, (9, 2))
    assert not plan.recover({DY_COL: (-20, -9), X_COL: (0, 27)}, (9, 2))
    assert plan.recover({DY_COL: (-20, -9), X_COL: (0, 26)}, (9, 2))
    assert (plan.kinds[DY_COL], plan.kinds[X_COL]) == ("e5m2", "e5m2")
    assert plan.recover({DY_COL: (-28, -9), X_COL: (0, 12)}, (9, 2))
    assert (plan.kinds[DY_COL], plan.kinds[X_COL]) == ("e5m2", "e4m3")
    assert plan.refs[DY_COL] == reference("e5m2", (-28, -9)) and plan.refs[X_COL] == reference(
        "e4m3", (0, 12)
    )
    assert not plan.recover({DY_COL: (-28, -9), X_COL: (0, 12)}, (9, 2))  # is there already
    assert not plan.recover({DY_COL: (-60, -9), X_COL: (0, 12)}, (9, 2))  # and never to slower ones


def test_room_is_asked_of_what_was_seen():
    plan = Plan.of(recipe("mxfp4_sr"), fp8=True)
    assert plan.adapt({DY_COL: (-28, 0)}) == [] and plan.kinds[DY_COL] == "e5m2"
    assert plan.adapt({X_COL: (0, 3)}, room=2) == []
    assert plan.adapt({DY_COL: (-27, 0)}, room=2) and plan.kinds[DY_COL] == "bf16"


def test_only_contractions_of_two_mx_operands_use_fp8():
    plan = Plan.of(recipe("operand_hybrid_h16"), fp8=True)
    assert plan.mx == {"fprop", "wgrad"}
    assert Plan.of(recipe("mxfp4_sr"), fp8=False).kinds == ["bf16"] * 6


@pytest.mark.parametrize("name", [n for n in formats.names() if formats.get(n).block_scale == "e8m0"])
def test_block_exponents_are_the_quantisers(name):
    values = torch.tensor([2.0**-30, 0.3, 0.871, 0.869, 1.0, 1.01, 5.9, 6.1, 7.9, 3.1e4]).to(torch.bfloat16)
    for v in values:
        x = torch.zeros(32, 32, dtype=torch.bfloat16)
        x[0, 0] = v
        byte = int(quantize(x, name, backend="reference").block_scale.flatten()[0])
        bits = int(v.view(torch.int16))
        assert carrier_groups.block_exponent(bits, name) == byte - 127


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_rceil", "mxfp4_even"])
def test_limits_of_bits_are_limits_of_exponents(name):
    top, low = carrier_groups.block_limits(-3, 5, name)
    for bits in range(0x3000, 0x4800):
        k = carrier_groups.block_exponent(bits, name)
        assert (bits <= top) == (k <= 5) and (0x8000 - bits <= low) == (k >= -3), hex(bits)
