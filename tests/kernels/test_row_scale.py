"""Scaled rows: the views of rows that were scaled beforehand, and readers that take the scales back.

All of it to the bit: a power of two changes no code and no rounding.
"""

from __future__ import annotations

import pytest
import torch

from fp4core.kernels import fused_norm, fused_rope, fused_silu, row_scale
from fp4core.kernels import producers as p
from fp4core.kernels._launch import interpreted
from fp4core.ops import carrier, carrier_groups
from fp4core.ops.carrier_boundary import schedule
from fp4core.ops.carrier_plan import DY_ROW
from tests.kernels.carriers import block_inputs, model, results
from tests.kernels.views import COL, COL_H32, DEVICE, ROW, ROW_SR, X_COL, draw, produced, same, sr, states

TOKENS = 64 if interpreted() else 256


def spread(tokens: int, features: int, seed: int = 8) -> torch.Tensor:
    """BF16 gradients of tokens up to 60 binades apart."""
    powers = torch.randint(-50, 10, (tokens, 1), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return (draw(tokens, features, scale=0.1, seed=seed).float() * torch.exp2(powers.float())).bfloat16()


def scales_of(x: torch.Tensor) -> torch.Tensor:
    return row_scale.row_scales(x.unflatten(1, (-1, 128)).transpose(0, 1)[None])


def factors(scales: torch.Tensor) -> torch.Tensor:
    return (scales & -65536).view(torch.float32)


def scaled(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (x.float() * factors(scales)[:, None]).bfloat16()


def test_scales_put_the_largest_value_of_a_token_between_1_and_2():
    batch, heads, length = 2, 3, 32
    d = spread(batch * length, heads * 128)
    d[5], d[6, 3], d[8, 2], d[7, 1:], d[7, 0] = 0.0, float("inf"), float("nan"), 0.0, 2.0**-130
    split = d.view(batch, length, heads, 128).transpose(1, 2)
    scales = row_scale.row_scales(split)
    assert torch.equal(scales, row_scale.row_scales(*(split[:, i : i + 1] for i in (1, 0, 2))))
    assert torch.equal(scales, row_scale.row_scales(split.contiguous()))
    assert torch.equal(scales >> 16, scales & 0xFFFF)
    largest, factor = d.float().abs().amax(1), factors(scales)
    usual = (largest > 2.0**-126) & largest.isfinite()
    assert usual.sum() == batch * length - 4
    assert (((largest * factor)[usual] >= 1) & ((largest * factor)[usual] < 2)).all()
    assert factor[5] == factor[7] == 2.0**126 and factor[6] == factor[8] == 2.0**-126
    d[[5, 6, 7, 8]] = 1.0
    scales = scales_of(d)
    assert same(row_scale.unscale_(scaled(d, scales), scales), d)
    with pytest.raises(ValueError, match=r"got \(1, 1, 20, 128\); needed"):
        row_scale.row_scales(d[:20, :128][None, None])


@pytest.mark.parametrize("row", [ROW, ROW_SR], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("carrier_type", ["e5m2", "bf16"])
@pytest.mark.parametrize(("tokens", "features"), [(TOKENS, 128), (48, 96), (TOKENS + 8, 384), (120, 128)])
def test_producers_scale_the_row_view_alone(row, carrier_type, tokens, features):
    """Tiles that end inside the matrix too: nothing is read beyond the last token's scale."""
    x = spread(tokens, features)
    wide = torch.zeros(-(-tokens // 16) * 16, 384, dtype=torch.bfloat16, device=DEVICE)
    wide[:tokens, :features] = x
    scales = scales_of(wide)[:tokens].clone()
    row = p.View(row.format, carrier_type, row.rounding)
    one, two = states(2, 0), states(4, 0)
    got = p.produce(x, row, COL_H32, row_state=one[0], col_state=one[1], sr=p.SR(sr(), 24), scales=scales)
    want_row, _ = produced(scaled(x, scales), row, COL_H32, two, 24)
    _, want_col = produced(x, row, COL_H32, two[2:], 24)
    assert same(got[0].data, want_row) and same(got[1].data, want_col)
    assert one[0].tolist() == two[0].tolist() and one[1].tolist() == two[3].tolist()
    if carrier_type == "e5m2":
        assert one[0, 3] == 0 and two[2, 3] > 0  # every row block fits; unscaled some do not


def test_scales_need_row_blocks_of_a_power_of_two():
    x = spread(32, 128)
    for row in (None, p.View("mxfp4_w2d", "e5m2"), p.View("nvfp4", "bf16")):
        with pytest.raises(ValueError, match="needed a row view of an MX format in 1D blocks"):
            p.produce(x, row, COL, row_state=states(1)[0], col_state=states(1)[0], scales=scales_of(x))


def test_rope_scales_the_row_view_alone():
    batch, heads, length = 2, 3, 32
    tokens, width = batch * length, heads * 128
    d = spread(tokens, width)
    scales = scales_of(d)
    rows = torch.zeros(tokens, width, dtype=torch.float8_e5m2, device=DEVICE)
    cols = torch.zeros(width, tokens, dtype=torch.float8_e5m2, device=DEVICE)
    one, two = states(2, 0), states(4, 0)
    fused_rope.rope_backward(
        d.view(batch, length, heads, 128).transpose(1, 2),
        torch.ones(length, 32, 4, device=DEVICE),
        rotate=False,
        row=ROW_SR,
        col=COL,
        row_out=rows,
        col_out=cols,
        states=(one[0], one[1]),
        sr=(sr(), 24),
        scales=scales,
    )
    want_row, _ = produced(scaled(d, scales), ROW_SR, COL, two, 24)
    _, want_col = produced(d, ROW_SR, COL, two[2:], 24)
    assert same(rows, want_row) and same(cols, want_col)
    assert one[0].tolist() == two[0].tolist() and one[1].tolist() == two[3].tolist()


def test_norm_and_silu_take_the_scales_back():
    dy = spread(TOKENS, 384)
    scales = scales_of(dy)
    x, weight = draw(TOKENS, 384), draw(384, scale=0.3, seed=2).float()
    _, _, rstd = fused_norm.norm_forward(x, None, weight, 1e-5, None, None)
    inputs = (x, draw(TOKENS, 384, scale=0.1, seed=5), weight, rstd, None, None, None, (None,) * 3, None)
    want = fused_norm.norm_backward(dy, *inputs)
    got = fused_norm.norm_backward(scaled(dy, scales), *inputs, scales)
    assert all(same(got[i], want[i]) for i in (0, 1, 4))

    gate, up = draw(TOKENS, 384, seed=3), draw(TOKENS, 384, seed=4)
    for view in (None, X_COL):
        want = fused_silu.silu_gradients(dy, gate, up, view, states(1)[0])
        got = fused_silu.silu_gradients(scaled(dy, scales), gate, up, view, states(1)[0], scales)
        assert all(map(same, got, want))


@pytest.mark.usefixtures("attention_that_repeats", "fresh_groups")
def test_a_block_holds_tokens_that_no_single_reference_could():
    """Gradients 2^30 apart between tokens: Dgrad stays in FP8, and results are those of BF16 carriers.

    On a GPU a product in BF16 sums in another order than one in FP8.
    """
    m = model("mxfp4_sr")
    layers = m.model.layers[:1]
    h, grad = block_inputs()
    grad = grad.clone()
    grad[:, ::3] *= 2.0**-30
    with schedule("serial"):
        expected = results(m, layers, h, grad)
    kinds = [g.plan.kinds[DY_ROW] for g in carrier_groups.groups(m)]
    assert "bf16" in kinds
    carrier_groups.forget()
    carrier.defer(m)
    for _ in range(2):
        got = results(m, layers, h, grad)
        assert carrier.misfits(m) == []
    # a token of q, k, v has dQ of its own gradient beside dK and dV of others', one row
    assert [g.plan.kinds[DY_ROW] for g in carrier_groups.groups(m)][1:] == ["e5m2"] * 3
    for a, b in zip(got, expected):
        if DEVICE == "cpu":
            assert torch.equal(a, b)
        else:
            assert (a - b).float().norm() <= 0.05 * b.float().norm()
