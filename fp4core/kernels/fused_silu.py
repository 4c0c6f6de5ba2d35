"""SiLU-gated feed-forward boundaries: one load, every carrier that W2, W1 and W3 need.

    forward    h = silu(g) u                                     row view of h (Fprop of W2)
    backward   du = dh silu(g),  dg = dh u silu'(g)              both views of dg and du (W1, W3)
               h again, from the g and u that are loaded anyway  column view of h (Wgrad of W2)

g, u: BF16 halves of one matrix gu [T, 2 F]; dh BF16 [T, F]. All arithmetic in FP32, one rounding to BF16 before
quantising, as the unfused layers do. The column view of h is made in backward, so forward saves nothing but gu.
Word tiles as in ``device``: [G, 32, W], two features per word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4core.kernels.device import high_f32, low_f32, pack_rne
from fp4core.kernels.tiles import load_words, store_columns, store_rows
from fp4core.kernels.views import column_mx, finish_column, finish_row, random_words, row_mx


@triton.jit
def sigmoid(g, ASM: tl.constexpr):
    """1 / (1 + e^-g) in FP32, within 4 units in the last place; the hardware's approximations when ``ASM``."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            mul.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
            }""",
            "=f,f",
            [g],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return 1.0 / (1.0 + tl.exp(-g))


@triton.jit
def silu_mul_words(g, u, ASM: tl.constexpr):
    """Words of BF16(silu(g) u)."""
    g0 = low_f32(g)
    g1 = high_f32(g)
    low = (g0 * sigmoid(g0, ASM)) * low_f32(u)
    high = (g1 * sigmoid(g1, ASM)) * high_f32(u)
    return pack_rne(low, high, ASM)


@triton.jit
def _gate_gradient(dh, g, u, s):
    return (dh * u) * (s * (1.0 + g * (1.0 - s)))


@triton.jit
def silu_backward_words(dh, g, u, ASM: tl.constexpr):
    """Words of (dg, du, h)."""
    g0 = low_f32(g)
    g1 = high_f32(g)
    s0 = sigmoid(g0, ASM)
    s1 = sigmoid(g1, ASM)
    u0 = low_f32(u)
    u1 = high_f32(u)
    d0 = low_f32(dh)
    d1 = high_f32(dh)
    dg = pack_rne(_gate_gradient(d0, g0, u0, s0), _gate_gradient(d1, g1, u1, s1), ASM)
    du = pack_rne(d0 * (g0 * s0), d1 * (g1 * s1), ASM)
    h = pack_rne((g0 * s0) * u0, (g1 * s1) * u1, ASM)
    return dg, du, h


@triton.jit(do_not_specialize=["one"])
def silu_forward_kernel(
    gu_ptr,
    row_ptr,
    state,
    one,
    F: tl.constexpr,
    RULE: tl.constexpr,
    CARRIER: tl.constexpr,
    ASM: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
):
    """h's row view from gu [T, 2 F]; RULE "none" stores h itself. Pointers are int32 words."""
    TILES: tl.constexpr = F // (2 * W)
    pid = tl.program_id(0)
    token = (pid // TILES) * (32 * G)
    pf = pid % TILES
    base = gu_ptr + token.to(tl.int64) * F + pf * W
    g = load_words(base, F, G, W, VEC, one)
    u = load_words(base + F // 2, F, G, W, VEC, one)
    h = silu_mul_words(g, u, ASM)
    if RULE == "none":
        store_rows(row_ptr + token.to(tl.int64) * (F // 2) + pf * W, h, F // 2, VEC, one)
    else:
        v = finish_row(row_mx(h, 0, state, RULE, CARRIER, False, ASM), CARRIER, ASM)
        STRIDE: tl.constexpr = F // 2 if CARRIER == "bf16" else F // 4
        ROW_VEC: tl.constexpr = VEC if CARRIER == "bf16" else (VEC + 1) // 2
        store_rows(row_ptr + token.to(tl.int64) * STRIDE + pf * v.shape[2], v, STRIDE, ROW_VEC, one)


@triton.jit
def store_gradient_views(
    w,
    random,
    row_ptr,
    col_ptr,
    row_state,
    col_state,
    token,
    feature,
    T,
    one,
    N: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    SR: tl.constexpr,
    HADAMARD: tl.constexpr,
    VEC: tl.constexpr,
    ASM: tl.constexpr,
):
    """Both views of gradient words at (token, feature) of a matrix of N features."""
    v = finish_row(row_mx(w, random, row_state, RULE, ROW, SR, ASM), ROW, ASM)
    STRIDE: tl.constexpr = N // 2 if ROW == "bf16" else N // 4
    ROW_VEC: tl.constexpr = VEC if ROW == "bf16" else (VEC + 1) // 2
    first = feature // (N // STRIDE)
    store_rows(row_ptr + token.to(tl.int64) * STRIDE + first, v, STRIDE, ROW_VEC, one)
    c = finish_column(column_mx(w, col_state, RULE, COL, HADAMARD, ASM), COL, ASM)
    PER_WORD: tl.constexpr = 2 if COL == "bf16" else 4
    place = col_ptr + feature.to(tl.int64) * (T // PER_WORD) + token // PER_WORD
    store_columns(place, c, T // PER_WORD, False, 0, 0)


@triton.jit(do_not_specialize=["one", "gate_producer", "up_producer"])
def silu_backward_kernel(
    dh_ptr,
    gu_ptr,
    row_ptr,
    col_ptr,
    h_ptr,
    row_state,
    col_state,
    h_state,
    sr_ptr,
    gate_producer,
    up_producer,
    T,
    one,
    F: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    SR: tl.constexpr,
    COL: tl.constexpr,
    HADAMARD: tl.constexpr,
    H_RULE: tl.constexpr,
    H_COL: tl.constexpr,
    H_HADAMARD: tl.constexpr,
    ASM: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
):
    """Row and column views of [dg | du] ([T, 2 F] and [2 F, T]) and the column view of h [F, T].

    RULE "none" stores dg, du to row_ptr and h to h_ptr in BF16 instead. T a multiple of 32 G, F of 2 W.
    """
    TILES: tl.constexpr = F // (2 * W)
    pid = tl.program_id(0)
    token = (pid // TILES) * (32 * G)
    pf = pid % TILES
    feature = pf * (2 * W)
    base = gu_ptr + token.to(tl.int64) * F + pf * W
    g = load_words(base, F, G, W, VEC, one)
    u = load_words(base + F // 2, F, G, W, VEC, one)
    dh = load_words(dh_ptr + token.to(tl.int64) * (F // 2) + pf * W, F // 2, G, W, VEC, one)
    dg, du, h = silu_backward_words(dh, g, u, ASM)
    if RULE == "none":
        place = row_ptr + token.to(tl.int64) * F + pf * W
        store_rows(place, dg, F, VEC, one)
        store_rows(place + F // 2, du, F, VEC, one)
        store_rows(h_ptr + token.to(tl.int64) * (F // 2) + pf * W, h, F // 2, VEC, one)
    else:
        hc = finish_column(column_mx(h, h_state, H_RULE, H_COL, H_HADAMARD, ASM), H_COL, ASM)
        PER_WORD: tl.constexpr = 2 if H_COL == "bf16" else 4
        place = h_ptr + feature.to(tl.int64) * (T // PER_WORD) + token // PER_WORD
        store_columns(place, hc, T // PER_WORD, False, 0, 0)
        random = 0
        if SR:
            random = random_words(sr_ptr, gate_producer, token, feature, F, G, W)
        store_gradient_views(
            dg, random, row_ptr, col_ptr, row_state, col_state, token, feature, T, one,
            2 * F, RULE, ROW, COL, SR, HADAMARD, VEC, ASM,
        )  # fmt: skip
        if SR:
            random = random_words(sr_ptr, up_producer, token, feature, F, G, W)
        store_gradient_views(
            du, random, row_ptr, col_ptr, row_state, col_state, token, feature + F, T, one,
            2 * F, RULE, ROW, COL, SR, HADAMARD, VEC, ASM,
        )  # fmt: skip
