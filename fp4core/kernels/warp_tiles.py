"""Both views of a warp's own tile of 32 tokens, made in registers: no shared memory, no barrier.

Tile convention. Words (BF16 pairs, as in ``device``) lie as [8, C, 4, H, 16]: token 4 q + p of warp tile c,
block h of 32 features, word of the block. A lane is (q, a quarter of the block), so that

    rows      a block of 32 features is 4 lanes: its maximum takes two exchanges, for two rows at a time
    columns   a block of 32 tokens is 4 tokens in a thread and 8 lanes: three exchanges
    Philox    a call, 16 features, is two lanes: one exchange
    stores    a thread has whole words of a column (4 tokens), 8 lanes a whole sector of 32 bytes; a row of a
              block is one sector

A thread holds 16 H words instead of the 64 of ``tiles``, whose column view goes through shared memory: fewer
registers, hence more warps, and no warp waits for another. What ``tiles`` can do and this cannot: Hadamard
rotations, which mix the tokens of different lanes, carriers other than FP8, and 2D or NV-style scales.

Compilers work against it: LLVM computes the addresses of all of a loop's iterations ahead and ptxas mixes
views that have nothing to do with each other, until registers spill. ``fresh`` and ``apart`` keep values that
one iteration, or one view, needs from being held beside those of another.
"""

# ruff: noqa: RET505  Triton compiles what follows a constexpr branch unless it is in its else
from __future__ import annotations

import triton
import triton.language as tl

from fp4core import formats
from fp4core.kernels.device import magnitudes, max2, permute_bytes, philox4x32, reduce_max2
from fp4core.kernels.mx import (
    fp8_bytes,
    fp8_bytes_signed,
    mul2,
    mx_magnitudes_above,
    mx_round,
    mx_threshold,
)
from fp4core.kernels.producers import View
from fp4core.kernels.tiles import split_words, transpose_bytes


@triton.jit
def fresh(i, ASM: tl.constexpr):
    """Zero that is new in every iteration ``i``, to the compiler: it keeps no sum with it until the next."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, 0; // $1", "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return i * 0


@triton.constexpr_function
def _add(k):
    return f"add.s32 $0, $1, {k};"


@triton.jit
def apart(one, K: tl.constexpr, ASM: tl.constexpr):
    """True, which no compiler knows: what is under ``if apart(..)`` is not mixed with what comes before.

    K > 0: another one for each block, or their conditions would be merged. ``one``: as for ``load_words``.
    """
    if ASM:
        return tl.inline_asm_elementwise(_add(K), "=r,r", [one], dtype=tl.int32, is_pure=False, pack=1) > 0
    else:
        return one > 0


@triton.jit
def aligned(pointers, BYTES: tl.constexpr):
    """Pointers [8, C, 4, H, E] that lie at multiples of so many bytes."""
    return tl.multiple_of(pointers, (1, 1, 1, 1, BYTES))


@triton.jit
def row_pointers(base, STEP, H_STEP: tl.constexpr, chunk, H: tl.constexpr, one, E: tl.constexpr, z=0):
    """Pointers [8, C, 4, H, E] to E words of each block of a row-major matrix, a quarter of them in a lane.

    STEP: words from token to token, H_STEP from block to block, ``chunk`` [1, C, 1, 1, 1] to the warp's tile.
    ``z``: of ``fresh``. Tokens and blocks are added last, so that they become immediate offsets.
    """
    V: tl.constexpr = E // 4
    f = tl.arange(0, E)[None, None, None, None, :] * one
    f = tl.multiple_of(tl.max_contiguous(f, (1, 1, 1, 1, V)), (1, 1, 1, 1, V))
    q = tl.arange(0, 8)[:, None, None, None, None] + z
    p = tl.arange(0, 4)[None, None, :, None, None]
    h = tl.arange(0, H)[None, None, None, :, None]
    return base + (f + q * (4 * STEP) + chunk) + p * STEP + h * H_STEP


@triton.jit
def column_pointers(base, STRIDE, H_STEP: tl.constexpr, chunk, H: tl.constexpr, one, z=0):
    """Pointers [4, 8, C, H, 4, 2] to ``column_view``'s words in a matrix of STRIDE words per feature.

    H_STEP: features from block to block; ``chunk`` [1, 1, C, 1, 1, 1] words to the warp's tile.
    """
    lane = tl.arange(0, 4)[:, None, None, None, None, None]
    q = (tl.arange(0, 8)[None, :, None, None, None, None] + z) * one
    h = tl.arange(0, H)[None, None, None, :, None, None]
    v = tl.arange(0, 4)[None, None, None, None, :, None]
    o = tl.arange(0, 2)[None, None, None, None, None, :]
    return base + ((lane * 8) * STRIDE + q + chunk) + (h * H_STEP + v * 2 + o) * STRIDE


@triton.jit
def per_token(ptr, chunk, one, C: tl.constexpr, z=0):
    """[4, 8, C, 4]: ptr[token], held once per lane; ``chunk`` [1, 1, C, 1]: first token of a warp's tile."""
    lane = tl.arange(0, 4)[:, None, None, None]
    q = (tl.arange(0, 8)[None, :, None, None] + z) * one
    p = tl.arange(0, 4)[None, None, None, :] * one
    # lanes first: the layout of the tile
    return tl.load(ptr + q * 4 + chunk + p + lane * 0)


