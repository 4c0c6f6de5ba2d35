"""Tile functions: block maxima, Hadamard rotation, transposition and stores of word tiles.

Shapes as in ``device``: ``w_GTW`` is [G, T, W]. The layout that makes all of this cheap is one warp per
group, with a thread holding all T tokens of its words: ``load_words`` asks for it by telling the compiler
that only VEC words are contiguous. Block maxima along tokens, the rotation and the packing of tokens
then need no exchange between threads; row blocks need shuffles among the few lanes of a block, two rows at a
time.
"""

# ruff: noqa: RET505  Triton compiles what follows a constexpr branch unless it is in its else
from __future__ import annotations

import triton
import triton.language as tl

from fp4core.kernels.device import (
    halves_max,
    high_f32,
    low_f32,
    magnitudes,
    max2,
    pack_rne,
    permute_bytes,
    reduce_max2,
)


@triton.constexpr_function
def eviction(keep):
    """Eviction policy of a tile read once (0), for the first (1) or for the last time (2)."""
    return ("", "evict_last", "evict_first")[keep]


@triton.jit
def _row_pointers(
    base,
    STRIDE: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
    one,
    T: tl.constexpr,
    SPAN: tl.constexpr,
):
    f = tl.arange(0, W)[None, None, :] * one
    f = tl.multiple_of(tl.max_contiguous(f, (1, 1, VEC)), (1, 1, VEC))
    g = tl.arange(0, G)[:, None, None]
    t = tl.arange(0, T)[None, :, None]
    # in this order, so that tokens become immediate offsets
    return base + f + g * ((SPAN if SPAN else T) * STRIDE) + t * STRIDE


@triton.jit
def load_words(
    base,
    STRIDE,
    G: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
    one,
    T: tl.constexpr = 32,
    SPAN: tl.constexpr = 0,
    KEEP: tl.constexpr = 0,
):
    """Words [G, T, W] of a row-major BF16 matrix, from int32 pointer ``base`` (the tile's first word).

    STRIDE: words per row. VEC: words per thread along a row. SPAN: tokens from one group to the next, T where
    0. KEEP: for a tile that the kernel reads twice, 1 in the first reading and 2 in the last (eviction
    policies). ``one`` is an int32 argument of value 1 that the compiler must not specialise
    (``do_not_specialize``): it hides the contiguity that would pull a row's words into fewer lanes.
    """
    POLICY: tl.constexpr = eviction(KEEP)
    return tl.load(_row_pointers(base, STRIDE, G, W, VEC, one, T, SPAN), eviction_policy=POLICY)


