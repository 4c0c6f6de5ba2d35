"""SiLU-gated feed-forward boundaries: one load, every carrier that W2, W1 and W3 need.

    forward    h = silu(g) u                                     row view of h (Fprop of W2)
    backward   du = dh silu(g),  dg = dh u silu'(g)              both views of dg and du (W1, W3)
               h again, from the g and u that are loaded anyway  column view of h (Wgrad of W2)

g, u: BF16 [T, F], rows GU words apart (halves of one matrix, or two matrices); dh BF16 [T, F]. All arithmetic in
FP32, one rounding to BF16 before quantising, as the unfused layers do. The column view of h is made in
backward, so forward saves nothing but g and u. Word tiles as in ``device``: [G, 32, W], two features per word.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4core.kernels._launch import packed_instructions
from fp4core.kernels.device import high_f32, low_f32, pack_rne
from fp4core.kernels.producers import CARRIERS, View, rule
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
def gradient_words(which, dh, g, u, ASM: tl.constexpr):
    """Words of dg (which = 0) or du = dh silu(g) (which = 1), chosen at run time."""
    g0 = low_f32(g)
    g1 = high_f32(g)
    s0 = sigmoid(g0, ASM)
    s1 = sigmoid(g1, ASM)
    d0 = low_f32(dh)
    d1 = high_f32(dh)
    gate0 = (d0 * low_f32(u)) * (s0 * (1.0 + g0 * (1.0 - s0)))
    gate1 = (d1 * high_f32(u)) * (s1 * (1.0 + g1 * (1.0 - s1)))
    low = tl.where(which == 0, gate0, d0 * (g0 * s0))
    high = tl.where(which == 0, gate1, d1 * (g1 * s1))
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
    H_RULE: tl.constexpr,
    H_COL: tl.constexpr,
    H_HADAMARD: tl.constexpr,
    ASM: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
):
    """Row and column views of [dg | du] ([T, 2 F] and [2 F, T]) and the column view of h [F, T].

    RULE "none" stores dg, du, h in BF16 [T, F] to row_ptr, col_ptr, h_ptr instead. T a multiple of 32 G, F of 2 W.
    dg and du take turns in a loop that stays a loop: unrolled, the code outgrows the instruction cache (128 KB)
    and the kernel runs three times slower. The second turn finds its inputs in the first-level cache.
    """
    TILES: tl.constexpr = F // (2 * W)
    pid = tl.program_id(0)
    token = (pid // TILES) * (32 * G)
    pf = pid % TILES
    feature = pf * (2 * W)
    place = token.to(tl.int64) * GU + pf * W
    flat = token.to(tl.int64) * (F // 2) + pf * W
    h = silu_mul_words(
        load_words(g_ptr + place, GU, G, W, VEC, one), load_words(u_ptr + place, GU, G, W, VEC, one), ASM
    )
    if RULE == "none":
        store_rows(h_ptr + flat, h, F // 2, VEC, one)
    else:
        hc = finish_column(column_mx(h, h_state, H_RULE, H_COL, H_HADAMARD, ASM), H_COL, ASM)
        PER_WORD: tl.constexpr = 2 if H_COL == "bf16" else 4
        out = h_ptr + feature.to(tl.int64) * (T // PER_WORD) + token // PER_WORD
        store_columns(out, hc, T // PER_WORD, False, 0, 0)
    for which in range(0, 1 + one):
        g = load_words(g_ptr + place, GU, G, W, VEC, one)
        u = load_words(u_ptr + place, GU, G, W, VEC, one)
        dh = load_words(dh_ptr + flat, F // 2, G, W, VEC, one)
        d = gradient_words(which, dh, g, u, ASM)
        if RULE == "none":
            store_rows((row_ptr if which == 0 else col_ptr) + flat, d, F // 2, VEC, one)
        else:
            random = 0
            if SR:
                producer = tl.where(which == 0, gate_producer, up_producer)
                random = random_words(sr_ptr, producer, token, feature, F, G, W)
            store_gradient_views(
                d, random, row_ptr, col_ptr, row_state, col_state, token, feature + which * F, T, one,
                2 * F, RULE, ROW, COL, SR, HADAMARD, VEC, ASM,
            )  # fmt: skip


def words(t: Tensor | None, like: Tensor) -> Tensor:
    """An int32 pointer to the first element of ``t`` whatever its strides; absent tensors lend ``like``'s."""
    if t is None:
        return like
    if t.dtype in (torch.int32, torch.int64, torch.float32):
        return t
    return t.as_strided((1, 4 // t.element_size()), (4, 1)).view(torch.int32)


def groups_per_tile(tokens: int) -> int:
    """Groups of 32 tokens in a tile: four, so that a column's store is 128 bytes long, where they divide."""
    return 4 if tokens % 128 == 0 else 1


def check_shape(name: str, tokens: int, features: int) -> None:
    """Raise ValueError unless the fused kernels' tiles cover the matrix without a remainder."""
    if tokens % 32 or features % 128:
        raise ValueError(
            f"{name}: got {tokens} tokens x {features} features; needed multiples of 32 and 128 (the unfused path "
            "takes any)"
        )


def silu_forward(gate: Tensor, up: Tensor, view: View | None, state: Tensor | None) -> Tensor:
    """Row view [T, F] of h = silu(gate) up in ``view``'s carrier; h itself in BF16 without a view.

    gate, up: BF16 [T, F] of equal strides, contiguous along F. ``state``: int32 [4] of the MX view.
    """
    t, f = gate.shape
    check_shape("silu_forward", t, f)
    out = gate.new_empty((t, f), dtype=torch.bfloat16 if view is None else CARRIERS[view.carrier])
    g = groups_per_tile(t)
    g_ptr = words(gate, gate)
    silu_forward_kernel[(t // (32 * g) * (f // 128),)](
        g_ptr,
        words(up, gate),
        words(out, gate),
        words(state, g_ptr),
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
    row: View | None,
    col: View | None,
    h_col: View | None,
    states: tuple[Tensor, Tensor, Tensor] | None,
    sr: tuple[Tensor, int, int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Carriers ([dg | du] [T, 2 F], its transpose's column view [2 F, T], h's column view [F, T]).

    Args:
        dh: BF16 [T, F], contiguous.
        gate, up: as in ``silu_forward``.
        row, col: views of dg and du, of one MX format; None (with h_col None) gives dg, du, h in BF16 [T, F].
        h_col: column view of h, an MX format.
        states: int32 [4] of row, col and h_col.
        sr: random state, producers of dg's and du's row views; for a stochastic ``row``.
    """
    t, f = dh.shape
    check_shape("silu_backward", t, f)
    bf16 = torch.bfloat16
    if row is None:
        outs = [dh.new_empty((t, f), dtype=bf16) for _ in range(3)]
    else:
        outs = [
            dh.new_empty((t, 2 * f), dtype=CARRIERS[row.carrier]),
            dh.new_empty((2 * f, t), dtype=CARRIERS[col.carrier]),
            dh.new_empty((f, t), dtype=CARRIERS[h_col.carrier]),
        ]
    g = groups_per_tile(t)
    base = words(dh, dh)
    silu_backward_kernel[(t // (32 * g) * (f // 128),)](
        base,
        words(gate, dh),
        words(up, dh),
        *(words(o, dh) for o in outs),
        *(states or (base, base, base)),
        base if sr is None else sr[0],
        0 if sr is None else sr[1],
        0 if sr is None else sr[2],
        t,
        1,
        F=f,
        GU=gate.stride(0) // 2,
        RULE="none" if row is None else rule(row.format),
        ROW="bf16" if row is None else row.carrier,
        SR=row is not None and row.rounding == "stochastic",
        COL="bf16" if col is None else col.carrier,
        HADAMARD="none" if col is None else col.hadamard,
        H_RULE="none" if h_col is None else rule(h_col.format),
        H_COL="bf16" if h_col is None else h_col.carrier,
        H_HADAMARD="none" if h_col is None else h_col.hadamard,
        ASM=packed_instructions(dh.device),
        G=g,
        W=64,
        VEC=2,
        num_warps=g,
    )
    return outs[0], outs[1], outs[2]
