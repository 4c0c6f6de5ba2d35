"""The dual-view kernel behind ``producers.produce``; one program per tile of 32 G tokens x 2 W features."""

from __future__ import annotations

import triton
import triton.language as tl

from fp4core.kernels.tiles import (
    load_any,
    rotate_tokens_tail,
    store_columns,
    store_rows,
    store_rows_masked,
)
from fp4core.kernels.views import (
    column_mx,
    column_nv,
    finish_column,
    finish_row,
    random_words,
    row_mx,
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


@triton.jit(do_not_specialize=["one"])
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
    W: tl.constexpr,
    VEC: tl.constexpr,
):
    """Row and column views of x [M, K].

    All pointers to matrices are int32 words. ROW, COL: scale rule or algorithm, "none" for an absent view;
    ROW_SQUARE, COL_SQUARE: a 2D format, whose nv_cta has one outer scale; SHARED: the column view is the
    transposed row view. COL_KEPT: the column view is stored as it lies, [M, K] (BF16). TAIL: TOKENS, the rows
    before padding, end inside a Hadamard group. FP32: x is FP32 (int64 words). K, M multiples of 32. PLACES: features of the unpadded tensor. ROW_STRIDE,
    COL_STRIDE: words per row of the row and of the column view.
    """
    TILES: tl.constexpr = (K + 2 * W - 1) // (2 * W)
    pid = tl.program_id(0)
    pm = pid // TILES
    pf = pid % TILES
    token = pm * (32 * G)
    feature = pf * (2 * W)
    base = x_ptr + token.to(tl.int64) * (K // 2) + feature // 2
    rows = M - token
    words = K // 2 - feature // 2
    w = load_any(base, K // 2, G, W, VEC, one, rows, words, FP32, MASKED, ASM)

    chunks_k: tl.constexpr = (K + 127) // 128
    chunk = (token // 128) * chunks_k + feature // 128

    if ROW != "none":
        if is_mx_rule(ROW):
            if ROW_SQUARE:
                v = square_mx(w, row_state, ROW, ROW_CARRIER, ASM)
            else:
                random = 0
                if ROW_SR:
                    random = random_words(sr_ptr, producer, token, feature, PLACES, G, W)
                v = row_mx(w, random, row_state, ROW, ROW_CARRIER, ROW_SR, ASM)
        else:
            stripe = 0 if ROW_SQUARE else token // 256
            amax, outer = nv_domain(row_amax_ptr, row_outer_ptr, ROW, chunk, stripe)
            if ROW_SQUARE:
                v = square_nv(w, amax, outer, ROW, ASM)
            else:
                random = 0
                if ROW_SR:
                    random = random_words(sr_ptr, producer, token, feature, PLACES, G, W)
                v = row_nv(w, random, amax, outer, ROW, ROW_SR, ASM)
        row = finish_row(v, ROW_CARRIER, ASM)
        ROW_WORDS: tl.constexpr = K // 2 if ROW_CARRIER == "bf16" else K // 4
        ROW_VEC: tl.constexpr = VEC if ROW_CARRIER == "bf16" else VEC // 2
        first = pf * row.shape[2]
        place = row_ptr + token.to(tl.int64) * ROW_STRIDE + first
        if MASKED:
            store_rows_masked(place, row, ROW_STRIDE, ROW_VEC, one, rows, ROW_WORDS - first)
        else:
            store_rows(place, row, ROW_STRIDE, ROW_VEC, one)
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
                amax, outer = nv_domain(col_amax_ptr, col_outer_ptr, COL, chunk, stripe)
                if COL_SQUARE:
                    u = square_nv(x, amax, outer, COL, ASM)
                else:
                    random = 0
                    if COL_SR:
                        random = random_words(sr_ptr, col_producer, token, feature, PLACES, G, W)
                    u = column_nv(x, random, amax, outer, COL, ROTATION, COL_SR, ASM)
        if COL_KEPT:
            place = col_ptr + token.to(tl.int64) * COL_STRIDE + feature // 2
            if MASKED:
                store_rows_masked(place, u, COL_STRIDE, VEC, one, rows, words)
            else:
                store_rows(place, u, COL_STRIDE, VEC, one)
        else:
            column = finish_column(u, COL_CARRIER, ASM)
            PER_WORD: tl.constexpr = 2 if COL_CARRIER == "bf16" else 4
            place = col_ptr + feature.to(tl.int64) * COL_STRIDE + token // PER_WORD
            store_columns(place, column, COL_STRIDE, MASKED, K - feature, rows // PER_WORD)
