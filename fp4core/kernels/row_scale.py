"""Rows of gradients brought to about 1 by powers of two, and back: so that one reference holds all of them.

Gradients differ by many binades from token to token: one that is predicted with certainty has next to none,
one that nobody attends to sends none to its key. A carrier has one reference per tensor, and Dgrad is the one
product in which a row stands alone. So its operand may be made of rows that are each times a power of two,
which changes no code, only the exponents of blocks; the row of dX comes out times the same, and its reader
takes that back. Column views, which mix tokens, are never scaled.

A scale is kept as BF16 in both halves of a word, with exponent fields of 1 to 253, so that its inverse is one
too. Word tiles as in ``device``.

Outliers. A row of dQ, dK, dV mixes a token's own query with what later tokens send to its key and value, and
of a few tokens the parts lie up to 48 binades apart (NOTES.md), more than any FP8 carrier spans. Such rows
may be set apart: their scale is zero, so that the carrier's row is too, and ``multiply_outliers`` makes
theirs in BF16, as many as are listed and no more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4core.kernels._launch import packed_instructions, pointer
from fp4core.kernels.device import duplicate, halves_max, magnitudes, max2, reduce_max2
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
def _row_extremes(
    d_ptr,
    batch,
    position,
    BATCH_STRIDE,
    TOKEN_STRIDE,
    HEAD_STRIDE,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    LEAST: tl.constexpr,
    ASM: tl.constexpr,
):
    """Of R tokens, over the heads: packed maxima [R, 64], and with LEAST packed [R, 4] the maximum of 0x8000
    - m over nonzero maxima m of blocks of 32 features (any of the two halves of a word)."""
    word = tl.arange(0, 64)[None, :]
    base = d_ptr + batch.to(tl.int64) * BATCH_STRIDE
    base = base + (position + tl.arange(0, R)[:, None]).to(tl.int64) * TOKEN_STRIDE + word
    found = tl.zeros([R, 64], tl.int32)
    low = tl.zeros([R, 4], tl.int32)
    for head in range(HEADS):
        m = magnitudes(tl.load(base + tl.cast(head, tl.int64) * HEAD_STRIDE))
        found = max2(found, m, ASM)
        if LEAST:
            block = halves_max(tl.reshape(reduce_max2(tl.reshape(m, [R, 4, 16]), 2, ASM), [R, 4]), ASM)
            low = max2(low, (-2147450880 - block) & 0x7FFF7FFF, ASM)
    return found, low


@triton.jit
def row_scales_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scale_ptr,
    outlier_ptr,
    state,
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
    CAPACITY: tl.constexpr,
    WIDEST: tl.constexpr,
    ASM: tl.constexpr,
):
    """See ``row_scales``; S a multiple of R, one program per R tokens. KV_HEADS 0: q alone.

    CAPACITY: rows that ``outlier_ptr`` [1 + CAPACITY] takes after their number, 0 for none. ``state``: of the
    view, where rows that found no room are noted as a misfit too small for any carrier.
    """
    token = tl.program_id(0) * R
    batch = token // S
    position = token % S
    APART: tl.constexpr = CAPACITY > 0
    found, low = _row_extremes(q_ptr, batch, position, Q_BATCH, Q_TOKEN, Q_HEAD, HEADS, R, APART, ASM)
    if KV_HEADS:
        k, low_k = _row_extremes(k_ptr, batch, position, K_BATCH, K_TOKEN, K_HEAD, KV_HEADS, R, APART, ASM)
        v, low_v = _row_extremes(v_ptr, batch, position, V_BATCH, V_TOKEN, V_HEAD, KV_HEADS, R, APART, ASM)
        found = max2(max2(found, k, ASM), v, ASM)
        low = max2(max2(low, low_k, ASM), low_v, ASM)
    largest = tl.max(halves_max(found, ASM) & 0xFFFF, 1)
    exponent = tl.minimum(tl.maximum(largest >> 7, 1), 253)
    scale = duplicate((254 - exponent) << 7)
    tokens = token + tl.arange(0, R)
    if APART:
        # of a row of zeros low is 0, and so the smallest block above every exponent
        smallest = (0x8000 - tl.max(low & 0xFFFF, 1)) >> 7
        outlier = ((largest >> 7) - smallest + 1 > WIDEST) & (largest < 0x7F80)
        count = outlier.to(tl.int32)
        number = tl.sum(count)
        if number > 0:
            first = tl.atomic_add(outlier_ptr, number, sem="relaxed")
            if first + number > CAPACITY:
                tl.atomic_max(state + 2, 0x7FFF, sem="relaxed")
                tl.atomic_add(state + 3, 1, sem="relaxed")
            slot = first + tl.cumsum(count, 0) - count
            outlier = outlier & (slot < CAPACITY)
            tl.store(outlier_ptr + 1 + slot, tokens, mask=outlier)
            scale = tl.where(outlier, 0, scale)
    tl.store(scale_ptr + tokens, scale)


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


def row_scales(
    *grads: Tensor, outliers: Tensor | None = None, state: Tensor | None = None, widest: int = 0
) -> Tensor:
    """Int32 [T]: per token the power of two, as BF16 in both halves, that makes its largest gradient 1 to 2.

    grads: BF16 [B, heads, S, 128], one, or three of which the last two have equally many heads; S a multiple
    of 16; tokens in the order of [B, S]. Of a token whose largest gradient is subnormal, infinite or NaN the
    scale is the last that BF16 has.

    outliers: of ``outlier_list``. Tokens whose nonzero blocks of 32 span more than ``widest`` binades are
    entered, in any order, as far as there is room, and those have scale zero. Which rows find room is
    chance, so where some do not, ``state`` (of the row view, as for ``producers``) counts a misfit that no
    FP8 carrier would hold, and what is made of these scales must not be used.
    """
    batch, heads, length, features = grads[0].shape
    if features != 128 or length % 16:
        raise ValueError(
            f"row_scales: got {tuple(grads[0].shape)}; needed [B, heads, S, 128] with S % 16 = 0"
        )
    if (outliers is None) != (state is None):
        raise ValueError("row_scales: got one of outliers and state; needed both or none")
    grads = tuple(d if d.stride(-1) == 1 else d.contiguous() for d in grads)
    three = (grads[0],) * 3 if len(grads) == 1 else grads
    out = torch.empty(batch * length, dtype=torch.int32, device=grads[0].device)
    rows = 16
    row_scales_kernel[(batch * length // rows,)](
        *(pointer(d, d) for d in three),
        out,
        out if outliers is None else outliers,
        out if state is None else state,
        length,
        *(n // 2 for d in three for n in d.stride()[:3]),
        HEADS=heads,
        KV_HEADS=0 if len(grads) == 1 else three[1].shape[1],
        R=rows,
        CAPACITY=0 if outliers is None else outliers.numel() - 1,
        WIDEST=widest,
        ASM=packed_instructions(out.device),
        num_warps=4,
    )
    return out


# Rows that may be set apart, of all: as many cost less than the rest gains by staying in FP8.
_SHARE = 8


def outlier_list(tokens: int, device: torch.device) -> Tensor:
    """Int32 [1 + n], zero: room for the number of rows set apart and the first n of their tokens."""
    return torch.zeros(1 + max(16, tokens // _SHARE), dtype=torch.int32, device=device)


@triton.jit
def outlier_gemm_kernel(
    rows_ptr,
    w_ptr,
    outlier_ptr,
    scale_ptr,
    out_ptr,
    alpha,
    K: tl.constexpr,
    D: tl.constexpr,
    CAPACITY: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
):
    """See ``multiply_outliers``; M rows x N columns per program, K a multiple of STEP, D of N."""
    slot = tl.program_id(0) * M + tl.arange(0, M)
    count = tl.minimum(tl.load(outlier_ptr), CAPACITY)
    if tl.program_id(0) * M < count:
        real = slot < count
        token = tl.load(outlier_ptr + 1 + slot, mask=real, other=0)
        column = tl.program_id(1) * N + tl.arange(0, N)
        k = tl.arange(0, STEP)
        a = rows_ptr + token.to(tl.int64)[:, None] * K + k[None, :]
        b = w_ptr + column.to(tl.int64)[None, :] * K + k[:, None]
        total = tl.zeros([M, N], tl.float32)
        for first in range(0, K, STEP):
            left = tl.load(a + first, mask=real[:, None], other=0.0)
            total = tl.dot(left, tl.load(b + first).to(tl.bfloat16), total)
        where = out_ptr + token.to(tl.int64)[:, None] * D + column[None, :]
        tl.store(where, (total * alpha).to(tl.bfloat16), mask=real[:, None])
        tl.store(scale_ptr + token, 0x3F803F80 + tl.zeros_like(token), mask=real)


def multiply_outliers(
    rows: Tensor, w: Tensor, alpha: float, outliers: Tensor, scales: Tensor, out: Tensor
) -> None:
    """Rows of ``out`` that were set apart: alpha (rows W^T), summed in FP32; their scales become 1.

    Args:
        rows: BF16 [T, K], contiguous, of which only the listed rows are read; K a multiple of 128.
        w: FP8 [D, K], contiguous; D a multiple of 32.
        outliers: of ``row_scales``; the host need not know how many there are.
        scales: int32 [T]; out: BF16 [T, D]; both written.
    """
    k, d = rows.shape[1], w.shape[0]
    capacity = outliers.numel() - 1
    if out.device.type != "cuda":  # exact sums, as ``carrier_gemm`` does there
        listed = outliers[1 : 1 + min(int(outliers[0]), capacity)].long()
        exact = (rows[listed].double() @ w.double().t()).float()
        out[listed], scales[listed] = (exact * alpha).to(out.dtype), 0x3F803F80
        return
    m, n = 64, 32
    outlier_gemm_kernel[(triton.cdiv(capacity, m), d // n)](
        rows,
        w,
        outliers,
        scales,
        out,
        alpha,
        K=k,
        D=d,
        CAPACITY=capacity,
        M=m,
        N=n,
        STEP=128,
        num_warps=4,
        num_stages=4,
    )


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
