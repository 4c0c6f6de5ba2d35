"""Fused boundaries against the same arithmetic followed by the producers: equal carriers, bit for bit.

The producers are held to the reference in ``test_producers``; here every fused kernel is held to them. Sizes
make the tiles meet every case: one and four groups of 32 tokens, one and several feature chunks, two
sequences.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fp4core.kernels import fused_norm, fused_rope, fused_silu
from fp4core.kernels._launch import interpreted
from tests.kernels.views import (
    COL,
    COL_H32,
    DEVICE,
    ROW,
    ROW_SR,
    WIDE,
    X_COL,
    X_COL_H32,
    draw,
    produced,
    same,
    sr,
    states,
)

TOKENS = [32] if interpreted() else [96, 256]
FEATURES = [128] if interpreted() else [384]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("view", [ROW, WIDE], ids=["e5m2", "bf16"])
def test_silu_forward_gives_the_producers_row_view(tokens, features, view):
    gate_up = draw(tokens, 2 * features)
    gate, up = gate_up[:, :features], gate_up[:, features:]
    plain = fused_silu.silu_forward(gate, up, None, None)
    exact = (F.silu(gate.double()) * up.double()).to(torch.bfloat16)
    # the kernel's sigmoid is within a few FP32 units, so only values next to a rounding boundary may move
    assert (plain == exact).float().mean() > 0.99
    fused, apart = states(1), states(2)
    row = fused_silu.silu_forward(gate, up, view, fused[0])
    expected, _ = produced(plain, view, None, apart)
    assert same(row, expected)
    assert fused[0].tolist() == apart[0].tolist()


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    "views",
    [(ROW_SR, COL, X_COL), (ROW, COL_H32, X_COL_H32), (WIDE, WIDE, WIDE)],
    ids=["sr", "h32", "bf16"],
)
def test_silu_backward_gives_every_view(tokens, features, views):
    gate_up, dh = draw(tokens, 2 * features), draw(tokens, features, scale=0.1, seed=1)
    gate, up = gate_up[:, :features], gate_up[:, features:]
    dgate, dup, h = fused_silu.silu_gradients(dh, gate, up, None, None)
    g64, u64 = gate.double().requires_grad_(), up.double().requires_grad_()
    exact = torch.autograd.grad(F.silu(g64) * u64, (g64, u64), dh.double())
    for got, want in zip((dgate, dup), exact):
        assert (got == want.to(torch.bfloat16)).float().mean() > 0.99
    assert same(h, fused_silu.silu_forward(gate, up, None, None))
    fused, apart = states(3), states(4)
    row, col, h_col = views
    rows, cols, hs = fused_silu.silu_backward(
        dh, gate, up, row, col, h_col, (fused[0], fused[1], fused[2]), (sr(), 16, 20)
    )
    for i, (grad, producer) in enumerate(((dgate, 16), (dup, 20))):
        part = slice(i * features, (i + 1) * features)
        want_row, want_col = produced(grad, row, col, apart, producer)
        assert same(rows[:, part], want_row), ("dgate", "dup")[i]
        assert same(cols[part], want_col), ("dgate", "dup")[i]
    assert same(hs, produced(h, None, h_col, apart[2:])[1])
    assert fused[:, :3].tolist() == apart[[0, 1, 3], :3].tolist()
    first = states(1)[0]
    again = fused_silu.silu_gradients(dh, gate, up, h_col, first)
    assert same(again[0], dgate) and same(again[1], dup) and same(again[2], hs)
    assert first.tolist() == fused[2].tolist()


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_norm_forward_gives_the_stream_and_the_row_view(tokens, features, residual):
    x, weight = draw(tokens, features), draw(features, scale=0.3, seed=2).float()
    delta = draw(tokens, features, scale=0.5, seed=3) if residual else None
    stream, y, rstd = fused_norm.norm_forward(x, delta, weight, 1e-5, None, None)
    want = x if delta is None else x + delta
    assert same(stream, want)
    exact = F.rms_norm(want.double(), (features,), weight.double(), 1e-5)
    assert (y == exact.to(torch.bfloat16)).float().mean() > 0.99
    torch.testing.assert_close(
        rstd.double(), (want.double().square().mean(1) + 1e-5).rsqrt(), rtol=1e-6, atol=0
    )
    fused, apart = states(1), states(2)
    row = fused_norm.norm_forward(x, delta, weight, 1e-5, ROW, fused[0])[1]
    assert same(row, produced(y, ROW, None, apart)[0])
    assert fused[0].tolist()[:3] == apart[0].tolist()[:3]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("h32", [False, True], ids=["sr", "h32"])
def test_norm_backward_gives_gradients_and_every_view(tokens, features, h32):
    x, weight = draw(tokens, features), draw(features, scale=0.3, seed=2).float()
    dy, g = draw(tokens, features, scale=0.1, seed=4), draw(tokens, features, scale=0.1, seed=5)
    _, y, rstd = fused_norm.norm_forward(x, None, weight, 1e-5, None, None)
    none = (None, None, None)
    dx, y_again, _, _, dw = fused_norm.norm_backward(dy, x, g, weight, rstd, None, None, None, none, None)
    assert same(y_again, y)
    x64, w64 = x.double().requires_grad_(), weight.double().requires_grad_()
    want_dx, want_dw = torch.autograd.grad(F.rms_norm(x64, (features,), w64, 1e-5), (x64, w64), dy.double())
    torch.testing.assert_close(dw.double(), want_dw, rtol=1e-4, atol=1e-4 * want_dw.abs().max().item())
    twice = (g.float() + want_dx.to(torch.bfloat16).float()).to(torch.bfloat16)
    assert (dx == twice).float().mean() > 0.98
    row, col, y_col = (ROW, COL_H32, X_COL_H32) if h32 else (ROW_SR, COL, X_COL)
    fused, apart = states(3), states(4)
    got = fused_norm.norm_backward(
        dy, x, g, weight, rstd, y_col, row, col, (fused[0], fused[1], fused[2]), (sr(), 12)
    )
    assert same(got[0], dx)
    assert same(got[1], produced(y, None, y_col, apart)[1])
    want_row, want_col = produced(dx, row, col, apart[2:], 12)
    assert same(got[2], want_row)
    assert same(got[3], want_col)
    assert fused[:, :3].tolist() == apart[1:, :3].tolist()


@pytest.mark.parametrize("length", [32] if interpreted() else [32, 128])
@pytest.mark.parametrize("programs", [1, 256], ids=["two heads", "one head"])
@pytest.mark.parametrize("rotate", [True, False], ids=["rotated", "plain"])
def test_rope_rotates_and_gives_both_views_of_its_gradient(length, rotate, programs, monkeypatch):
    """With one head a program, and with several."""
    monkeypatch.setattr(fused_rope, "_PROGRAMS", programs)
    batch, heads = 2, 2
    angle = torch.rand(length, 64, generator=torch.Generator().manual_seed(7)) * 6
    cos, sin = angle.cos().to(DEVICE), angle.sin().to(DEVICE)
    planes = fused_rope.rope_table(cos, sin, planes=True)
    table = fused_rope.rope_table(cos, sin, planes=False)
    tokens, width = batch * length, heads * 128

    def turned(x: torch.Tensor, sign: float) -> torch.Tensor:
        a, b = x.float().view(batch, length, heads, 128).chunk(2, dim=-1)
        c, s = cos[:, None], sign * sin[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1).view(tokens, width).to(torch.bfloat16)

    qkv = draw(tokens, width + 128)
    want = torch.cat((turned(qkv[:, :width], 1.0), qkv[:, width:]), dim=1)
    got = fused_rope.rope_forward_(qkv.clone(), heads, length, planes)
    assert (got == want).float().mean() > 0.999 and same(got[:, width:], want[:, width:])

    d = draw(tokens, width, scale=0.1, seed=8)
    heads_first = d.view(batch, length, heads, 128).transpose(1, 2)
    flat = torch.empty_like(d)
    plain = {"rotate": rotate, "row": None, "col": None, "col_out": None, "states": None, "sr": None}
    fused_rope.rope_backward(heads_first, table, row_out=flat, **plain)
    assert (flat == (turned(d, -1.0) if rotate else d)).float().mean() > 0.999
    rows = torch.zeros(tokens, width + 128, dtype=torch.float8_e5m2, device=DEVICE)
    cols = torch.zeros(width + 128, tokens, dtype=torch.float8_e5m2, device=DEVICE)
    fused, apart = states(2), states(2)
    fused_rope.rope_backward(
        heads_first,
        table,
        rotate=rotate,
        row=ROW_SR,
        col=COL,
        row_out=rows[:, 128:],
        col_out=cols[128:],
        states=(fused[0], fused[1]),
        sr=(sr(), 24),
    )
    want_row, want_col = produced(flat, ROW_SR, COL, apart, 24)
    assert same(rows[:, 128:], want_row) and same(cols[128:], want_col)
    assert not rows[:, :128].view(torch.uint8).any() and not cols[:128].view(torch.uint8).any()
    assert fused[:, :3].tolist() == apart[:, :3].tolist()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: fused_silu.silu_forward(x, x, None, None),
        lambda x: fused_norm.norm_forward(x, None, torch.ones(96), 1e-5, None, None),
    ],
    ids=["silu", "norm"],
)
def test_a_shape_without_whole_tiles_is_one_clear_error(call):
    with pytest.raises(ValueError, match=r"got 40 tokens x 96 features; needed multiples of 32 and 128"):
        call(torch.zeros(40, 96, dtype=torch.bfloat16, device=DEVICE))


def test_rope_tables_are_kept_but_not_confused() -> None:
    cos, sin = torch.rand(2, 64, 64, device=DEVICE)
    cos, sin = cos.clone(), sin.clone()
    first = fused_rope.rope_table(cos, sin, planes=True)
    assert fused_rope.rope_table(cos, sin, planes=True) is first
    assert fused_rope.rope_table(cos, sin, planes=False).shape == (64, 32, 4)
    assert torch.equal(fused_rope.rope_table(sin, cos, planes=True)[:, 0], sin[:, 0::2])
    cos.add_(1.0)
    assert torch.equal(fused_rope.rope_table(cos, sin, planes=True)[:, 1], cos[:, 1::2])
    for length in (1, 2, 3, 4, 5):
        fused_rope.rope_table(cos[:length], sin[:length], planes=True)
    assert len(fused_rope._TABLES) == 4
