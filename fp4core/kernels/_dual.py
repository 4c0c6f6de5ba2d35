"""The dual-view kernel behind ``producers.produce``; one program per tile of 32 G tokens x 2 W features."""

from __future__ import annotations

import triton
import triton.language as tl

from fp4core.kernels.device import max2, reduce_max2
from fp4core.kernels.mx import mul2
from fp4core.kernels.row_scale import token_scales
from fp4core.kernels.tiles import (
    load_any,
    rotate_tokens_tail,
    row_amax,
    store_columns,
    store_rows,
    store_rows_masked,
)
from fp4core.kernels.views import (
    column_mx,
    column_nv,
    finish_column,
    finish_row,
    note_blocks,
    note_extremes,
    random_words,
    random_words_of,
    row_mx_done,
    row_nv,
    square_mx,
    square_nv,
)


@triton.constexpr_function
def is_mx_rule(name):
    """True for the scale rules of ``mx``."""
    return name.startswith(("mx_", "ocp_"))


@triton.jit
def nv_domain(amax_ptr, outer_ptr, ALGORITHM: tl.constexpr, chunk, stripe):
    """(amax, outer) of a tile: tensor-wide scalars, or of its 128 x 128 chunk and 256-row stripe."""
    if ALGORITHM == "nv_cta":
        return tl.load(amax_ptr + chunk), tl.load(outer_ptr + stripe)
    return tl.load(amax_ptr), tl.load(outer_ptr)


