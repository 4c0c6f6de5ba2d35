"""Views of a word tile: from loaded words to the words a kernel stores.

``row_*`` functions give the row view (blocks along features), ``column_*`` the column view (blocks along
tokens, transposed, after an optional Hadamard rotation), ``square_*`` both views of 2D formats, which share
one encoding. Fused kernels that make their own words (RMSNorm, SiLU, RoPE) call the same functions, so fused
and unfused give equal carriers.

State of an MX view: int32 [4] = reference exponent, largest BF16 bits of a block maximum seen, 0x8000 minus
the smallest nonzero one, misfits. ``note_blocks`` updates the last three, ``producers.advance`` the first.
"""

# ruff: noqa: RET505  Triton compiles what follows a constexpr branch unless it is in its else
from __future__ import annotations

import triton
import triton.language as tl

from fp4core.kernels.device import (
    halves_max,
    high_f32,
    low_f32,
    permute_bytes,
    philox4x32,
    reduce_max2,
)
from fp4core.kernels.mx import (
    fp8_bytes,
    fp8_bytes_signed,
    mx_bounds,
    mx_constants,
    mx_magnitudes_stochastic,
    mx_round,
    mx_threshold,
    with_signs,
)
from fp4core.kernels.nv import nv_block_safe, nv_carrier, nv_carrier_stochastic
from fp4core.kernels.tiles import (
    column_amax,
    join_words,
    merge_pairs,
    rotate_tokens,
    row_amax,
    split_words,
    square_amax,
    transpose_bytes,
    transpose_words,
)


@triton.jit
def note_blocks(packed, state, CARRIER: tl.constexpr, RULE: tl.constexpr, ASM: tl.constexpr):
    """Record packed block maxima (any shape, thread-local axis second) of one tile in the view's state.

    Extremes for the next reference exponent, and one misfit if some block does not fit the present one.
    """
    note_extremes(reduce_max2(packed, 1, ASM), lowness(packed, ASM), state, CARRIER, RULE, ASM)


@triton.jit
def lowness(packed, ASM: tl.constexpr):
    """Packed maximum along axis 1 of 0x8000 - m over nonzero m, large where m is small; 0 if all are 0."""
    return reduce_max2((-2147450880 - packed) & 0x7FFF7FFF, 1, ASM)


@triton.jit
def note_extremes(top, low, state, CARRIER: tl.constexpr, RULE: tl.constexpr, ASM: tl.constexpr):
    """``note_blocks`` from packed maxima and packed ``lowness``, of equal shape."""
    first, last = mx_bounds(tl.load(state), CARRIER, RULE)
    record_extremes(top, low, state, first, last, ASM)


@triton.jit
def record_extremes(top, low, state, first, last, ASM: tl.constexpr):
    """``note_extremes`` against given bounds of the maxima's BF16 bits."""
    both = (halves_max(top, ASM) & 0xFFFF) | (halves_max(low, ASM) & -65536)
    both = tl.max(reduce_max2(tl.reshape(both, [both.numel]), 0, ASM))
    top = both & 0xFFFF
    low = (both >> 16) & 0xFFFF
    misfit = (top > last) | ((low > 0) & (0x8000 - low < first))
    if (top > tl.load(state + 1)) | (low > tl.load(state + 2)) | misfit:
        tl.atomic_max(state + 1, top, sem="relaxed")
        tl.atomic_max(state + 2, low, sem="relaxed")
        tl.atomic_add(state + 3, misfit.to(tl.int32), sem="relaxed")


