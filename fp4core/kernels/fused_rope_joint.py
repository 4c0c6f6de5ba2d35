"""RoPE's inverse into both views of dQ, dK and dV, in one kernel on ``warp_tiles``.

    (a, b) -> (a cos + b sin, b cos - a sin)     a, b: features i and i + 64 of a head of 128; V stays

FP32 with one rounding to BF16, the bits of ``fused_rope``. A thread has both halves of its pairs, so that
they meet without an exchange and one reading of the table serves them. FP8 carriers of MX formats without
rotation; what else there is goes through ``fused_rope``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4core.kernels._launch import packed_instructions, pointer
from fp4core.kernels.device import high_f32, low_f32, pack_rne
from fp4core.kernels.fused_rope import check_rope
from fp4core.kernels.mx import mul2, mx_constants
from fp4core.kernels.producers import View, rule
from fp4core.kernels.views import note_extremes
from fp4core.kernels.warp_tiles import (
    aligned,
    column_pointers,
    column_view,
    per_token,
    random_tile,
    row_pointers,
    row_view,
    spread_token,
)


@triton.jit
def _negative(x, ASM: tl.constexpr):
    """-x; Triton's own is 0 - x, which loses the sign of a zero."""
    if ASM:
        return tl.inline_asm_elementwise(
            "neg.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505  Triton compiles what follows a constexpr branch unless it is in its else
        return (x.to(tl.int32, bitcast=True) ^ -2147483648).to(tl.float32, bitcast=True)


@triton.jit
def rotate_back_pairs(w, c0, c1, s0, s1, ASM: tl.constexpr):
    """Words [8, C, 4, 2, 16] of heads' halves, rotated back; tables [8, C, 4, 16] of even, odd features."""
    a, b = tl.split(tl.permute(w, [0, 1, 2, 4, 3]))
    a0 = low_f32(a)
    a1 = high_f32(a)
    b0 = low_f32(b)
    b1 = high_f32(b)
    first = pack_rne(tl.fma(b0, s0, a0 * c0), tl.fma(b1, s1, a1 * c1), ASM)
    second = pack_rne(tl.fma(_negative(a0, ASM), s0, b0 * c0), tl.fma(_negative(a1, ASM), s1, b1 * c1), ASM)
    return tl.permute(tl.join(first, second), [0, 1, 2, 4, 3])


@triton.jit
def _plane(at):
    return tl.reshape(tl.load(at), [at.shape[0], at.shape[1], at.shape[2], at.shape[4]])


@triton.jit(do_not_specialize=["one", "q_producer", "k_producer", "v_producer"])
def rope_joint_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    planes_ptr,
    row_ptr,
    col_ptr,
    row_state,
    col_state,
    sr_ptr,
    scale_ptr,
    q_producer,
    k_producer,
    v_producer,
    S,
    q_batch,
    k_batch,
    v_batch,
    q_head,
    k_head,
    v_head,
    q_token,
    k_token,
    v_token,
    one,
    T: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SCALED: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    SR: tl.constexpr,
    COL: tl.constexpr,
    ASM: tl.constexpr,
    G: tl.constexpr,
):
    """Views of dQ | dK | dV side by side: row [T, N], column [N, T], N = (HEADS + 2 KV_HEADS) 128; words.

    One program: 32 G tokens of a head, two warps for each 32 tokens. Gradients have strides (.._batch,
    .._head, .._token, 1) in words, multiples of four. planes: FP32 [S, 4, 32] of ``rope_table``. SCALED: the
    row view is of rows times scale_ptr [T]. Random places are those of each gradient's own matrix.
    """
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    ROWS: tl.constexpr = ALL * 32  # words of a row in FP8
    COLUMN: tl.constexpr = T // 4
    C: tl.constexpr = 2 * G
    pid = tl.program_id(0)
    token = pid // ALL * (32 * G)
    head = pid % ALL
    position = token % S
    batch = (token // S).to(tl.int64)
    # division and multiplication show the compiler that rows begin at multiples of 16 bytes
    base = q_ptr + batch * (q_batch // 4 * 4)
    own = head
    heads = HEADS
    producer = q_producer
    to_head = q_head
    to_token = q_token
    if head >= HEADS:
        base = k_ptr + batch * (k_batch // 4 * 4)
        own = head - HEADS
        heads = KV_HEADS
        producer = k_producer
        to_head = k_head
        to_token = k_token
    if head >= HEADS + KV_HEADS:
        base = v_ptr + batch * (v_batch // 4 * 4)
        own = head - (HEADS + KV_HEADS)
        producer = v_producer
        to_head = v_head
        to_token = v_token
    to_token = to_token // 4 * 4
    base += position.to(tl.int64) * to_token + own.to(tl.int64) * (to_head // 4 * 4)
    # warp c has block c % 2 of either half of the head, and tokens of group c // 2
    ci = tl.arange(0, C)
    group = tl.reshape(ci // 2, [1, C, 1, 1, 1])
    block = tl.reshape(ci % 2, [1, C, 1, 1, 1])
    w = tl.load(aligned(row_pointers(base, to_token, 32, group * 32 * to_token + block * 16, 2, one, 16), 16))
    if head < HEADS + KV_HEADS:
        planes = planes_ptr + position.to(tl.int64) * 128
        at = aligned(row_pointers(planes, 128, 0, group * (32 * 128) + block * 16, 1, one, 16), 16)
        w = rotate_back_pairs(w, _plane(at), _plane(at + 32), _plane(at + 64), _plane(at + 96), ASM)
    c, c64, ct = mx_constants(tl.load(col_state), COL, RULE)
    u, top, low = column_view(w, c, c64, ct, RULE, COL, ASM)
    out = col_ptr + (head * 128).to(tl.int64) * COLUMN + token // 4
    chunk = tl.reshape(ci // 2 * 8 + ci % 2 * (32 * COLUMN), [1, 1, C, 1, 1, 1])
    tl.store(column_pointers(out, COLUMN, 64, chunk, 2, one), u)
    note_extremes(top, low, col_state, COL, RULE, ASM)
    drawn = 0
    if SR:
        first = (tl.load(sr_ptr + 2) + token) * (heads * 8) + own * 8
        chunk = tl.reshape(ci // 2 * 32 * (heads * 8) + ci % 2 * 2, [1, 1, C, 1, 1])
        drawn = random_tile(tl.load(sr_ptr), tl.load(sr_ptr + 1), producer, first, heads * 8, 4, chunk, 2, C)
    if SCALED:
        scales = per_token(scale_ptr + token, tl.reshape(ci // 2 * 32, [1, 1, C, 1]), one, C)
        w = mul2(w, spread_token(scales, 2), ASM)
    c, c64, ct = mx_constants(tl.load(row_state), ROW, RULE)
    v, top, low = row_view(w, drawn, c, c64, ct, RULE, ROW, SR, ASM)
    out = row_ptr + token.to(tl.int64) * ROWS + head * 32
    tl.store(aligned(row_pointers(out, ROWS, 16, group * (32 * ROWS) + block * 8, 2, one, 8), 8), v)
    note_extremes(top, low, row_state, ROW, RULE, ASM)


def _in_sixteens(d: Tensor) -> bool:
    """Whether rows of the last axis are contiguous and begin at multiples of 16 bytes."""
    return d.stride(-1) == 1 and not any(n % 8 for n in d.stride()[:-1]) and d.data_ptr() % 16 == 0


def rope_joint_backward(
    grads: Sequence[Tensor],
    planes: Tensor,
    *,
    row: View,
    col: View,
    rows: Tensor,
    cols: Tensor,
    states: tuple[Tensor, Tensor],
    sr: tuple[Tensor, int, int, int] | None,
    scales: Tensor | None,
) -> None:
    """Both views of dQ, dK and dV, side by side.

    Args:
        grads: BF16 [B, heads, S, 128] each, K and V of equally many heads, any strides.
        planes: of ``rope_table(..., planes=True)``.
        row, col: views of one MX format, in FP8, ``col`` to nearest; not rotated.
        rows, cols: [T, N] in ``row``'s carrier, [N, T] in ``col``'s, to be filled.
        states: int32 [4] of row and col.
        sr: random state and producers of dQ, dK and dV, for a stochastic ``row``.
        scales: int32 [T] of ``row_scales``: the row view is of each row times its scale.
    """
    batch, heads, length, head_dim = grads[0].shape
    check_rope(length, head_dim)
    # a copy, as contiguous() would leave a wrong address as it is
    grads = [d if _in_sixteens(d) else d.clone(memory_format=torch.contiguous_format) for d in grads]
    kv_heads, t = grads[1].shape[1], batch * length
    groups = 2 if length % 64 == 0 else 1
    base = pointer(grads[0], rows)
    rope_joint_kernel[(t // (32 * groups) * (heads + 2 * kv_heads),)](
        *(pointer(d, d) for d in grads),
        planes,
        pointer(rows, rows),
        pointer(cols, rows),
        *states,
        base if sr is None else sr[0],
        base if scales is None else scales,
        *((0, 0, 0) if sr is None else sr[1:]),
        length,
        *(d.stride(axis) // 2 for axis in (0, 1, 2) for d in grads),
        1,
        T=t,
        HEADS=heads,
        KV_HEADS=kv_heads,
        SCALED=scales is not None,
        RULE=rule(row.format),
        ROW=row.carrier,
        SR=row.rounding == "stochastic",
        COL=col.carrier,
        ASM=packed_instructions(rows.device),
        G=groups,
        num_warps=2 * groups,
        maxnreg=128,  # four programs on a multiprocessor; without spills
    )
