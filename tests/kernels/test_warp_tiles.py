"""Kernels on ``warp_tiles`` against those on ``tiles`` and the producers: the same carriers, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp4core.kernels import fused_rope, fused_silu
from fp4core.kernels import producers as p
from fp4core.kernels._launch import interpreted
from fp4core.kernels.fused_rope_joint import rope_joint_backward
from fp4core.kernels.fused_swiglu import swiglu_backward
from fp4core.kernels.row_scale import row_scales
from fp4core.kernels.warp_tiles import takes
from tests.kernels.views import COL, COL_H32, DEVICE, ROW, ROW_SR, WIDE, X_COL, draw, same, sr, states

# one and two warps of tokens, one and several pieces of features
SHAPES = [(32, 128), (64, 256)] if interpreted() else [(32, 128), (96, 384), (256, 512)]
SCALED = pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])


def uneven(tokens: int, features: int) -> torch.Tensor:
    """Rows up to 2^40 apart, rows and blocks of zeros, negative zeros."""
    x = draw(tokens, features, seed=8)
    x *= torch.exp2((torch.arange(tokens, device=DEVICE) * 7 % 41 - 20).float())[:, None].to(torch.bfloat16)
    x[3], x[5, 32:64], x[6, ::3] = 0, 0, -0.0
    return x


def times(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return x * (scales << 16).view(torch.float32)[:, None].to(torch.bfloat16)


def both_views(grads, row, col, scales, found, producers, rows, cols):
    """What the producers make of gradients side by side."""
    at = 0
    for d, producer in zip(grads, producers):
        p.produce(
            d,
            row,
            col,
            row_state=found[0],
            col_state=found[1],
            sr=p.SR(sr(), producer),
            row_out=rows[:, at : at + d.shape[1]],
            col_out=cols[at : at + d.shape[1]],
            scales=scales,
        )
        at += d.shape[1]


@pytest.mark.parametrize(("tokens", "features"), SHAPES)
@pytest.mark.parametrize(("row", "scaled"), [(ROW, False), (ROW_SR, True)], ids=["nearest", "stochastic"])
def test_swiglu_gives_every_view_from_one_reading(tokens, features, scaled, row):
    gate_up, dh = draw(tokens, 2 * features), uneven(tokens, features)
    gate, up = gate_up[:, :features], gate_up[:, features:]
    gate[9, :32] = -0.0
    scales = row_scales(dh.unflatten(1, (-1, 128)).transpose(0, 1)[None]) if scaled else None
    taken = dh if scales is None else times(dh, scales)
    want, got = states(3, 0), states(3, 0)
    dgate, dup, h = fused_silu.silu_gradients(taken, gate, up, X_COL, want[2], scales)
    rows = torch.empty(tokens, 2 * features, dtype=torch.float8_e5m2, device=DEVICE)
    cols = torch.empty(2 * features, tokens, dtype=torch.float8_e5m2, device=DEVICE)
    both_views([dgate, dup], row, COL, scales, want, (16, 20), rows, cols)
    made = swiglu_backward(taken, gate, up, row, COL, X_COL, tuple(got), (sr(), 16, 20), scales)
    assert [same(*pair) for pair in zip(made, (rows, cols, h))] == [True] * 3
    assert got[:, :3].tolist() == want[:, :3].tolist()
    assert got[:, 3].bool().tolist() == want[:, 3].bool().tolist()


@pytest.mark.parametrize("length", [32] if interpreted() else [32, 128])
@SCALED
def test_rope_gives_the_views_of_all_three_gradients(length, scaled):
    """dK as autograd may hand it over: heads first in memory, and not at a multiple of 16 bytes."""
    batch, heads = 2, (2, 1, 1)
    tokens = batch * length
    angle = torch.rand(length, 64, generator=torch.Generator().manual_seed(7)) * 6
    cos, sin = angle.cos().to(DEVICE), angle.sin().to(DEVICE)
    grads = [uneven(tokens, n * 128).view(batch, length, n, 128).transpose(1, 2) for n in heads]
    shifted = torch.empty(grads[1].numel() + 2, dtype=torch.bfloat16, device=DEVICE)[2:]
    grads[1] = shifted.view_as(grads[1]).copy_(grads[1])
    scales = row_scales(*grads) if scaled else None
    if scaled:
        scales[7] = 0  # set apart
    made, expected = (
        (
            torch.empty(tokens, 512, dtype=torch.float8_e5m2, device=DEVICE),
            torch.empty(512, tokens, dtype=torch.float8_e5m2, device=DEVICE),
            states(2, 0),
        )
        for _ in range(2)
    )
    at = 0
    for i, (d, n) in enumerate(zip(grads, heads)):
        fused_rope.rope_backward(
            d,
            fused_rope.rope_table(cos, sin, planes=False),
            rotate=i < 2,
            row=ROW_SR,
            col=COL,
            row_out=expected[0][:, at : at + n * 128],
            col_out=expected[1][at : at + n * 128],
            states=tuple(expected[2]),
            sr=(sr(), 24 + 4 * i),
            scales=scales,
        )
        at += n * 128
    rope_joint_backward(
        grads,
        fused_rope.rope_table(cos, sin, planes=True),
        row=ROW_SR,
        col=COL,
        rows=made[0],
        cols=made[1],
        states=tuple(made[2]),
        sr=(sr(), 24, 28, 32),
        scales=scales,
    )
    assert same(made[0], expected[0]) and same(made[1], expected[1])
    assert made[2][:, :3].tolist() == expected[2][:, :3].tolist()
    assert made[2][:, 3].bool().tolist() == expected[2][:, 3].bool().tolist()


def test_only_what_fits_a_warp_is_taken():
    assert takes(ROW, ROW_SR, COL, X_COL, p.View("mxfp4_ocp", "e5m2"))
    for other in (WIDE, COL_H32, replace(ROW, format="mxfp4_w2d"), replace(WIDE, format="nvfp4")):
        assert not takes(ROW, other)