@triton.jit
def spread_token(v, H: tl.constexpr):
    """``per_token``'s values repeated over a tile [8, C, 4, H, 16]."""
    C: tl.constexpr = v.shape[2]
    v = tl.reshape(tl.permute(v, [1, 2, 3, 0]), [8, C, 4, 1, 4, 1])
    return tl.reshape(tl.broadcast_to(v, [8, C, 4, H, 4, 4]), [8, C, 4, H, 16])


@triton.jit
def _swap(a, b):
    """Between lanes l and l ^ 1 of the last axis: the even lane gives its b for the odd one's a."""
    S0: tl.constexpr = a.shape[0]
    S1: tl.constexpr = a.shape[1]
    S2: tl.constexpr = a.shape[2]
    upper = tl.reshape((tl.arange(0, 4) & 1) != 0, [1, 1, 1, 1, 4])
    sent = tl.where(upper, a, b)
    pairs = tl.reshape(sent, [S0, S1, S2, 8, 2, 2])
    both = tl.broadcast_to(tl.xor_sum(pairs, 5, keep_dims=True), [S0, S1, S2, 8, 2, 2])
    other = tl.reshape(both, [S0, S1, S2, 8, 4]) ^ sent
    return tl.where(upper, other, a), tl.where(upper, b, other)