@triton.jit
def _exchange(a, b, BIT: tl.constexpr):
    """Between lanes l and l ^ BIT: the lane without BIT gives its b for the other's a."""
    G: tl.constexpr = a.shape[0]
    N: tl.constexpr = a.shape[1]
    W: tl.constexpr = a.shape[2]
    upper = tl.reshape(0 - ((tl.arange(0, W) // BIT) & 1), [1, 1, W])  # all ones where BIT is set
    sent = tl.reshape(tl.where(upper != 0, a, b), [G, N, W // (2 * BIT), 2, BIT])
    both = tl.broadcast_to(tl.xor_sum(sent, 3, keep_dims=True), [G, N, W // (2 * BIT), 2, BIT])
    both = tl.reshape(both, [G, N, W])  # own ^ other: turns one into the other
    return a ^ (both & upper), b ^ (both & ~upper)


@triton.jit
def random_words(
    sr,
    PRODUCER,
    token,
    feature,
    FEATURES: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr = False,
    T: tl.constexpr = 32,
    SPAN: tl.constexpr = 0,
):
    """Random words [G, T, W / 2], one per four features of the tile whose first element is (token, feature).

    ``sr``: int64 pointer to (seed, step, global token of the tensor's first row). FEATURES must be a multiple
    of 16; the place of an element is (global token x FEATURES + feature), as in ``reference.philox``.

    One call gives the four words of 16 features of a token, which belong to four lanes. Instead of making
    every call in four lanes, lane l makes the call of token 4 i + l mod 4 and the four lanes then transpose
    their 4 x 4 words (token by word) in two exchanges. CHUNKS: the G parts of the tile are neighbouring
    pieces of 2 W features of the same tokens; otherwise groups start SPAN tokens apart (T where 0).
    """
    return random_words_of(
        tl.load(sr),
        tl.load(sr + 1),
        tl.load(sr + 2),
        PRODUCER,
        token,
        feature,
        FEATURES,
        G,
        W,
        CHUNKS,
        T,
        SPAN,
    )


@triton.jit
def random_words_of(
    seed,
    step,
    first_token,
    PRODUCER,
    token,
    feature,
    FEATURES: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    T: tl.constexpr,
    SPAN: tl.constexpr,
):
    """``random_words`` from loaded scalars, so that a loop makes the key schedule once."""
    L: tl.constexpr = W // 2
    first = (first_token + token) * (FEATURES // 16) + feature // 16
    lane = tl.arange(0, L)[None, None, :]
    g = tl.arange(0, G)[:, None, None]
    t = tl.arange(0, T // 4)[None, :, None] * 4 + lane % 4
    if CHUNKS:
        place16 = first + (t * (FEATURES // 16) + g * (W // 8) + lane // 4)
    else:
        place16 = first + ((t + g * (SPAN if SPAN else T)) * (FEATURES // 16) + lane // 4)
    zero = tl.zeros([G, T // 4, L], tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        place16.to(tl.uint32),
        (place16 >> 32).to(tl.uint32),
        zero + step.to(tl.uint32),
        zero + PRODUCER.to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    w0 = w0.to(tl.int32, bitcast=True)
    w1 = w1.to(tl.int32, bitcast=True)
    w2 = w2.to(tl.int32, bitcast=True)
    w3 = w3.to(tl.int32, bitcast=True)
    w0, w1 = _exchange(w0, w1, 1)
    w2, w3 = _exchange(w2, w3, 1)
    w0, w2 = _exchange(w0, w2, 2)
    w1, w3 = _exchange(w1, w3, 2)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [G, T / 4, L, 2, 2]: tokens 4 i + 0, 1, 2, 3
    return tl.reshape(tl.permute(words, [0, 1, 3, 4, 2]), [G, T, L])


@triton.jit
def spread_column(a, w):
    """[G, NT, 1, W] repeated over the tokens of a block: w's shape [G, T, W]."""
    G: tl.constexpr = w.shape[0]
    W: tl.constexpr = w.shape[2]
    NT: tl.constexpr = a.shape[1]
    return tl.reshape(tl.broadcast_to(a, [G, NT, w.shape[1] // NT, W]), [G, w.shape[1], W])


@triton.jit
def _spread_square(a, w):
    """[G, NT, 1, NB, 1] repeated over tokens and words of a square tile: w's shape [G, T, W]."""
    G: tl.constexpr = w.shape[0]
    W: tl.constexpr = w.shape[2]
    NT: tl.constexpr = a.shape[1]
    NB: tl.constexpr = a.shape[3]
    return tl.reshape(tl.broadcast_to(a, [G, NT, w.shape[1] // NT, NB, W // NB]), [G, w.shape[1], W])


@triton.jit
def finish_row(v, CARRIER: tl.constexpr, ASM: tl.constexpr):
    """Words to store row-major: [G, 32, W] BF16 pairs, or [G, 32, W / 2] FP8 quadruples."""
    if CARRIER == "bf16":
        return v
    else:
        return merge_pairs(fp8_bytes(v, CARRIER, ASM), ASM)


@triton.jit
def finish_column(v, CARRIER: tl.constexpr, ASM: tl.constexpr):
    """Transposed words to store: [2 W, G * T / 2] token pairs, or [2 W, G * T / 4] token quadruples."""
    if CARRIER == "bf16":
        return transpose_words(v, ASM)
    else:
        return transpose_bytes(fp8_bytes(v, CARRIER, ASM), ASM)


@triton.jit
def _row_mx_halves(
    w, amax, random, ref, RULE: tl.constexpr, CARRIER: tl.constexpr, SR: tl.constexpr, ASM: tl.constexpr
):
    """(even words' values, odd words' values), magnitudes only where SR; ``amax`` of ``row_amax``."""
    c, c64, ct = mx_constants(ref, CARRIER, RULE)
    t = mx_threshold(amax, ct, RULE, ASM)
    w0, w1 = split_words(w)
    if SR:
        v0 = mx_magnitudes_stochastic(w0, t, random, c, RULE, 0, ASM)
        v1 = mx_magnitudes_stochastic(w1, t, random, c, RULE, 1, ASM)
    else:
        v0 = mx_round(w0, t, c, c64, RULE, ASM)
        v1 = mx_round(w1, t, c, c64, RULE, ASM)
    return v0, v1


@triton.jit
def row_mx_done(
    w, amax, random, ref, RULE: tl.constexpr, CARRIER: tl.constexpr, SR: tl.constexpr, ASM: tl.constexpr
):
    """Row view of an MX format ready to store; ``amax`` of ``row_amax``, whose maxima the caller notes."""
    v0, v1 = _row_mx_halves(w, amax, random, ref, RULE, CARRIER, SR, ASM)
    w0, w1 = split_words(w)
    if CARRIER == "bf16":
        if SR:
            v0 = with_signs(v0, w0)
            v1 = with_signs(v1, w1)
        return join_words(v0, v1)
    else:
        if SR:
            b0 = fp8_bytes_signed(v0, w0, CARRIER, ASM)
            b1 = fp8_bytes_signed(v1, w1, CARRIER, ASM)
        else:
            b0 = fp8_bytes(v0, CARRIER, ASM)
            b1 = fp8_bytes(v1, CARRIER, ASM)
        return permute_bytes(b0, b1, 0x7531, ASM)


@triton.jit
def row_mx(w, random, state, RULE: tl.constexpr, CARRIER: tl.constexpr, SR: tl.constexpr, ASM: tl.constexpr):
    """Row view of an MX format, unfinished (words [G, T, W] in shifted BF16); its maxima go to ``state``."""
    amax, packed = row_amax(w, 32, ASM)
    note_blocks(packed, state, CARRIER, RULE, ASM)
    v0, v1 = _row_mx_halves(w, amax, random, tl.load(state), RULE, CARRIER, SR, ASM)
    if SR:
        w0, w1 = split_words(w)
        v0 = with_signs(v0, w0)
        v1 = with_signs(v1, w1)
    return join_words(v0, v1)


@triton.jit
def column_mx(w, state, RULE: tl.constexpr, CARRIER: tl.constexpr, HADAMARD: tl.constexpr, ASM: tl.constexpr):
    """Column view of an MX format, unfinished and not yet transposed."""
    x = rotate_tokens(w, HADAMARD, ASM)
    amax = column_amax(x, 32, ASM)
    note_blocks(amax, state, CARRIER, RULE, ASM)
    c, c64, ct = mx_constants(tl.load(state), CARRIER, RULE)
    t = spread_column(mx_threshold(amax, ct, RULE, ASM), w)
    return mx_round(x, t, c, c64, RULE, ASM)


@triton.jit
def square_mx(w, state, RULE: tl.constexpr, CARRIER: tl.constexpr, ASM: tl.constexpr):
    """Both views of a 2D MX format, unfinished."""
    amax = square_amax(w, 32, ASM)
    note_blocks(amax, state, CARRIER, RULE, ASM)
    c, c64, ct = mx_constants(tl.load(state), CARRIER, RULE)
    t = _spread_square(mx_threshold(amax, ct, RULE, ASM), w)
    return mx_round(w, t, c, c64, RULE, ASM)


@triton.jit
def row_nv(
    w,
    random,
    amax,
    outer,
    ALGORITHM: tl.constexpr,
    SR: tl.constexpr,
    ASM: tl.constexpr,
):
    """Row view of an NV-style format in BF16 carriers; ``amax``, ``outer`` FP32 scalars of the tile."""
    block, _ = row_amax(w, 16, ASM)
    m, s = nv_block_safe(high_f32(block), amax, outer, ALGORITHM, False, ASM)
    w0, w1 = split_words(w)
    if SR:
        v0 = nv_carrier_stochastic(w0, m, m, s, s, random, 0, ALGORITHM == "ue5m3", ASM)
        v1 = nv_carrier_stochastic(w1, m, m, s, s, random, 1, ALGORITHM == "ue5m3", ASM)
    else:
        v0 = nv_carrier(w0, m, m, s, s, ALGORITHM == "ue5m3", ASM)
        v1 = nv_carrier(w1, m, m, s, s, ALGORITHM == "ue5m3", ASM)
    return join_words(v0, v1)


@triton.jit
def column_nv(
    w,
    random,
    amax,
    outer,
    ALGORITHM: tl.constexpr,
    HADAMARD: tl.constexpr,
    SR: tl.constexpr,
    ASM: tl.constexpr,
):
    """Column view of an NV-style format in BF16 carriers, not yet transposed."""
    x = rotate_tokens(w, HADAMARD, ASM)
    block = column_amax(x, 16, ASM)
    m0, s0 = nv_block_safe(low_f32(block), amax, outer, ALGORITHM, False, ASM)
    m1, s1 = nv_block_safe(high_f32(block), amax, outer, ALGORITHM, False, ASM)
    m0 = spread_column(m0, w)
    m1 = spread_column(m1, w)
    s0 = spread_column(s0, w)
    s1 = spread_column(s1, w)
    if SR:
        x0, x1 = split_words(x)
        a0, a1 = split_words(m0)
        b0, b1 = split_words(m1)
        c0, c1 = split_words(s0)
        d0, d1 = split_words(s1)
        v0 = nv_carrier_stochastic(x0, a0, b0, c0, d0, random, 0, ALGORITHM == "ue5m3", ASM)
        v1 = nv_carrier_stochastic(x1, a1, b1, c1, d1, random, 1, ALGORITHM == "ue5m3", ASM)
        return join_words(v0, v1)
    else:
        return nv_carrier(x, m0, m1, s0, s1, ALGORITHM == "ue5m3", ASM)


@triton.jit
def square_nv(w, amax, outer, ALGORITHM: tl.constexpr, ASM: tl.constexpr):
    """Both views of a 2D NV-style format in BF16 carriers."""
    block = square_amax(w, 16, ASM)
    multiplier, value = nv_block_safe(high_f32(block), amax, outer, ALGORITHM, True, ASM)
    multiplier = _spread_square(multiplier, w)
    value = _spread_square(value, w)
    return nv_carrier(w, multiplier, multiplier, value, value, ALGORITHM == "ue5m3", ASM)
