"""Rows of dQ, dK, dV that no FP8 carrier holds beside the others are set apart, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from fp4core.kernels import fused_rope, row_scale
from fp4core.kernels import producers as p
from fp4core.kernels._launch import interpreted
from fp4core.model.rope import rope_tables
from fp4core.ops import carrier, carrier_groups
from fp4core.ops.carrier_boundary import rope_backward, schedule
from fp4core.ops.carrier_encode import encode_weights
from fp4core.ops.carrier_gemm import sum_of_products
from fp4core.ops.carrier_plan import DY_ROW, W_COL, WIDEST, Plan, reference
from fp4core.recipe import load_recipe
from tests.kernels.carriers import model, state
from tests.kernels.views import DEVICE, ROW_SR, draw, produced, same, sr, states

TOKENS = 96 if interpreted() else 512
WIDE = (3, 40, 41)
CROWD = range(max(16, TOKENS // 8) + 20)  # more than a list takes


def gradients(*wide: int, binades: int = 40) -> list[torch.Tensor]:
    """dQ, dK, dV of one head, [1, 1, TOKENS, 128]: of the ``wide`` tokens dQ and dK are much smaller."""
    grads = [draw(TOKENS, 128, scale=0.1, seed=i)[None, None] for i in range(3)]
    for d in grads[:2]:
        d[:, :, list(wide)] *= 2.0**-binades
    return grads


def listed(outliers: torch.Tensor) -> list[int]:
    return sorted(outliers[1 : 1 + int(outliers[0])].tolist())


def test_rows_wider_than_a_carrier_are_listed_and_scaled_to_zero():
    grads = gradients(*WIDE)
    grads[2][:, :, 7] *= 2.0 ** -(WIDEST - 6)  # wide, but not too wide
    grads[0][:, :, 8, :32] *= 2.0**-40  # one block of one part
    grads[1][:, :, 9] = 0.0  # blocks of zeros fit everywhere
    for d in grads:
        d[:, :, 10] = 0.0
    grads[0][:, :, 40, 5] = float("inf")  # nothing would hold it better
    outliers = row_scale.outlier_list(TOKENS, DEVICE)
    state = states(1, 0)[0]
    scales = row_scale.row_scales(*grads, outliers=outliers, state=state, widest=WIDEST)
    assert not state.any()
    assert listed(outliers) == [3, 8, 41] == (scales == 0).nonzero().flatten().tolist()
    plain = row_scale.row_scales(*grads)
    assert torch.equal(scales[scales != 0], plain[scales != 0]) and (plain != 0).all()


def test_rows_without_room_are_a_misfit_that_fp8_cannot_hold():
    """Also those that would fit beside the others: which rows find room is chance."""
    grads = gradients(*CROWD, binades=WIDEST + 1)
    outliers = row_scale.outlier_list(TOKENS, DEVICE)
    room = outliers.numel() - 1
    state = states(1, 0)[0]
    scales = row_scale.row_scales(*grads, outliers=outliers, state=state, widest=WIDEST)
    assert state[3] > 0 and state[2] == 0x7FFF
    taken = outliers[1:].tolist()
    assert int(outliers[0]) == len(CROWD) and len(set(taken)) == len(taken) == room < len(CROWD)
    assert sorted(taken) == (scales == 0).nonzero().flatten().tolist() and set(taken) < set(CROWD)


def test_rope_writes_tiles_with_outliers_and_no_others():
    batch, heads, length = 3, 2, 32
    tokens, width = batch * length, heads * 128
    d = draw(tokens, width)
    scales = torch.full((tokens,), 0x3F803F80, dtype=torch.int32, device=DEVICE)
    scales[40] = 0
    rows = torch.zeros(tokens, width, dtype=torch.bfloat16, device=DEVICE)
    unused = states(1, 0)[0]
    fused_rope.rope_backward(
        d.view(batch, length, heads, 128).transpose(1, 2),
        torch.ones(length, 32, 4, device=DEVICE),
        rotate=False,
        row=p.View(ROW_SR.format, "bf16", ROW_SR.rounding),
        col=None,
        row_out=rows,
        col_out=None,
        states=(unused, unused),
        sr=(sr(), 24),
        scales=scales,
        outliers=True,
    )
    row = p.View(ROW_SR.format, "bf16", ROW_SR.rounding)
    want, _ = produced(d, row, None, states(2, 0), 24)
    assert same(rows[32:64], want[32:64])
    assert not rows[:32].any() and not rows[64:].any()


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("count", [0, 1, 70])
def test_products_of_listed_rows(count, kind):
    t, k, d = 600, 384, 64
    rows, w = draw(t, k), draw(d, k, seed=1).to(kind)
    outliers = row_scale.outlier_list(t, DEVICE)
    some = torch.randperm(t, generator=torch.Generator().manual_seed(2))[:count].to(DEVICE)
    outliers[0], outliers[1 : 1 + count] = count, some
    scales = torch.ones(t, dtype=torch.int32, device=DEVICE)
    scales[some] = 0
    out = draw(t, d, seed=3)
    before = out.clone()
    row_scale.multiply_outliers(rows, w, 0.25, outliers, scales, out)
    others = torch.ones(t, dtype=torch.bool, device=DEVICE)
    others[some] = False
    assert same(out[others], before[others]) and (scales[others] == 1).all()
    assert (scales[some] == 0x3F803F80).all()
    exact = rows[some].double() @ w.double().t() / 4
    terms = rows[some].double().abs() @ w.double().abs().t() / 4
    # FP32 sums of 384 exact products in any order, then half a unit of BF16's last place
    bound = 384 * 2.0**-24 * terms + 2.0**-8 * exact.abs()
    assert ((out[some].double() - exact).abs() <= bound).all()


def group_of(m, deferred: bool = False):
    attention = m.model.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    if deferred:
        carrier.defer(m)
    g = carrier_groups.group([int(x.producer) for x in layers], layers[0].spec, layers[0].weight.device)
    return g, [x.weight for x in layers]


def dgrad(m, g, weights, grads) -> torch.Tensor:
    """dX [T, D] of a group's linears from dQ, dK, dV, their scales taken back."""
    cos, sin = rope_tables(m._inv_freq, TOKENS, torch.device(DEVICE))
    rows, _, scales, outliers = rope_backward(g, grads, cos, sin, state())
    columns = encode_weights(g, weights).columns
    product = sum_of_products(rows, columns)
    if outliers is not None:
        outliers.complete(product, columns[0])
    return product if scales is None else row_scale.unscale_(product, scales)