@triton.jit
def random_tile(
    seed,
    step,
    PRODUCER,
    first,
    PER_TOKEN,
    H_STEP: tl.constexpr,
    chunk,
    H: tl.constexpr,
    C: tl.constexpr,
    z=0,
):
    """Random words [8 C, 4, 8 H], one per four features; the same as ``views.random_words`` gives each place.

    Places count in 16 features: ``first`` int64 that of the tile's first element, PER_TOKEN a token's,
    H_STEP a block's, ``chunk`` [1, 1, C, 1, 1] a warp's. Axes are in the order whose default layout is the
    tile's: lanes last, warps before them, registers first.
    """
    i = tl.arange(0, 2)[:, None, None, None, None]
    h = tl.arange(0, H)[None, :, None, None, None]
    q = tl.arange(0, 8)[None, None, None, :, None] + z
    lane = tl.arange(0, 4)[None, None, None, None, :]
    token = q * 4 + i * 2 + lane % 2
    place = first + (token * PER_TOKEN + chunk + h * H_STEP + lane // 2)
    zero = tl.zeros([2, H, C, 8, 4], tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        place.to(tl.uint32),
        (place >> 32).to(tl.uint32),
        zero + step.to(tl.uint32),
        zero + PRODUCER.to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    w0, w2 = _swap(w0.to(tl.int32, bitcast=True), w2.to(tl.int32, bitcast=True))
    w1, w3 = _swap(w1.to(tl.int32, bitcast=True), w3.to(tl.int32, bitcast=True))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [2, H, C, 8, 4, token, pair]
    return tl.reshape(tl.permute(words, [3, 2, 0, 5, 1, 4, 6]), [8 * C, 4, 8 * H])


@triton.jit
def row_view(
    w, random, c, c64, ct, RULE: tl.constexpr, CARRIER: tl.constexpr, SR: tl.constexpr, ASM: tl.constexpr
):
    """Row view of words [8, C, 4, H, 16] in FP8, with the extremes that ``views.note_extremes`` takes.

    ``c``, ``c64``, ``ct`` of ``mx_constants``; ``random`` of ``random_tile`` where SR.

    Returns: words of four features [8, C, 4, H, 8]; packed maxima [8 C] of a thread's blocks, and of their
    lowness.
    """
    C: tl.constexpr = w.shape[1]
    H: tl.constexpr = w.shape[3]
    N: tl.constexpr = 8 * C
    w0, w1 = split_words(tl.reshape(w, [N, 4, 16 * H]))  # [N, 4, 8 H]
    a = max2(magnitudes(w0), magnitudes(w1), ASM)
    first, second = tl.split(tl.permute(tl.reshape(a, [N, 2, 2, 8 * H]), [0, 1, 3, 2]))
    low = permute_bytes(first, second, 0x5410, ASM)
    high = permute_bytes(first, second, 0x7632, ASM)
    both = reduce_max2(
        tl.reshape(max2(low, high, ASM), [N, 2, H, 8]), 3, ASM
    )  # of two rows, one in each half
    top = tl.reshape(reduce_max2(tl.reshape(both, [N, 2 * H]), 1, ASM), [N])
    least = tl.reshape(reduce_max2(tl.reshape((-2147450880 - both) & 0x7FFF7FFF, [N, 2 * H]), 1, ASM), [N])
    # thresholds of two rows at a time, and only then one row's for each word
    t = mx_threshold(both, ct, RULE, ASM)
    threshold = _spread_rows(t, N, H, ASM)
    if SR:
        floor = _spread_rows(mul2(t, 0x43004300 + tl.zeros_like(t), ASM), N, H, ASM)
        v0 = mx_magnitudes_above(w0, threshold, floor, random, c, RULE, 0, ASM)
        v1 = mx_magnitudes_above(w1, threshold, floor, random, c, RULE, 1, ASM)
        b0 = fp8_bytes_signed(v0, w0, CARRIER, ASM)
        b1 = fp8_bytes_signed(v1, w1, CARRIER, ASM)
    else:
        b0 = fp8_bytes(mx_round(w0, threshold, c, c64, RULE, ASM), CARRIER, ASM)
        b1 = fp8_bytes(mx_round(w1, threshold, c, c64, RULE, ASM), CARRIER, ASM)
    return tl.reshape(permute_bytes(b0, b1, 0x7531, ASM), [8, C, 4, H, 8]), top, least


@triton.jit
def _spread_rows(t, N: tl.constexpr, H: tl.constexpr, ASM: tl.constexpr):
    """Packed pairs of rows [N, 2, H, 1] as one value per word, in both halves: [N, 4, 8 H]."""
    first = permute_bytes(t, t, 0x1010, ASM)
    second = permute_bytes(t, t, 0x3232, ASM)
    rows = tl.permute(tl.join(first, second), [0, 1, 4, 2, 3])  # [N, 2, 2, H, 1]
    return tl.reshape(tl.broadcast_to(rows, [N, 2, 2, H, 8]), [N, 4, 8 * H])


@triton.jit
def column_view(w, c, c64, ct, RULE: tl.constexpr, CARRIER: tl.constexpr, ASM: tl.constexpr):
    """Column view of words [8, C, 4, H, 16] in FP8, rounded to nearest, with its extremes as in ``row_view``.

    Returns: words of four tokens [4, 8, C, H, 4, 2], for ``column_pointers``; packed [C, 4] maxima, lowness.
    """
    C: tl.constexpr = w.shape[1]
    H: tl.constexpr = w.shape[3]
    m = reduce_max2(reduce_max2(magnitudes(w), 2, ASM), 0, ASM)  # [1, C, 1, H, 16]
    lanes = tl.reshape(tl.permute(tl.reshape(m, [C, H, 4, 4]), [0, 2, 1, 3]), [C, 4, 4 * H])
    top = tl.reshape(reduce_max2(lanes, 2, ASM), [C, 4])
    least = tl.reshape(reduce_max2((-2147450880 - lanes) & 0x7FFF7FFF, 2, ASM), [C, 4])
    t = tl.broadcast_to(mx_threshold(m, ct, RULE, ASM), [8, C, 4, H, 16])
    b = fp8_bytes(mx_round(w, t, c, c64, RULE, ASM), CARRIER, ASM)
    v = transpose_bytes(tl.reshape(b, [8 * C, 4, 16 * H]), ASM)  # [32 H, 8 C]
    return tl.permute(tl.reshape(v, [H, 4, 4, 2, 8, C]), [1, 4, 5, 0, 2, 3]), top, least


def takes(*views: View) -> bool:
    """Whether these views can be made here: FP8 carriers (of MX formats) in 1D blocks, not rotated."""
    return all(
        v.carrier != "bf16" and v.hadamard == "none" and not formats.get(v.format).two_d for v in views
    )
