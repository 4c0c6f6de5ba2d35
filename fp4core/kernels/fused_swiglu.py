"""The whole backward boundary of SwiGLU in one kernel on ``warp_tiles``: dh, g, u are read once.

    h = silu(g) u          column view [F, T]                 Wgrad of W2
    dg = dh u silu'(g)     row view [T, F], column [F, T]     Dgrad and Wgrad of W1
    du = dh silu(g)        row view [T, F], column [F, T]     Dgrad and Wgrad of W3

One sigmoid per element, FP32 arithmetic and one rounding to BF16 before quantising, as in ``fused_silu``,
whose bits these are. FP8 carriers of MX formats without rotation; what else there is goes through
``fused_silu`` and the producers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp4core.kernels._launch import packed_instructions, pointer
from fp4core.kernels.device import high_f32, low_f32, max2, pack_rne
from fp4core.kernels.fused_silu import check_shape, sigmoid
from fp4core.kernels.mx import mul2, mx_constants
from fp4core.kernels.producers import CARRIERS, View, rule
from fp4core.kernels.row_scale import inverse
from fp4core.kernels.views import note_extremes
from fp4core.kernels.warp_tiles import (
    aligned,
    apart,
    column_pointers,
    column_view,
    fresh,
    per_token,
    random_tile,
    row_pointers,
    row_view,
    spread_token,
)


@triton.jit
def _three(b, g, u, ASM: tl.constexpr):
    """FP32 (h, dg, du) in the expressions of ``fused_silu``, from one sigmoid."""
    s = sigmoid(g, ASM)
    gs = g * s
    gate = (b * u) * (s * (1.0 + g * (1.0 - s)))
    return u * gs, gate, b * gs


@triton.jit
def swiglu_words(b, g, u, ASM: tl.constexpr):
    """Words of h, dg and du."""
    h0, dg0, du0 = _three(low_f32(b), low_f32(g), low_f32(u), ASM)
    h1, dg1, du1 = _three(high_f32(b), high_f32(g), high_f32(u), ASM)
    return pack_rne(h0, h1, ASM), pack_rne(dg0, dg1, ASM), pack_rne(du0, du1, ASM)


@triton.jit(do_not_specialize=["one", "gate_producer", "up_producer"])
def swiglu_backward_kernel(
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
    scale_ptr,
    gate_producer,
    up_producer,
    one,
    T: tl.constexpr,
    F: tl.constexpr,
    GU: tl.constexpr,
    SCALED: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    SR: tl.constexpr,
    COL: tl.constexpr,
    H_RULE: tl.constexpr,
    H_COL: tl.constexpr,
    ASM: tl.constexpr,
    G: tl.constexpr,
    J: tl.constexpr,
    PER: tl.constexpr,
):
    """Row [T, 2 F] and column [2 F, T] views of [dg | du], column view of h [F, T]; pointers to words.

    One program: 32 G tokens x PER pieces of 32 J features, a warp for each 32 x 32. g, u: GU words per row.
    SCALED: rows of dh come times scale_ptr [T] and those of the row view leave so (``row_scale``).
    """
    BLOCKS: tl.constexpr = F // (32 * J * PER)
    STRIDE: tl.constexpr = F // 2
    COLUMN: tl.constexpr = T // 4
    ROWS: tl.constexpr = F // 2  # words of a row of [dg | du] in FP8
    C: tl.constexpr = G * J
    pid = tl.program_id(0)
    token = pid // BLOCKS * (32 * G)
    block = pid % BLOCKS
    ci = tl.arange(0, C)
    group = tl.reshape(ci // J, [1, C, 1, 1, 1])
    piece_of = tl.reshape(ci % J, [1, C, 1, 1, 1])
    chunk_column = tl.reshape(ci // J * 8 + ci % J * (32 * COLUMN), [1, 1, C, 1, 1, 1])
    chunk_random = tl.reshape(ci // J * (2 * F) + ci % J * 2, [1, 1, C, 1, 1])
    chunk_row = group * (32 * ROWS) + piece_of * 8
    rc, rc64, rct = mx_constants(tl.load(row_state), ROW, RULE)
    cc, cc64, cct = mx_constants(tl.load(col_state), COL, RULE)
    hc, hc64, hct = mx_constants(tl.load(h_state), H_COL, H_RULE)
    if SR:
        seed = tl.load(sr_ptr)
        step = tl.load(sr_ptr + 1)
        place = (tl.load(sr_ptr + 2) + token) * (F // 16) + block * (2 * J * PER)
    if SCALED:
        scales = per_token(scale_ptr + token, tl.reshape(ci // J * 32, [1, 1, C, 1]), one, C)
    row_top = tl.zeros([8 * C], tl.int32)
    row_low = row_top
    col_top = tl.zeros([C, 4], tl.int32)
    col_low = col_top
    h_top = col_top
    h_low = col_top
    for i in range(PER):
        z = fresh(i, ASM)
        piece = block * PER + i
        word = piece * (16 * J)
        at = token.to(tl.int64) * GU + word
        chunk = group * (32 * GU) + piece_of * 16
        g = tl.load(aligned(row_pointers(g_ptr + at, GU, 16, chunk, 1, one, 16, z), 16))
        u = tl.load(aligned(row_pointers(u_ptr + at, GU, 16, chunk, 1, one, 16, z), 16))
        at = token.to(tl.int64) * STRIDE + word
        chunk = group * (32 * STRIDE) + piece_of * 16
        b = tl.load(aligned(row_pointers(dh_ptr + at, STRIDE, 16, chunk, 1, one, 16, z), 16))
        if SCALED:
            b = mul2(b, spread_token(inverse(scales), 1), ASM)
        h, dg, du = swiglu_words(b, g, u, ASM)
        column = (piece * (32 * J)).to(tl.int64) * COLUMN + token // 4
        if apart(one, 1, ASM):
            v, top, low = column_view(h, hc, hc64, hct, H_RULE, H_COL, ASM)
            tl.store(column_pointers(h_ptr + column, COLUMN, 32, chunk_column, 1, one, z), v)
            h_top = max2(h_top, top, ASM)
            h_low = max2(h_low, low, ASM)
        for which in tl.static_range(2):
            w = dg if which == 0 else du
            if apart(one, 2 + 2 * which, ASM):
                v, top, low = column_view(w, cc, cc64, cct, RULE, COL, ASM)
                out = col_ptr + column + which * tl.cast(F * COLUMN, tl.int64)
                tl.store(column_pointers(out, COLUMN, 32, chunk_column, 1, one, z), v)
                col_top = max2(col_top, top, ASM)
                col_low = max2(col_low, low, ASM)
            if apart(one, 3 + 2 * which, ASM):
                drawn = 0
                if SR:
                    producer = gate_producer if which == 0 else up_producer
                    drawn = random_tile(
                        seed, step, producer, place + i * (2 * J), F // 16, 2, chunk_random, 1, C, z
                    )
                scaled = w
                if SCALED:
                    scaled = mul2(w, spread_token(scales, 1), ASM)
                v, top, low = row_view(scaled, drawn, rc, rc64, rct, RULE, ROW, SR, ASM)
                out = row_ptr + token.to(tl.int64) * ROWS + piece * (8 * J) + which * (F // 4)
                tl.store(aligned(row_pointers(out, ROWS, 8, chunk_row, 1, one, 8, z), 8), v)
                row_top = max2(row_top, top, ASM)
                row_low = max2(row_low, low, ASM)
    note_extremes(h_top, h_low, h_state, H_COL, H_RULE, ASM)
    note_extremes(col_top, col_low, col_state, COL, RULE, ASM)
    note_extremes(row_top, row_low, row_state, ROW, RULE, ASM)


def swiglu_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    row: View,
    col: View,
    h_col: View,
    states: tuple[Tensor, Tensor, Tensor],
    sr: tuple[Tensor, int, int] | None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Carriers ([dg | du] [T, 2 F], its transpose's column view [2 F, T], h's column view [F, T]).

    Args:
        dh: BF16 [T, F], contiguous; its rows come times ``scales``, where given.
        gate, up: BF16 [T, F] of equal strides, contiguous along F, rows at multiples of 16 bytes.
        row, col: views of dg and du, of one MX format, and ``h_col`` of h; ``takes(row, col, h_col)``.
        states: int32 [4] of row, col and h_col.
        sr: random state, producers of dg's and du's row views; for a stochastic ``row``.
        scales: int32 [T] of ``row_scale.row_scales``; rows of the row view are times these as well.
    """
    t, f = dh.shape
    check_shape("swiglu_backward", t, f)
    rows = dh.new_empty((t, 2 * f), dtype=CARRIERS[row.carrier])
    cols = dh.new_empty((2 * f, t), dtype=CARRIERS[col.carrier])
    h = dh.new_empty((f, t), dtype=CARRIERS[h_col.carrier])
    groups = 2 if t % 64 == 0 else 1
    per = 4 if f % 256 == 0 else 2
    base = pointer(dh, dh)
    swiglu_backward_kernel[(t // (32 * groups) * (f // (64 * per)),)](
        base,
        pointer(gate, dh),
        pointer(up, dh),
        *(pointer(out, dh) for out in (rows, cols, h)),
        *states,
        base if sr is None else sr[0],
        base if scales is None else scales,
        0 if sr is None else sr[1],
        0 if sr is None else sr[2],
        1,
        T=t,
        F=f,
        GU=gate.stride(0) // 2,
        SCALED=scales is not None,
        RULE=rule(row.format),
        ROW=row.carrier,
        SR=row.rounding == "stochastic",
        COL=col.carrier,
        H_RULE=rule(h_col.format),
        H_COL=h_col.carrier,
        ASM=packed_instructions(dh.device),
        G=groups,
        J=2,
        PER=per,
        num_warps=2 * groups,
        maxnreg=96,  # five programs on a multiprocessor; without spills
    )
    return rows, cols, h