def agree(got: torch.Tensor, want: torch.Tensor) -> None:
    if DEVICE == "cpu":
        assert same(got, want)
    else:  # BF16's products are summed in another order than FP8's, which keep 13 bits (NOTES.md)
        assert ((got - want).float().norm(dim=1) <= 0.02 * want.float().norm(dim=1)).all()


@pytest.fixture
def case():
    m = model("mxfp4_sr")
    with schedule("serial"):
        expected = [dgrad(m, *group_of(m), gradients(*w)) for w in ((), WIDE, CROWD)]
        expected.append(dgrad(m, *group_of(m), gradients(*CROWD, binades=WIDEST + 1)))
    assert group_of(m)[0].plan.kinds[DY_ROW] == "bf16"
    carrier_groups.forget()
    return m, expected


@pytest.mark.usefixtures("fresh_groups")
def test_a_product_keeps_fp8_when_few_rows_are_too_wide(case):
    """Equal to the product of BF16 carriers, which hold every row."""
    m, (usual, wide, crowd, _) = case
    g, weights = group_of(m)
    agree(dgrad(m, g, weights, gradients()), usual)
    assert not g.plan.set_apart
    for _ in range(2):
        agree(dgrad(m, g, weights, gradients(*WIDE)), wide)
        assert g.plan.set_apart and g.plan.kinds[DY_ROW] == "e5m2" and g.misfits[DY_ROW] == 1
    agree(dgrad(m, g, weights, gradients()), usual)
    agree(dgrad(m, g, weights, gradients(*CROWD)), crowd)
    assert g.plan.kinds[DY_ROW] == g.plan.kinds[W_COL] == "bf16"
    agree(dgrad(m, g, weights, gradients(*WIDE)), wide)


