"""RMSNorm boundaries: residual and norm into the row view, and backward into every view the block needs.

    forward    x' = x + d (BF16, where there is a d)        residual stream, kept
               y = BF16(x' rstd w), rstd = 1 / sqrt(mean(x'^2) + eps)      row view of y (QKV, or W1 and W3)
    backward   c = mean_j(dy_j w_j x_j) rstd^3
               dx = BF16(g + BF16(rstd dy w - c x))        g: gradient beside the norm, if any
               y again                                     column view of y (Wgrad of the norm's consumers)
               dx                                          both views for the projection before it (Wo)
               dw = sum over tokens of dy x rstd           partial sums, one row per 32 tokens

Forward holds whole rows, R of them; nothing but rstd [T] is saved. Backward walks a row twice: once for c,
once, in reverse so that the end of the first walk is still in L2, for everything else. Its word tiles are
[G, 32, W] with G *feature* chunks of 32 tokens, one warp each. The norm's weight comes as FP32 [2, HIDDEN /
2], even features then odd, so that its halves lie as the words do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4core.kernels._launch import packed_instructions, pointer
from fp4core.kernels.device import (
    halves_max,
    high_f32,
    low_f32,
    magnitudes,
    pack_rne,
    permute_bytes,
    reduce_max2,
)
from fp4core.kernels.fused_silu import check_shape
from fp4core.kernels.mx import fp8_bytes, mx_constants, mx_round, mx_threshold
from fp4core.kernels.producers import CARRIERS, View, rule
from fp4core.kernels.views import column_mx, finish_column, finish_row, note_blocks, random_words, row_mx


@triton.jit
def _row_view_flat(w, state, RULE: tl.constexpr, CARRIER: tl.constexpr, ASM: tl.constexpr):
    """Row view, ready to store, of words [R, W] whose rows are whole: as ``row_mx`` without random bits."""
    R: tl.constexpr = w.shape[0]
    W: tl.constexpr = w.shape[1]
    NB: tl.constexpr = W // 16
    amax = reduce_max2(tl.reshape(magnitudes(w), [R, NB, 16]), 2, ASM)
    amax = halves_max(amax, ASM)
    note_blocks(amax, state, CARRIER, RULE, ASM)
    c, c64, ct = mx_constants(tl.load(state), CARRIER, RULE)
    t = mx_threshold(amax, ct, RULE, ASM)
    t = tl.reshape(tl.broadcast_to(t, [R, NB, 16]), [R, W])
    v = mx_round(w, t, c, c64, RULE, ASM)
    if CARRIER == "bf16":
        return v
    else:  # noqa: RET505  without it the compiler compares the types of both returns
        first, second = tl.split(tl.reshape(fp8_bytes(v, CARRIER, ASM), [R, W // 2, 2]))
        return permute_bytes(first, second, 0x7531, ASM)


@triton.jit
def norm_forward_kernel(
    x_ptr,
    d_ptr,
    weight_ptr,
    sum_ptr,
    rstd_ptr,
    row_ptr,
    state,
    T,
    eps,
    HIDDEN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RULE: tl.constexpr,
    CARRIER: tl.constexpr,
    ASM: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """x' and the row view of RMSNorm(x') from x [T, HIDDEN] (and d); RULE "none" stores the norm in BF16.

    W: words of a row, rounded up to a power of two; words at and after HIDDEN / 2 read as zero.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    f = tl.arange(0, W)[None, :]
    real = (row < T) & (f < HIDDEN // 2)
    place = row.to(tl.int64) * (HIDDEN // 2) + f
    w = tl.load(x_ptr + place, mask=real, other=0)
    if RESIDUAL:
        d = tl.load(d_ptr + place, mask=real, other=0)
        w = pack_rne(low_f32(w) + low_f32(d), high_f32(w) + high_f32(d), ASM)
        tl.store(sum_ptr + place, w, mask=real)
    x0 = low_f32(w)
    x1 = high_f32(w)
    total = tl.sum(x0 * x0 + x1 * x1, 1, keep_dims=True)
    rstd = tl.rsqrt(total / HIDDEN + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < T)
    g0 = tl.load(weight_ptr + f, mask=f < HIDDEN // 2, other=0.0)
    g1 = tl.load(weight_ptr + HIDDEN // 2 + f, mask=f < HIDDEN // 2, other=0.0)
    y = pack_rne(x0 * rstd * g0, x1 * rstd * g1, ASM)
    if RULE == "none":
        tl.store(row_ptr + place, y, mask=real)
    else:
        v = _row_view_flat(y, state, RULE, CARRIER, ASM)
        if CARRIER == "bf16":
            tl.store(row_ptr + place, v, mask=real)
        else:
            f4 = tl.arange(0, W // 2)[None, :]
            tl.store(row_ptr + row.to(tl.int64) * (HIDDEN // 4) + f4, v, mask=(row < T) & (f4 < HIDDEN // 4))


@triton.jit
def _chunk_words(G: tl.constexpr, W: tl.constexpr, one):
    """Words [G, 1, W] of G neighbouring feature chunks; a warp takes a chunk, a lane two words."""
    f = tl.arange(0, W)[None, None, :] * one
    f = tl.multiple_of(tl.max_contiguous(f, (1, 1, 2)), (1, 1, 2))
    return f + tl.arange(0, G)[:, None, None] * W


@triton.jit
def _store_rows_chunks(base, v, STRIDE: tl.constexpr, VEC: tl.constexpr, one):
    """``tiles.store_rows`` where G counts feature chunks."""
    G: tl.constexpr = v.shape[0]
    W: tl.constexpr = v.shape[2]
    f = tl.arange(0, W)[:, None, None] * one
    f = tl.multiple_of(tl.max_contiguous(f, (VEC, 1, 1)), (VEC, 1, 1))
    g = tl.arange(0, G)[None, :, None]
    t = tl.arange(0, 32)[None, None, :]
    tl.store(base + f + g * W + t * STRIDE, tl.permute(v, [2, 0, 1]))


@triton.jit
def _store_columns_chunks(base, v, STRIDE, G: tl.constexpr):
    """Store transposed words [2 W, G * n] of ``finish_column`` where G counts feature chunks."""
    F: tl.constexpr = v.shape[0]
    N: tl.constexpr = v.shape[1] // G
    f = tl.arange(0, F)[:, None]
    n = tl.arange(0, G * N)[None, :]
    feature = f + (n // N) * F
    tl.store(base + feature.to(tl.int64) * STRIDE + n % N, v)


@triton.jit(do_not_specialize=["one", "producer"])
def norm_backward_kernel(
    dy_ptr,
    x_ptr,
    g_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    y_col_ptr,
    row_ptr,
    col_ptr,
    dw_ptr,
    y_state,
    row_state,
    col_state,
    sr_ptr,
    scale_ptr,
    producer,
    T,
    one,
    HIDDEN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr,
    Y_RULE: tl.constexpr,
    Y_COL: tl.constexpr,
    Y_HADAMARD: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    SR: tl.constexpr,
    COL: tl.constexpr,
    HADAMARD: tl.constexpr,
    ASM: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
):
    """One program per 32 tokens. Y_RULE "none" stores y itself, RULE "none" leaves dx's views out.

    SCALED: row t of dy comes times scale_ptr[t] (``row_scale.row_scales``).

    T a multiple of 32, HIDDEN of 2 G W. dw_ptr: FP32 [T / 32, 2, HIDDEN / 2], even then odd features.
    """
    STEPS: tl.constexpr = HIDDEN // (2 * G * W)
    STRIDE: tl.constexpr = HIDDEN // 2
    token = tl.program_id(0) * 32
    t = tl.arange(0, 32)[None, :, None]
    rstd = tl.load(rstd_ptr + token + t)
    back = rstd  # and, where rows of dy are scaled, what undoes it
    if SCALED:
        # the inverse of a power of two: exponent fields add up to 254
        up = (254 << 23) - (tl.load(scale_ptr + token + t) & 0x7F800000)
        back = rstd * up.to(tl.float32, bitcast=True)
    words = _chunk_words(G, W, one)
    here = token.to(tl.int64) * STRIDE + t * STRIDE
    total = tl.zeros([G, 32, W], tl.float32)
    for i in range(STEPS):
        word = words + i * (G * W)
        x = tl.load(x_ptr + here + word)
        w0 = tl.load(weight_ptr + word)
        w1 = tl.load(weight_ptr + STRIDE + word)
        y = pack_rne(low_f32(x) * rstd * w0, high_f32(x) * rstd * w1, ASM)
        if Y_RULE == "none":
            tl.store(y_col_ptr + here + word, y)
        else:
            yc = finish_column(column_mx(y, y_state, Y_RULE, Y_COL, Y_HADAMARD, ASM), Y_COL, ASM)
            PER_WORD: tl.constexpr = 2 if Y_COL == "bf16" else 4
            out = y_col_ptr + (T // PER_WORD).to(tl.int64) * (i * (2 * G * W)) + token // PER_WORD
            _store_columns_chunks(out, yc, T // PER_WORD, G)
        dy = tl.load(dy_ptr + here + word)
        p0 = low_f32(dy) * low_f32(x)
        p1 = high_f32(dy) * high_f32(x)
        total += p0 * w0 + p1 * w1
        dw = dw_ptr + (token // 32).to(tl.int64) * HIDDEN + word
        tl.store(dw, tl.sum(p0 * back, 1, keep_dims=True))
        tl.store(dw + STRIDE, tl.sum(p1 * back, 1, keep_dims=True))
    c = tl.sum(tl.sum(total, 2, keep_dims=True), 0, keep_dims=True)
    c = c / HIDDEN * (rstd * rstd * back)
    for j in range(STEPS):
        word = words + (STEPS - 1 - j) * (G * W)
        dy = tl.load(dy_ptr + here + word)
        x = tl.load(x_ptr + here + word)
        w0 = tl.load(weight_ptr + word)
        w1 = tl.load(weight_ptr + STRIDE + word)
        dx0 = low_f32(dy) * w0 * back - low_f32(x) * c
        dx1 = high_f32(dy) * w1 * back - high_f32(x) * c
        dx = pack_rne(dx0, dx1, ASM)
        if RESIDUAL:
            r = tl.load(g_ptr + here + word)
            dx = pack_rne(low_f32(r) + low_f32(dx), high_f32(r) + high_f32(dx), ASM)
        tl.store(dx_ptr + here + word, dx)
        if RULE != "none":
            first = (STEPS - 1 - j) * (2 * G * W)
            random = 0
            if SR:
                random = random_words(sr_ptr, producer, token, first, HIDDEN, G, W, True)
            v = finish_row(row_mx(dx, random, row_state, RULE, ROW, SR, ASM), ROW, ASM)
            PER_ROW: tl.constexpr = 2 if ROW == "bf16" else 4
            out = row_ptr + token.to(tl.int64) * (HIDDEN // PER_ROW) + first // PER_ROW
            _store_rows_chunks(out, v, HIDDEN // PER_ROW, 2 if ROW == "bf16" else 1, one)
            u = finish_column(column_mx(dx, col_state, RULE, COL, HADAMARD, ASM), COL, ASM)
            PER_COL: tl.constexpr = 2 if COL == "bf16" else 4
            out = col_ptr + (T // PER_COL).to(tl.int64) * first + token // PER_COL
            _store_columns_chunks(out, u, T // PER_COL, G)


def _planes(weight: Tensor) -> Tensor:
    """FP32 [2, HIDDEN / 2] of a norm's weight: even features, then odd."""
    out = torch.empty((2, weight.numel() // 2), dtype=torch.float32, device=weight.device)
    return out.copy_(weight.detach().view(-1, 2).t())  # converted and transposed by one kernel


def norm_forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, view: View | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(x' = x + delta, row view of RMSNorm(x'), rstd FP32 [T]); x' is x itself without a delta.

    x, delta: BF16 [T, HIDDEN], contiguous. weight: [HIDDEN]. Without a view the norm comes in BF16.
    """
    t, hidden = x.shape
    check_shape("norm_forward", t, hidden)
    total = x if delta is None else torch.empty_like(x)
    rstd = x.new_empty(t, dtype=torch.float32)
    out = x.new_empty((t, hidden), dtype=torch.bfloat16 if view is None else CARRIERS[view.carrier])
    base = pointer(x, x)
    rows = 2
    norm_forward_kernel[(triton.cdiv(t, rows),)](
        base,
        pointer(delta, base),
        _planes(weight),
        pointer(total, x),
        rstd,
        pointer(out, x),
        base if state is None else state,
        t,
        eps,
        HIDDEN=hidden,
        RESIDUAL=delta is not None,
        RULE="none" if view is None else rule(view.format),
        CARRIER="bf16" if view is None else view.carrier,
        ASM=packed_instructions(x.device),
        R=rows,
        W=triton.next_power_of_2(hidden // 2),
        num_warps=max(1, min(8, triton.next_power_of_2(rows * hidden // 2048))),
    )
    return total, out, rstd


def norm_backward(
    dy: Tensor,
    x: Tensor,
    g: Tensor | None,
    weight: Tensor,
    rstd: Tensor,
    y_col: View | None,
    row: View | None,
    col: View | None,
    states: tuple[Tensor | None, Tensor | None, Tensor | None],
    sr: tuple[Tensor, int] | None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """(dx, column view of y, row view of dx, column view of dx, dweight [HIDDEN] in weight's type).

    Args:
        dy: BF16 [T, HIDDEN], gradient of y = RMSNorm(x).
        x, rstd: input of the norm and what ``norm_forward`` gave.
        g: BF16 gradient that reaches x beside the norm, added to dx, or None.
        y_col: column view of y, an MX format; None gives y itself in BF16 [T, HIDDEN].
        row, col: views of dx, of one MX format; None leaves both out.
        states: int32 [4] of y_col, row and col.
        sr: random state and producer of a stochastic ``row``.
        scales: of ``row_scale.row_scales``, where each row of dy comes times its scale; powers of two, so
            results are those of the unscaled dy.
    """
    t, hidden = x.shape
    check_shape("norm_backward", t, hidden)
    bf16 = torch.bfloat16
    dx = torch.empty_like(x)
    y_out = x.new_empty((t, hidden), dtype=bf16)
    if y_col is not None:
        y_out = x.new_empty((hidden, t), dtype=CARRIERS[y_col.carrier])
    row_out = None if row is None else x.new_empty((t, hidden), dtype=CARRIERS[row.carrier])
    col_out = None if col is None else x.new_empty((hidden, t), dtype=CARRIERS[col.carrier])
    partial = x.new_empty((t // 32, 2, hidden // 2), dtype=torch.float32)
    chunks = next(n for n in (4, 2, 1) if hidden % (128 * n) == 0)
    base = pointer(x, x)
    norm_backward_kernel[(t // 32,)](
        pointer(dy, x),
        base,
        pointer(g, base),
        _planes(weight),
        rstd,
        pointer(dx, x),
        pointer(y_out, x),
        pointer(row_out, base),
        pointer(col_out, base),
        partial,
        *(base if s is None else s for s in states),
        base if sr is None else sr[0],
        base if scales is None else scales,
        0 if sr is None else sr[1],
        t,
        1,
        HIDDEN=hidden,
        RESIDUAL=g is not None,
        SCALED=scales is not None,
        Y_RULE="none" if y_col is None else rule(y_col.format),
        Y_COL="bf16" if y_col is None else y_col.carrier,
        Y_HADAMARD="none" if y_col is None else y_col.hadamard,
        RULE="none" if row is None else rule(row.format),
        ROW="bf16" if row is None else row.carrier,
        SR=row is not None and row.rounding == "stochastic",
        COL="bf16" if col is None else col.carrier,
        HADAMARD="none" if col is None else col.hadamard,
        ASM=packed_instructions(x.device),
        G=chunks,
        W=64,
        num_warps=chunks,
        # no maxnreg: any bound spills and is slower (168: 1.4 to 1.8 times)
    )
    dw = weight.new_empty(hidden)
    dw.view(-1, 2).t().copy_(partial.sum(0))
    return dx, y_out, row_out, col_out, dw