@triton.jit
def put_rows(
    row_ptr,
    v,
    token,
    first,
    rows,
    words,
    STRIDE: tl.constexpr,
    VEC: tl.constexpr,
    one,
    SPAN: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store finished row words whose first one is (token, first)."""
    place = row_ptr + token.to(tl.int64) * STRIDE + first
    if MASKED:
        store_rows_masked(place, v, STRIDE, VEC, one, rows, words, SPAN)
    else:
        store_rows(place, v, STRIDE, VEC, one, SPAN)


@triton.jit(do_not_specialize=["one", "producer", "col_producer"])
def dual_kernel(
    x_ptr,
    row_ptr,
    col_ptr,
    row_state,
    col_state,
    row_amax_ptr,
    row_outer_ptr,
    col_amax_ptr,
    col_outer_ptr,
    sr_ptr,
    scale_ptr,
    producer,
    col_producer,
    M,
    TOKENS,
    COL_STRIDE,
    one,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    ROW: tl.constexpr,
    ROW_CARRIER: tl.constexpr,
    ROW_SR: tl.constexpr,
    SCALED: tl.constexpr,
    COL: tl.constexpr,
    COL_CARRIER: tl.constexpr,
    COL_HADAMARD: tl.constexpr,
    ROW_SQUARE: tl.constexpr,
    COL_SQUARE: tl.constexpr,
    SHARED: tl.constexpr,
    COL_SR: tl.constexpr,
    COL_KEPT: tl.constexpr,
    TAIL: tl.constexpr,
    FP32: tl.constexpr,
    MASKED: tl.constexpr,
    ASM: tl.constexpr,
    G: tl.constexpr,
    T: tl.constexpr,
    ROW_T: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
):
    """Row and column views of x [M, K].

    All pointers to matrices are int32 words. ROW, COL: scale rule or algorithm, "none" for an absent view;
    ROW_SQUARE, COL_SQUARE: a 2D format, whose nv_cta has one outer scale; SHARED: the column view is the
    transposed row view. COL_KEPT: the column view is stored as it lies, [M, K] (BF16). TAIL: TOKENS, the rows
    before padding, end inside a Hadamard group. FP32: x is FP32 (int64 words). K, M multiples of 32. PLACES:
    features of the unpadded tensor. SCALED: the row view is of rows times scale_ptr [TOKENS] (``row_scale``;
    needs ROW_T). ROW_STRIDE, COL_STRIDE: words per row of the row and of the column view.

    ROW_T: 0 makes the row view from the registers that hold the tile; otherwise a loop reads it again, from
    a cache, ROW_T tokens of every group at a time: fewer registers, hence more warps, and shorter code.
    """
    TILES: tl.constexpr = (K + 2 * W - 1) // (2 * W)
    pid = tl.program_id(0)
    pm = pid // TILES
    pf = pid % TILES
    token = pm * (T * G)
    feature = pf * (2 * W)
    base = x_ptr + token.to(tl.int64) * (K // 2) + feature // 2
    rows = M - token
    words = K // 2 - feature // 2
    KEEP: tl.constexpr = 1 if ROW_T else 0
    w = load_any(base, K // 2, G, W, VEC, one, rows, words, FP32, MASKED, ASM, T, 0, KEEP)
    # loads may not move past a barrier: without it the compiler spreads them among the arithmetic to save
    # registers, and too few are in flight
    tl.debug_barrier()

    CHUNKS: tl.constexpr = (K + 127) // 128
    chunk = (token // 128) * CHUNKS + feature // 128
    PER_WORD: tl.constexpr = 1 if ROW_CARRIER == "bf16" else 2
    ROW_VEC: tl.constexpr = VEC // PER_WORD
    first = pf * (W // PER_WORD)
    row_words_left = K // (2 * PER_WORD) - first
    amax = 0.0
    outer = 0.0
    row_ref = 0
    if ROW != "none" and is_mx_rule(ROW):
        row_ref = tl.load(row_state)
    if ROW != "none" and not is_mx_rule(ROW):
        amax, outer = nv_domain(row_amax_ptr, row_outer_ptr, ROW, chunk, 0 if ROW_SQUARE else token // 256)
    if ROW != "none" and (ROW_SQUARE or not ROW_T):
        if ROW_SQUARE:
            if is_mx_rule(ROW):
                v = square_mx(w, row_state, ROW, ROW_CARRIER, ASM)
            else:
                v = square_nv(w, amax, outer, ROW, ASM)
            row = finish_row(v, ROW_CARRIER, ASM)
        else:
            random = 0
            if ROW_SR:
                random = random_words(sr_ptr, producer, token, feature, PLACES, G, W, False, T)
            if is_mx_rule(ROW):
                # noting the maxima ends in a barrier: the maxima of all rows come first, then the rounding,
                # which keeps fewer values alive than the compiler's own mixture
                maxima, packed = row_amax(w, 32, ASM)
                note_blocks(packed, row_state, ROW_CARRIER, ROW, ASM)
                row = row_mx_done(w, maxima, random, row_ref, ROW, ROW_CARRIER, ROW_SR, ASM)
            else:
                row = row_nv(w, random, amax, outer, ROW, ROW_SR, ASM)
        put_rows(row_ptr, row, token, first, rows, row_words_left, ROW_STRIDE, ROW_VEC, one, 0, MASKED)
    if COL != "none":
        if SHARED:
            u = v
        else:
            x = w
            if TAIL:
                x = rotate_tokens_tail(w, COL_HADAMARD, TOKENS - token, ASM)
            ROTATION: tl.constexpr = "none" if TAIL else COL_HADAMARD
            if is_mx_rule(COL):
                if COL_SQUARE:
                    u = square_mx(x, col_state, COL, COL_CARRIER, ASM)
                else:
                    u = column_mx(x, col_state, COL, COL_CARRIER, ROTATION, ASM)
            else:
                stripe = 0 if COL_SQUARE else feature // 256
                col_amax, col_outer = nv_domain(col_amax_ptr, col_outer_ptr, COL, chunk, stripe)
                if COL_SQUARE:
                    u = square_nv(x, col_amax, col_outer, COL, ASM)
                else:
                    random = 0
                    if COL_SR:
                        random = random_words(sr_ptr, col_producer, token, feature, PLACES, G, W, False, T)
                    u = column_nv(x, random, col_amax, col_outer, COL, ROTATION, COL_SR, ASM)
        if COL_KEPT:
            put_rows(col_ptr, u, token, feature // 2, rows, words, COL_STRIDE, VEC, one, 0, MASKED)
        else:
            column = finish_column(u, COL_CARRIER, ASM)
            TOKENS_PER_WORD: tl.constexpr = 2 if COL_CARRIER == "bf16" else 4
            place = col_ptr + feature.to(tl.int64) * COL_STRIDE + token // TOKENS_PER_WORD
            store_columns(place, column, COL_STRIDE, MASKED, K - feature, rows // TOKENS_PER_WORD)
    if ROW != "none" and ROW_T and not ROW_SQUARE:
        top = tl.zeros([G, ROW_T // 2 if ASM else ROW_T, W // 16, 1], tl.int32)
        low = top
        if ROW_SR:
            seed = tl.load(sr_ptr)
            step = tl.load(sr_ptr + 1)
            first_token = tl.load(sr_ptr + 2)
        for part in tl.range(0, T // ROW_T):
            start = part * ROW_T
            piece = base + start * (K // 2)
            left = rows - start
            wp = load_any(piece, K // 2, G, W, VEC, one, left, words, FP32, MASKED, ASM, ROW_T, T, 2)
            if SCALED:
                s = token_scales(scale_ptr + token + start, wp, one, TOKENS - token - start, MASKED, T)
                wp = mul2(wp, s, ASM)
            if ROW_SR:
                drawn = random_words_of(
                    seed, step, first_token, producer, token + start, feature, PLACES, G, W, False, ROW_T, T
                )
            else:
                drawn = 0
            if is_mx_rule(ROW):
                part_maxima, part_packed = row_amax(wp, 32, ASM)
                part_row = row_mx_done(wp, part_maxima, drawn, row_ref, ROW, ROW_CARRIER, ROW_SR, ASM)
                top = max2(top, part_packed, ASM)
                low = max2(low, (-2147450880 - part_packed) & 0x7FFF7FFF, ASM)
            else:
                part_row = row_nv(wp, drawn, amax, outer, ROW, ROW_SR, ASM)
            put_rows(
                row_ptr,
                part_row,
                token + start,
                first,
                left,
                row_words_left,
                ROW_STRIDE,
                ROW_VEC,
                one,
                T,
                MASKED,
            )
        if is_mx_rule(ROW):
            note_extremes(
                reduce_max2(top, 1, ASM), reduce_max2(low, 1, ASM), row_state, ROW_CARRIER, ROW, ASM
            )