@pytest.mark.usefixtures("fresh_groups")
def test_one_repeated_step_suffices_for_all_that_follow(case):
    m, (usual, wide, _, _) = case
    g, weights = group_of(m, deferred=True)
    for grads, want in ((gradients(), usual), (gradients(), usual)):
        agree(dgrad(m, g, weights, grads), want)
        assert carrier.misfits(m) == []
    dgrad(m, g, weights, gradients(*WIDE))
    assert [found.view for found in carrier.misfits(m)] == ["dy_row"]
    agree(dgrad(m, g, weights, gradients(*WIDE)), wide)  # the repetition
    for grads, want in ((gradients(), usual), (gradients(*WIDE), wide), (gradients(1, 2), None)):
        assert carrier.misfits(m) == []
        got = dgrad(m, g, weights, grads)
        if want is not None:
            agree(got, want)
    assert carrier.misfits(m) == [] and g.plan.kinds[DY_ROW] == "e5m2" and g.plan.set_apart
    # the window forgot the rows that are no longer in the carrier
    low, high = g.recent()[DY_ROW]
    assert high - low <= WIDEST


@pytest.mark.usefixtures("fresh_groups")
def test_more_rows_than_there_is_room_for_send_the_product_to_bf16(case):
    m, (_, wide, _, crowd) = case
    g, weights = group_of(m)
    agree(dgrad(m, g, weights, gradients(*WIDE)), wide)
    assert g.plan.set_apart and g.plan.kinds[DY_ROW] == "e5m2"
    agree(dgrad(m, g, weights, gradients(*CROWD, binades=WIDEST + 1)), crowd)
    assert g.plan.kinds[DY_ROW] == "bf16"


@pytest.mark.usefixtures("fresh_groups")
def test_a_product_returns_from_bf16_although_outliers_remain(case):
    """As an earlier version's checkpoint leaves it, or a step with too many of them."""
    m, (usual, wide, _, _) = case
    g, weights = group_of(m, deferred=True)
    agree(dgrad(m, g, weights, gradients()), usual)
    g.plan.kinds[DY_ROW] = g.plan.kinds[W_COL] = "bf16"
    g.plan.refs[DY_ROW] = g.plan.refs[W_COL] = 0
    g.resume()
    for turn in range(3):
        agree(dgrad(m, g, weights, gradients(*WIDE)), wide)
        assert carrier.misfits(m) == []
        assert (g.plan.kinds[DY_ROW] == "bf16") == (turn == 0)
        carrier.turn(m)
    assert g.plan.set_apart and (g.plan.kinds[DY_ROW], g.plan.kinds[W_COL]) == ("e5m2", "e4m3")


@pytest.mark.usefixtures("fresh_groups")
def test_one_kernel_per_boundary_sets_nothing_apart(case):
    """It scales no rows; a plan that says so may come from training under the usual schedule."""
    m, (usual, _, _, _) = case
    g, weights = group_of(m)
    g.plan.set_apart = True
    with schedule("single"):
        agree(dgrad(m, g, weights, gradients()), usual)


def test_a_plan_sets_rows_apart_before_it_leaves_fp8():
    plan = Plan.of(load_recipe("mxfp4_sr").for_block(0, 32), fp8=True)
    plan.can_set_apart = True
    assert plan.adapt({DY_ROW: (-28, 0)}) == [] and not plan.set_apart
    assert "are set apart" in plan.adapt({DY_ROW: (-50, 0)})[0] and plan.set_apart
    assert (plan.kinds[DY_ROW], plan.kinds[W_COL]) == ("e5m2", "e4m3") and plan.fallbacks == {}
    assert plan.refs[DY_ROW] == reference("e5m2", (-WIDEST - 1, 0))
    plan.adapt({DY_ROW: (-50, 0)})
    assert plan.kinds[DY_ROW] == "bf16" and plan.fallbacks == {"dgrad": 1}
    other = Plan.of(load_recipe("mxfp4_sr").for_block(0, 32), fp8=True)
    other.adapt({DY_ROW: (-50, 0)})
    assert other.kinds[DY_ROW] == "bf16" and not other.set_apart
