"""Rows of gradients brought to about 1 by powers of two, and back: so that one reference holds all of them.

Gradients differ by many binades from token to token: one that is predicted with certainty has next to none,
one that nobody attends to sends none to its key. A carrier has one reference per tensor, and Dgrad is the one
product in which a row stands alone. So its operand may be made of rows that are each times a power of two,
which changes no code, only the exponents of blocks; the row of dX comes out times the same, and its reader
takes that back. Column views, which mix tokens, are never scaled.

A scale is kept as BF16 in both halves of a word, with exponent fields of 1 to 253, so that its inverse is one
too. Word tiles as in ``device``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4core.kernels._launch import packed_instructions, pointer
from fp4core.kernels.device import duplicate, halves_max, magnitudes, max2
from fp4core.kernels.mx import mul2


@triton.jit
def token_scales(
    scale_ptr,
    like,
    one,
    rows=0,
    MASKED: tl.constexpr = False,
    SPAN: tl.constexpr = 0,
    PER_WORD: tl.constexpr = False,
):
    """Scales of the tokens of a tile ``like`` [G, T, W] from scale_ptr on; SPAN as in ``load_words``.

    [G, T, 1], or with PER_WORD [G, T, W]: of 32 tokens the compiler would hold, and spill, all (3.3 KB of
    stack instead of 0.5 in ``fused_rope``); of 8 that is the better way (134 registers instead of 211 in
    ``fused_silu``).
    """
    T: tl.constexpr = like.shape[1]
    g = tl.arange(0, like.shape[0])[:, None, None] * (SPAN if SPAN else T)
    t = tl.arange(0, T)[None, :, None]
    token = g + t * one
    if PER_WORD:
        token += tl.zeros_like(like)
    if MASKED:
        return tl.load(scale_ptr + token, mask=token < rows, other=0x3F803F80)
    else:  # noqa: RET505  Triton compiles what follows a constexpr branch unless it is in its else
        return tl.load(scale_ptr + token)


@triton.jit
def inverse(scales):
    """Inverses of words of scales: exponent fields of a power of two and its inverse add up to 254."""
    return 0x7F007F00 - scales


@triton.jit
def _row_maxima(
    d_ptr,
    batch,
    position,
    BATCH_STRIDE,
    TOKEN_STRIDE,
    HEAD_STRIDE,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    ASM: tl.constexpr,
):
    """Packed maxima [R, 64] over the heads of R tokens."""
    word = tl.arange(0, 64)[None, :]
    base = d_ptr + batch.to(tl.int64) * BATCH_STRIDE
    base = base + (position + tl.arange(0, R)[:, None]).to(tl.int64) * TOKEN_STRIDE + word
    found = tl.zeros([R, 64], tl.int32)
    for head in range(HEADS):
        found = max2(found, magnitudes(tl.load(base + tl.cast(head, tl.int64) * HEAD_STRIDE)), ASM)
    return found


@triton.jit
def row_scales_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scale_ptr,
    S,
    Q_BATCH,
    Q_HEAD,
    Q_TOKEN,
    K_BATCH,
    K_HEAD,
    K_TOKEN,
    V_BATCH,
    V_HEAD,
    V_TOKEN,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    R: tl.constexpr,
    ASM: tl.constexpr,
):
    """See ``row_scales``; S a multiple of R, one program per R tokens. KV_HEADS 0: q alone."""
    token = tl.program_id(0) * R
    batch = token // S
    position = token % S
    found = _row_maxima(q_ptr, batch, position, Q_BATCH, Q_TOKEN, Q_HEAD, HEADS, R, ASM)
    if KV_HEADS:
        k = _row_maxima(k_ptr, batch, position, K_BATCH, K_TOKEN, K_HEAD, KV_HEADS, R, ASM)
        v = _row_maxima(v_ptr, batch, position, V_BATCH, V_TOKEN, V_HEAD, KV_HEADS, R, ASM)
        found = max2(max2(found, k, ASM), v, ASM)
    largest = tl.max(halves_max(found, ASM) & 0xFFFF, 1)
    exponent = tl.minimum(tl.maximum(largest >> 7, 1), 253)
    tl.store(scale_ptr + token + tl.arange(0, R), duplicate((254 - exponent) << 7))


@triton.jit(do_not_specialize=["one"])
def unscale_kernel(x_ptr, scale_ptr, T, one, STRIDE: tl.constexpr, R: tl.constexpr, ASM: tl.constexpr):
    """Rows of x [T, 2 STRIDE] times the inverses of their scales, in place; R x 256 words a program."""
    CHUNKS: tl.constexpr = (STRIDE + 255) // 256
    row = (tl.program_id(0) // CHUNKS) * R + tl.arange(0, R)[:, None]
    word = (tl.program_id(0) % CHUNKS) * 256 + tl.arange(0, 256)[None, :]
    real = (row < T) & (word < STRIDE)
    where = x_ptr + row.to(tl.int64) * STRIDE + word
    s = tl.load(scale_ptr + row, mask=row < T, other=0x3F803F80)
    w = tl.load(where, mask=real, other=0)
    tl.store(where, mul2(w, inverse(s) + tl.zeros_like(w), ASM), mask=real)


def row_scales(*grads: Tensor) -> Tensor:
    """Int32 [T]: per token the power of two, as BF16 in both halves, that makes its largest gradient 1 to 2.

    grads: BF16 [B, heads, S, 128], one, or three of which the last two have equally many heads; S a multiple
    of 16; tokens in the order of [B, S]. Of a token whose largest gradient is subnormal, infinite or NaN the
    scale is the last that BF16 has.
    """
    batch, heads, length, features = grads[0].shape
    if features != 128 or length % 16:
        raise ValueError(
            f"row_scales: got {tuple(grads[0].shape)}; needed [B, heads, S, 128] with S % 16 = 0"
        )
    grads = tuple(d if d.stride(-1) == 1 else d.contiguous() for d in grads)
    three = (grads[0],) * 3 if len(grads) == 1 else grads
    out = torch.empty(batch * length, dtype=torch.int32, device=grads[0].device)
    rows = 16
    row_scales_kernel[(batch * length // rows,)](
        *(pointer(d, d) for d in three),
        out,
        length,
        *(n // 2 for d in three for n in d.stride()[:3]),
        HEADS=heads,
        KV_HEADS=0 if len(grads) == 1 else three[1].shape[1],
        R=rows,
        ASM=packed_instructions(out.device),
        num_warps=4,
    )
    return out


def unscale_(x: Tensor, scales: Tensor) -> Tensor:
    """Take the scales of ``row_scales`` back from rows of x, contiguous BF16 [T, F], F even; returns x."""
    t, features = x.shape
    rows = 16
    unscale_kernel[(triton.cdiv(t, rows) * triton.cdiv(features, 512),)](
        x.view(torch.int32),
        scales,
        t,
        1,
        STRIDE=features // 2,
        R=rows,
        ASM=packed_instructions(x.device),
        num_warps=4,
    )
    return x