@triton.jit
def load_any(
    base,
    STRIDE: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
    one,
    rows,
    words,
    FP32: tl.constexpr,
    MASKED: tl.constexpr,
    ASM: tl.constexpr,
    T: tl.constexpr = 32,
    SPAN: tl.constexpr = 0,
    KEEP: tl.constexpr = 0,
):
    """Words of a BF16 matrix (int32 pointer) or of an FP32 one (int64 pointer, two values), rounded to BF16.

    MASKED: only ``rows`` rows and ``words`` words of the tile exist; the rest reads as zero.
    """
    if MASKED:
        g = tl.arange(0, G)[:, None, None]
        t = tl.arange(0, T)[None, :, None]
        real = (tl.arange(0, W)[None, None, :] < words) & (g * (SPAN if SPAN else T) + t < rows)
        where = _row_pointers(base, STRIDE, G, W, VEC, one, T, SPAN)
        POLICY: tl.constexpr = eviction(KEEP)
        w = tl.load(where, mask=real, other=0, eviction_policy=POLICY)
    else:
        w = load_words(base, STRIDE, G, W, VEC, one, T, SPAN, KEEP)
    if FP32:
        low = w.to(tl.int32).to(tl.float32, bitcast=True)
        high = (w >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        w = pack_rne(low, high, ASM)
    return w


@triton.jit
def split_words(a):
    """[G, 32, W] into its even and odd words, each [G, 32, W / 2]."""
    G: tl.constexpr = a.shape[0]
    W: tl.constexpr = a.shape[2]
    return tl.split(tl.reshape(a, [G, a.shape[1], W // 2, 2]))


@triton.jit
def join_words(even, odd):
    """Inverse of ``split_words``."""
    G: tl.constexpr = even.shape[0]
    W: tl.constexpr = even.shape[2]
    return tl.reshape(tl.join(even, odd), [G, even.shape[1], 2 * W])


@triton.jit
def column_amax(w, BLOCK: tl.constexpr, ASM: tl.constexpr):
    """Packed maxima [G, T // BLOCK, 1, W] over BLOCK tokens (16 or 32)."""
    G: tl.constexpr = w.shape[0]
    W: tl.constexpr = w.shape[2]
    a = tl.reshape(magnitudes(w), [G, w.shape[1] // BLOCK, BLOCK, W])
    return reduce_max2(a, 2, ASM)


@triton.jit
def row_amax(w, BLOCK: tl.constexpr, ASM: tl.constexpr):
    """Row-block maxima over BLOCK features (16 or 32).

    Returns:
        ([G, T, W / 2]: the block maximum of each pair of words, in both halves; [G, n, ..]: the same maxima
        packed, in some order). The first is laid out like ``split_words(w)``: repeating the maxima over a
        block's words happens before rows are unpacked, so that no thread computes for its neighbours.
    """
    G: tl.constexpr = w.shape[0]
    W: tl.constexpr = w.shape[2]
    T: tl.constexpr = w.shape[1]
    B: tl.constexpr = BLOCK // 4
    even, odd = split_words(magnitudes(w))
    a = max2(even, odd, ASM)
    if ASM:
        # two rows share a register for the exchange between lanes
        first, second = tl.split(tl.permute(tl.reshape(a, [G, T // 2, 2, W // 2]), [0, 1, 3, 2]))
        low = permute_bytes(first, second, 0x5410, ASM)
        high = permute_bytes(first, second, 0x7632, ASM)
        both = reduce_max2(tl.reshape(max2(low, high, ASM), [G, T // 2, W // (2 * B), B]), 3, ASM)
        spread = tl.broadcast_to(both, [G, T // 2, W // (2 * B), B])
        first = permute_bytes(spread, spread, 0x1010, ASM)
        second = permute_bytes(spread, spread, 0x3232, ASM)
        rows = tl.permute(tl.join(first, second), [0, 1, 4, 2, 3])
        return tl.reshape(rows, [G, T, W // 2]), both
    else:
        both = halves_max(reduce_max2(tl.reshape(a, [G, T, W // (2 * B), B]), 3, ASM), ASM)
        return tl.reshape(tl.broadcast_to(both, [G, T, W // (2 * B), B]), [G, T, W // 2]), both


@triton.jit
def square_amax(w, BLOCK: tl.constexpr, ASM: tl.constexpr):
    """Maxima [G, T // BLOCK, 1, W * 2 // BLOCK, 1] of BLOCK x BLOCK tiles, the same in both halves."""
    G: tl.constexpr = w.shape[0]
    W: tl.constexpr = w.shape[2]
    B: tl.constexpr = BLOCK // 2
    columns = tl.reshape(column_amax(w, BLOCK, ASM), [G, w.shape[1] // BLOCK, 1, W // B, B])
    return halves_max(reduce_max2(columns, 4, ASM), ASM)


@triton.jit
def _butterfly(v, H: tl.constexpr):
    """Stage of distance H along axis 1 of FP32 [G, T, W]: i := a + b, i + H := a - b."""
    G: tl.constexpr = v.shape[0]
    W: tl.constexpr = v.shape[2]
    T: tl.constexpr = v.shape[1]
    x = tl.permute(tl.reshape(v, [G, T // (2 * H), 2, H, W]), [0, 1, 3, 4, 2])
    a, b = tl.split(x)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 1, 4, 2, 3]), [G, T, W])


@triton.jit
def rotate_f32(v, HADAMARD: tl.constexpr):
    if HADAMARD != "plain16":
        token = tl.reshape(tl.arange(0, v.shape[1]), [1, v.shape[1], 1])
        kept = (tl.full([1, v.shape[1], 1], 0x2817, tl.int32) >> (token % 16)) & 1
        v = v * tl.where(kept == 1, 1.0, -1.0)  # a product, so that the sign of a zero flips too
    v = _butterfly(v, 1)
    v = _butterfly(v, 2)
    v = _butterfly(v, 4)
    v = _butterfly(v, 8)
    if HADAMARD == "fixed32":
        v = _butterfly(v, 16)
        return v * 0.17677669529663687
    else:
        return v * 0.25


@triton.jit
def rotate_tokens(w, HADAMARD: tl.constexpr, ASM: tl.constexpr):
    """Words [G, T, W] rotated along tokens in groups of 16 or 32 and rounded to BF16 again.

    Signs, stages and the single factor in the order of ``reference.hadamard``.
    """
    if HADAMARD == "none":
        return w
    else:
        return pack_rne(rotate_f32(low_f32(w), HADAMARD), rotate_f32(high_f32(w), HADAMARD), ASM)


@triton.jit
def rotate_tokens_tail(w, HADAMARD: tl.constexpr, rows, ASM: tl.constexpr):
    """``rotate_tokens`` of a tile with ``rows`` real tokens: a last incomplete group stays as it is."""
    GROUP: tl.constexpr = 32 if HADAMARD == "fixed32" else 16
    G: tl.constexpr = w.shape[0]
    T: tl.constexpr = w.shape[1]
    token = tl.reshape(tl.arange(0, T * G), [G, T, 1])
    whole = token // GROUP * GROUP + GROUP <= rows
    return tl.where(whole, rotate_tokens(w, HADAMARD, ASM), w)


@triton.jit
def transpose_words(v, ASM: tl.constexpr):
    """Words [G, T, W] of feature pairs to words [2 W, G * T / 2] of token pairs: the transposed tile."""
    G: tl.constexpr = v.shape[0]
    W: tl.constexpr = v.shape[2]
    x = tl.permute(tl.reshape(v, [G, v.shape[1] // 2, 2, W]), [0, 1, 3, 2])
    first, second = tl.split(x)
    even = permute_bytes(first, second, 0x5410, ASM)
    odd = permute_bytes(first, second, 0x7632, ASM)
    out = tl.permute(tl.join(even, odd), [2, 3, 0, 1])
    return tl.reshape(out, [2 * W, G * v.shape[1] // 2])


@triton.jit
def transpose_bytes(b, ASM: tl.constexpr):
    """Words [G, T, W] with bytes in 1 and 3 (``fp8_bytes``) to words [2 W, G * T / 4] of four tokens each."""
    G: tl.constexpr = b.shape[0]
    W: tl.constexpr = b.shape[2]
    x = tl.permute(tl.reshape(b, [G, b.shape[1] // 4, 2, 2, W]), [0, 1, 4, 2, 3])
    first, second = tl.split(x)  # tokens 4i, 4i + 2 and 4i + 1, 4i + 3
    pairs = permute_bytes(first, second, 0x7351, ASM)  # even feature of two tokens, odd feature of two tokens
    early, late = tl.split(pairs)
    even = permute_bytes(early, late, 0x5410, ASM)
    odd = permute_bytes(early, late, 0x7632, ASM)
    out = tl.permute(tl.join(even, odd), [2, 3, 0, 1])
    return tl.reshape(out, [2 * W, G * b.shape[1] // 4])


@triton.jit
def merge_pairs(b, ASM: tl.constexpr):
    """Words [G, T, W] with bytes in 1 and 3 to words [G, T, W / 2] of four features each."""
    G: tl.constexpr = b.shape[0]
    W: tl.constexpr = b.shape[2]
    first, second = tl.split(tl.reshape(b, [G, b.shape[1], W // 2, 2]))
    return permute_bytes(first, second, 0x7531, ASM)


@triton.jit
def store_rows(base, v, STRIDE: tl.constexpr, VEC: tl.constexpr, one, SPAN: tl.constexpr = 0):
    """Store words [G, T, W] row-major: STRIDE words per row of the output, VEC words per thread."""
    tl.store(_store_pointers(base, v, STRIDE, VEC, one, SPAN), tl.permute(v, [2, 0, 1]))


@triton.jit
def _store_pointers(base, v, STRIDE: tl.constexpr, VEC: tl.constexpr, one, SPAN: tl.constexpr):
    # features first: among axes of equal contiguity the compiler spreads lanes over the first
    f = tl.arange(0, v.shape[2])[:, None, None] * one
    f = tl.multiple_of(tl.max_contiguous(f, (VEC, 1, 1)), (VEC, 1, 1))
    g = tl.arange(0, v.shape[0])[None, :, None]
    t = tl.arange(0, v.shape[1])[None, None, :]
    return base + f + g * ((SPAN if SPAN else v.shape[1]) * STRIDE) + t * STRIDE


@triton.jit
def store_rows_masked(
    base, v, STRIDE: tl.constexpr, VEC: tl.constexpr, one, rows, words, SPAN: tl.constexpr = 0
):
    """``store_rows`` of the first ``rows`` rows and ``words`` words."""
    g = tl.arange(0, v.shape[0])[None, :, None]
    t = tl.arange(0, v.shape[1])[None, None, :]
    real = (tl.arange(0, v.shape[2])[:, None, None] < words) & (g * (SPAN if SPAN else v.shape[1]) + t < rows)
    tl.store(_store_pointers(base, v, STRIDE, VEC, one, SPAN), tl.permute(v, [2, 0, 1]), mask=real)


@triton.jit
def store_columns(base, v, STRIDE, MASKED: tl.constexpr, features, words):
    """Store words [F, N] of a transposed tile: row = feature, STRIDE words per row of the output."""
    F: tl.constexpr = v.shape[0]
    N: tl.constexpr = v.shape[1]
    f = tl.arange(0, F)[:, None]
    n = tl.arange(0, N)[None, :]
    where = base + f.to(tl.int64) * STRIDE + n
    if MASKED:
        tl.store(where, v, mask=(f < features) & (n < words))
    else:
        tl.store(where, v)
