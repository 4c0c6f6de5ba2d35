"""SiLU-gated feed-forward boundaries: one load, every carrier that W2, W1 and W3 need.

    forward    h = silu(g) u                                     row view of h (Fprop of W2)
    backward   du = dh silu(g),  dg = dh u silu'(g)              both views of dg and du (W1, W3)
               h again, from the g and u that are loaded anyway  column view of h (Wgrad of W2)

g, u: BF16 [T, F], rows GU words apart (halves of one matrix, or two matrices); dh BF16 [T, F]. All arithmetic
in FP32, one rounding to BF16 before quantising, as the unfused layers do. The column view of h is made in
backward, so forward saves nothing but g and u. Word tiles as in ``device``: [G, 32, W], two features per
word.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4core.kernels._launch import packed_instructions, pointer
from fp4core.kernels.device import high_f32, low_f32, pack_rne, reduce_max2
from fp4core.kernels.mx import mul2, mx_bounds, mx_constants, mx_round, mx_threshold
from fp4core.kernels.producers import CARRIERS, View, rule
from fp4core.kernels.row_scale import inverse, token_scales
from fp4core.kernels.tiles import column_amax, load_words, rotate_tokens, store_columns, store_rows
from fp4core.kernels.views import (
    column_mx,
    finish_column,
    finish_row,
    lowness,
    random_words,
    record_extremes,
    row_mx,
    spread_column,
)


@triton.jit
def sigmoid(g, ASM: tl.constexpr):
    """1 / (1 + e^-g) in FP32, within 4 units in the last place (``ASM``: the hardware's approximations)."""
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
def _turn(which, b, g, u, ASM: tl.constexpr):
    """FP32 dg = b u silu'(g) (which = 0, b = dh), else b silu(g): du (b = dh) or h (b = u)."""
    s = sigmoid(g, ASM)
    gate = (b * u) * (s * (1.0 + g * (1.0 - s)))
    return tl.where(which == 0, gate, b * (g * s))


@triton.jit
def turn_words(which, b, g, u, ASM: tl.constexpr):
    """Words of ``_turn``."""
    low = _turn(which, low_f32(b), low_f32(g), low_f32(u), ASM)
    high = _turn(which, high_f32(b), high_f32(g), high_f32(u), ASM)
    return pack_rne(low, high, ASM)


@triton.jit(do_not_specialize=["one"])
def silu_forward_kernel(
    g_ptr,
    u_ptr,
    row_ptr,
    state,
    one,
    F: tl.constexpr,
    GU: tl.constexpr,
    RULE: tl.constexpr,
    CARRIER: tl.constexpr,
    ASM: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
):
    """h's row view; RULE "none" stores h itself. Pointers are int32 words."""
    TILES: tl.constexpr = F // (2 * W)
    pid = tl.program_id(0)
    token = (pid // TILES) * (32 * G)
    pf = pid % TILES
    place = token.to(tl.int64) * GU + pf * W
    g = load_words(g_ptr + place, GU, G, W, VEC, one)
    u = load_words(u_ptr + place, GU, G, W, VEC, one)
    h = silu_mul_words(g, u, ASM)
    if RULE == "none":
        store_rows(row_ptr + token.to(tl.int64) * (F // 2) + pf * W, h, F // 2, VEC, one)
    else:
        v = finish_row(row_mx(h, 0, state, RULE, CARRIER, False, ASM), CARRIER, ASM)
        STRIDE: tl.constexpr = F // 2 if CARRIER == "bf16" else F // 4
        ROW_VEC: tl.constexpr = VEC if CARRIER == "bf16" else (VEC + 1) // 2
        store_rows(row_ptr + token.to(tl.int64) * STRIDE + pf * v.shape[2], v, STRIDE, ROW_VEC, one)


@triton.jit(do_not_specialize=["one", "gate_producer", "up_producer"])
def silu_backward_kernel(
    dh_ptr,
    g_ptr,
    u_ptr,
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
    GU: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    SR: tl.constexpr,
    COL: tl.constexpr,
    HADAMARD: tl.constexpr,
    H_COL: tl.constexpr,
    ASM: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
):
    """Row and column views of [dg | du] ([T, 2 F] and [2 F, T]) and the column view of h [F, T].

    T a multiple of 32 G, F of 2 W.

    dg, du and h take turns in a loop that stays a loop, with column code that takes the carrier at run time:
    unrolled, the code outgrows the instruction cache (128 KB) and the kernel runs up to four times slower.
    Later turns find their inputs in the first-level cache. COL and H_COL are both FP8, or both BF16.
    """
    TILES: tl.constexpr = F // (2 * W)
    pid = tl.program_id(0)
    token = (pid // TILES) * (32 * G)
    pf = pid % TILES
    feature = pf * (2 * W)
    place = token.to(tl.int64) * GU + pf * W
    flat = token.to(tl.int64) * (F // 2) + pf * W
    for which in range(2 + one):
        g = load_words(g_ptr + place, GU, G, W, VEC, one)
        u = load_words(u_ptr + place, GU, G, W, VEC, one)
        # du = dh silu(g) and h = u silu(g) are one formula with another factor
        b = load_words(
            tl.where(which == 2, u_ptr + place, dh_ptr + flat),
            tl.where(which == 2, GU, F // 2),
            G,
            W,
            VEC,
            one,
        )
        d = turn_words(which, b, g, u, ASM)
        if which < 2:
            random = 0
            if SR:
                producer = tl.where(which == 0, gate_producer, up_producer)
                random = random_words(sr_ptr, producer, token, feature, F, G, W)
            v = finish_row(row_mx(d, random, row_state, RULE, ROW, SR, ASM), ROW, ASM)
            ROW_STRIDE: tl.constexpr = F if ROW == "bf16" else F // 2
            ROW_VEC: tl.constexpr = VEC if ROW == "bf16" else VEC // 2
            out = row_ptr + token.to(tl.int64) * ROW_STRIDE + which * (ROW_STRIDE // 2) + pf * v.shape[2]
            store_rows(out, v, ROW_STRIDE, ROW_VEC, one)
        PER_WORD: tl.constexpr = 2 if COL == "bf16" else 4
        stride = T // PER_WORD
        out = tl.where(which == 2, h_ptr, col_ptr + stride.to(tl.int64) * (which * F))
        out += feature.to(tl.int64) * stride + token // PER_WORD
        state = tl.where(which == 2, h_state, col_state)
        narrow = tl.where(which == 2, H_COL == "e4m3", COL == "e4m3")
        store_columns(out, _column(d, state, narrow, RULE, COL, HADAMARD, ASM), stride, False, 0, 0)


@triton.jit(do_not_specialize=["one"])
def silu_gradients_kernel(
    dh_ptr,
    g_ptr,
    u_ptr,
    dg_ptr,
    du_ptr,
    h_ptr,
    h_state,
    scale_ptr,
    T,
    one,
    F: tl.constexpr,
    GU: tl.constexpr,
    SCALED: tl.constexpr,
    RULE: tl.constexpr,
    H_COL: tl.constexpr,
    HADAMARD: tl.constexpr,
    ASM: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
    P: tl.constexpr,
):
    """dg and du in BF16 [T, F], and the column view of h [F, T] (RULE "none": h in BF16 [T, F]).

    The first half of a backward boundary in two kernels: the producers make both views of dg and du. The
    gradients are made P tokens of a group at a time, from a second reading that a cache serves. SCALED: rows
    of dh come times scale_ptr [T] (``row_scale``).
    """
    TILES: tl.constexpr = F // (2 * W)
    pid = tl.program_id(0)
    token = (pid // TILES) * (32 * G)
    pf = pid % TILES
    feature = pf * (2 * W)
    place = token.to(tl.int64) * GU + pf * W
    flat = token.to(tl.int64) * (F // 2) + pf * W
    g = load_words(g_ptr + place, GU, G, W, VEC, one, 32, 0, 1)
    u = load_words(u_ptr + place, GU, G, W, VEC, one, 32, 0, 1)
    h = turn_words(2, u, g, u, ASM)
    if RULE == "none":
        store_rows(h_ptr + flat, h, F // 2, VEC, one)
    else:
        PER_WORD: tl.constexpr = 2 if H_COL == "bf16" else 4
        out = h_ptr + feature.to(tl.int64) * (T // PER_WORD) + token // PER_WORD
        column = finish_column(column_mx(h, h_state, RULE, H_COL, HADAMARD, ASM), H_COL, ASM)
        store_columns(out, column, T // PER_WORD, False, 0, 0)
    for part in range((32 // P) * one):
        start = part * P
        again = place + start * GU
        gp = load_words(g_ptr + again, GU, G, W, VEC, one, P, 32, 2)
        up = load_words(u_ptr + again, GU, G, W, VEC, one, P, 32, 2)
        here = flat + start * (F // 2)
        bp = load_words(dh_ptr + here, F // 2, G, W, VEC, one, P, 32, 2)
        if SCALED:
            bp = mul2(bp, inverse(token_scales(scale_ptr + token + start, bp, one, 0, False, 32)), ASM)
        store_rows(dg_ptr + here, turn_words(0, bp, gp, up, ASM), F // 2, VEC, one, 32)
        store_rows(du_ptr + here, turn_words(1, bp, gp, up, ASM), F // 2, VEC, one, 32)


@triton.jit
def _column(
    w, state, narrow, RULE: tl.constexpr, CARRIER: tl.constexpr, HADAMARD: tl.constexpr, ASM: tl.constexpr
):
    """Column view, ready to store, in BF16 (CARRIER), or in E4M3 (``narrow``) or E5M2 as chosen at run time.

    E4M3's shifted BF16 is E5M2's with a reference eight steps higher, and its byte lies one bit lower.
    """
    if CARRIER == "bf16":
        return finish_column(column_mx(w, state, RULE, "bf16", HADAMARD, ASM), "bf16", ASM)
    else:  # noqa: RET505 (the other branch does not compile for this CARRIER)
        x = rotate_tokens(w, HADAMARD, ASM)
        amax = column_amax(x, 32, ASM)
        ref = tl.load(state)
        first5, last5 = mx_bounds(ref, "e5m2", RULE)
        first4, last4 = mx_bounds(ref, "e4m3", RULE)
        first = tl.where(narrow, first4, first5)
        last = tl.where(narrow, last4, last5)
        record_extremes(reduce_max2(amax, 1, ASM), lowness(amax, ASM), state, first, last, ASM)
        c, c64, ct = mx_constants(ref + tl.where(narrow, 8, 0), "e5m2", RULE)
        v = mx_round(x, spread_column(mx_threshold(amax, ct, RULE, ASM), x), c, c64, RULE, ASM)
        v = (v & -2147450880) | ((v << tl.where(narrow, 1, 0)) & 0x7FFF7FFF)
        return finish_column(v, "e5m2", ASM)


def groups_per_tile(tokens: int) -> int:
    """Groups of 32 tokens in a tile: four, so that a column's store is 128 bytes long, where they divide."""
    return 4 if tokens % 128 == 0 else 1


def check_shape(name: str, tokens: int, features: int) -> None:
    """Raise ValueError unless the fused kernels' tiles cover the matrix without a remainder."""
    if tokens % 32 or features % 128:
        raise ValueError(
            f"{name}: got {tokens} tokens x {features} features; needed multiples of 32 and 128 "
            "(the unfused path takes any)"
        )


def silu_forward(gate: Tensor, up: Tensor, view: View | None, state: Tensor | None) -> Tensor:
    """Row view [T, F] of h = silu(gate) up in ``view``'s carrier; h itself in BF16 without a view.

    gate, up: BF16 [T, F] of equal strides, contiguous along F. ``state``: int32 [4] of the MX view.
    """
    t, f = gate.shape
    check_shape("silu_forward", t, f)
    out = gate.new_empty((t, f), dtype=torch.bfloat16 if view is None else CARRIERS[view.carrier])
    g = groups_per_tile(t)
    g_ptr = pointer(gate, gate)
    silu_forward_kernel[(t // (32 * g) * (f // 128),)](
        g_ptr,
        pointer(up, gate),
        pointer(out, gate),
        pointer(state, g_ptr),
        1,
        F=f,
        GU=gate.stride(0) // 2,
        RULE="none" if view is None else rule(view.format),
        CARRIER="bf16" if view is None else view.carrier,
        ASM=packed_instructions(gate.device),
        G=g,
        W=64,
        VEC=2,
        num_warps=g,
    )
    return out


def silu_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    row: View,
    col: View,
    h_col: View,
    states: tuple[Tensor, Tensor, Tensor],
    sr: tuple[Tensor, int, int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Carriers ([dg | du] [T, 2 F], its transpose's column view [2 F, T], h's column view [F, T]).

    Args:
        dh: BF16 [T, F], contiguous.
        gate, up: as in ``silu_forward``.
        row, col: views of dg and du, of one MX format.
        h_col: column view of h, of the same format and rotation as ``col``; FP8 where ``col`` is.
        states: int32 [4] of row, col and h_col.
        sr: random state, producers of dg's and du's row views; for a stochastic ``row``.
    """
    t, f = dh.shape
    check_shape("silu_backward", t, f)
    outs = [
        dh.new_empty((t, 2 * f), dtype=CARRIERS[row.carrier]),
        dh.new_empty((2 * f, t), dtype=CARRIERS[col.carrier]),
        dh.new_empty((f, t), dtype=CARRIERS[h_col.carrier]),
    ]
    g = groups_per_tile(t)
    base = pointer(dh, dh)
    silu_backward_kernel[(t // (32 * g) * (f // 128),)](
        base,
        pointer(gate, dh),
        pointer(up, dh),
        *(pointer(o, dh) for o in outs),
        *states,
        base if sr is None else sr[0],
        0 if sr is None else sr[1],
        0 if sr is None else sr[2],
        t,
        1,
        F=f,
        GU=gate.stride(0) // 2,
        RULE=rule(row.format),
        ROW=row.carrier,
        SR=row.rounding == "stochastic",
        COL=col.carrier,
        HADAMARD=col.hadamard,
        H_COL=h_col.carrier,
        ASM=packed_instructions(dh.device),
        G=g,
        W=64,
        VEC=2,
        num_warps=g,
        # no maxnreg: any bound spills and is slower (168: 1.4 to 1.8 times)
    )
    return outs[0], outs[1], outs[2]


def silu_gradients(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    h_col: View | None,
    h_state: Tensor | None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dg, du in BF16 [T, F], column view of h [F, T] or, without ``h_col``, h in BF16 [T, F]).

    Arguments as for ``silu_backward``; ``h_col`` is a view of an MX format with its state int32 [4].
    ``scales``: of ``row_scale.row_scales``, where each row of dh comes times its scale.
    """
    t, f = dh.shape
    check_shape("silu_gradients", t, f)
    dg, du = torch.empty_like(dh), torch.empty_like(dh)
    h = torch.empty_like(dh) if h_col is None else dh.new_empty((f, t), dtype=CARRIERS[h_col.carrier])
    g = groups_per_tile(t)
    base = pointer(dh, dh)
    silu_gradients_kernel[(t // (32 * g) * (f // 128),)](
        base,
        pointer(gate, dh),
        pointer(up, dh),
        pointer(dg, dh),
        pointer(du, dh),
        pointer(h, dh),
        base if h_state is None else h_state,
        base if scales is None else scales,
        t,
        1,
        F=f,
        GU=gate.stride(0) // 2,
        SCALED=scales is not None,
        RULE="none" if h_col is None else rule(h_col.format),
        H_COL="bf16" if h_col is None else h_col.carrier,
        HADAMARD="none" if h_col is None else h_col.hadamard,
        ASM=packed_instructions(dh.device),
        G=g,
        W=64,
        VEC=2,
        P=8,
        num_warps=g,
    )
    return dg, du, h
