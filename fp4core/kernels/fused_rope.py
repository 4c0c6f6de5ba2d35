"""RoPE around QKV: rotation in place after the projection, and its inverse into both views of dQ, dK, dV.

    forward    (a, b) -> (a cos - b sin, b cos + a sin)     a, b: features i and i + 64 of a head of 128
    backward   (a, b) -> (a cos + b sin, b cos - a sin)     then row view (Dgrad) and column view (Wgrad)

in FP32 with one rounding to BF16. qkv is [T, N], N = (H + 2 G') 128 features of H query, G' key and G' value
heads; V is not rotated. position = token mod S. Word tiles as in ``device``; in backward a tile is as wide as
a head, and its halves meet by an exchange between lanes.

The row view may be made of scaled rows (``row_scale``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4core.kernels._launch import packed_instructions, pointer
from fp4core.kernels.device import high_f32, low_f32, pack_rne
from fp4core.kernels.fused_silu import groups_per_tile
from fp4core.kernels.mx import mul2
from fp4core.kernels.producers import View, rule
from fp4core.kernels.row_scale import token_scales
from fp4core.kernels.tiles import load_words, store_columns, store_rows
from fp4core.kernels.views import column_mx, finish_column, finish_row, random_words, row_mx


@triton.jit
def _turn(w, other, place, sign, table_ptr, ASM: tl.constexpr):
    """Words of w cos + other (sign sin): ``place`` the word's row of the table, ``sign`` a mask for sin's
    sign.

    The table's four numbers are read where they are used: as tensors of their own they would take 256
    registers.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 c<2>, s<2>, a, b, p, q;
            .reg .b32 t;
            .reg .b64 r;
            mad.wide.s32 r, $3, 16, $5;
            ld.global.nc.v4.f32 {c0, c1, s0, s1}, [r];
            mov.b32 t, s0;
            xor.b32 t, t, $4;
            mov.b32 s0, t;
            mov.b32 t, s1;
            xor.b32 t, t, $4;
            mov.b32 s1, t;
            shl.b32 t, $1, 16;
            mov.b32 a, t;
            shl.b32 t, $2, 16;
            mov.b32 b, t;
            mul.f32 p, a, c0;
            fma.rn.f32 p, b, s0, p;
            and.b32 t, $1, 0xFFFF0000;
            mov.b32 a, t;
            and.b32 t, $2, 0xFFFF0000;
            mov.b32 b, t;
            mul.f32 q, a, c1;
            fma.rn.f32 q, b, s1, q;
            cvt.rn.bf16x2.f32 $0, q, p;
            }""",
            "=r,r,r,r,r,l",
            [w, other, place, sign, table_ptr.to(tl.int64)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    row = table_ptr + 4 * place
    s0 = (tl.load(row + 2).to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    s1 = (tl.load(row + 3).to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    low = low_f32(w) * tl.load(row) + low_f32(other) * s0
    high = high_f32(w) * tl.load(row + 1) + high_f32(other) * s1
    return pack_rne(low, high, ASM)


@triton.jit
def rotate_back(w, table_ptr, position, VEC: tl.constexpr, one, ASM: tl.constexpr):
    """Words [G, 32, 64] of whole heads, rotated by minus the angle of their positions."""
    G: tl.constexpr = w.shape[0]
    pairs = tl.reshape(w, [G, 32, 2, 32])
    other = tl.reshape(pairs ^ tl.xor_sum(pairs, 2, keep_dims=True), [G, 32, 64])
    f = tl.arange(0, 64)[None, None, :] * one
    f = tl.multiple_of(tl.max_contiguous(f, (1, 1, VEC)), (1, 1, VEC))
    t = tl.arange(0, G)[:, None, None] * 32 + tl.arange(0, 32)[None, :, None]
    place = (position + t) * 32 + f % 32
    # first half: a cos + b sin, second half: b cos - a sin
    sign = tl.where(f >= 32, -2147483648, 0) + tl.zeros_like(place)
    return _turn(w, other, place, sign, table_ptr, ASM)


@triton.jit
def _plane(planes_ptr, position, PLANE: tl.constexpr, G: tl.constexpr, VEC: tl.constexpr, one):
    """FP32 [G, 32, 32]: a plane of the table for the tokens from ``position`` on."""
    words = planes_ptr.to(tl.pointer_type(tl.int32)) + position * 128 + PLANE * 32
    return load_words(words, 128, G, 32, VEC, one).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["one"])
def rope_forward_kernel(
    qkv_ptr,
    planes_ptr,
    S,
    one,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    ASM: tl.constexpr,
    G: tl.constexpr,
    VEC: tl.constexpr,
):
    """Rotate the first HEADS heads of qkv [T, N] in place. S a multiple of 32 G; heads of 128 features.

    Planes FP32 [S, 4, 32] (cos of even, of odd features, then sin) stay in registers for all heads of a
    program.
    """
    GROUPS: tl.constexpr = HEADS // PER_PROGRAM
    pid = tl.program_id(0)
    token = (pid // GROUPS) * (32 * G)
    head = (pid % GROUPS) * PER_PROGRAM
    position = token % S
    c0 = _plane(planes_ptr, position, 0, G, VEC, one)
    c1 = _plane(planes_ptr, position, 1, G, VEC, one)
    s0 = _plane(planes_ptr, position, 2, G, VEC, one)
    s1 = _plane(planes_ptr, position, 3, G, VEC, one)
    base = qkv_ptr + token.to(tl.int64) * (N // 2) + head * 64
    for i in range(PER_PROGRAM):
        place = base + i * 64
        a = load_words(place, N // 2, G, 32, VEC, one)
        b = load_words(place + 32, N // 2, G, 32, VEC, one)
        a0 = low_f32(a)
        a1 = high_f32(a)
        b0 = low_f32(b)
        b1 = high_f32(b)
        first = pack_rne(a0 * c0 - b0 * s0, a1 * c1 - b1 * s1, ASM)
        second = pack_rne(b0 * c0 + a0 * s0, b1 * c1 + a1 * s1, ASM)
        store_rows(place, first, N // 2, VEC, one)
        store_rows(place + 32, second, N // 2, VEC, one)


@triton.jit
def _store_views(
    w,
    random,
    row_ptr,
    col_ptr,
    row_state,
    col_state,
    scale_ptr,
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
    SCALED: tl.constexpr,
    VEC: tl.constexpr,
    ASM: tl.constexpr,
):
    """Both views of gradient words at (token, feature) of a matrix of N features; COL "none": the row view.

    The row view comes last, because only one of w and its scaled rows fits into the registers.
    """
    if COL != "none":
        c = finish_column(column_mx(w, col_state, RULE, COL, HADAMARD, ASM), COL, ASM)
        PER_WORD: tl.constexpr = 2 if COL == "bf16" else 4
        place = col_ptr + feature.to(tl.int64) * (T // PER_WORD) + token // PER_WORD
        store_columns(place, c, T // PER_WORD, False, 0, 0)
    if SCALED:
        w = mul2(w, token_scales(scale_ptr + token, w, one, PER_WORD=True), ASM)
    v = finish_row(row_mx(w, random, row_state, RULE, ROW, SR, ASM), ROW, ASM)
    STRIDE: tl.constexpr = N // 2 if ROW == "bf16" else N // 4
    ROW_VEC: tl.constexpr = VEC if ROW == "bf16" else (VEC + 1) // 2
    first = feature // (N // STRIDE)
    store_rows(row_ptr + token.to(tl.int64) * STRIDE + first, v, STRIDE, ROW_VEC, one)


@triton.jit(do_not_specialize=["one", "producer"])
def rope_backward_kernel(
    d_ptr,
    table_ptr,
    row_ptr,
    col_ptr,
    row_state,
    col_state,
    sr_ptr,
    scale_ptr,
    producer,
    T,
    S,
    BATCH_STRIDE,
    HEAD_STRIDE,
    one,
    TOKEN_STRIDE: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    ROTATE: tl.constexpr,
    SCALED: tl.constexpr,
    OUTLIERS: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    SR: tl.constexpr,
    COL: tl.constexpr,
    HADAMARD: tl.constexpr,
    ASM: tl.constexpr,
    G: tl.constexpr,
    VEC: tl.constexpr,
):
    """Views of one gradient d (dQ, dK or dV) at row_ptr, N features per row, and at col_ptr [.., T].

    d has strides (BATCH_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, 1), in words. RULE "none" stores the rotated
    gradient itself to row_ptr [T, N]. SCALED: the row view is of rows times scale_ptr [T]. OUTLIERS: of tiles
    alone in which some scale is zero. Random places are those of d's own [T, 128 HEADS] matrix. A tile is a
    whole head, so that the views' code exists once; its halves meet by an exchange between lanes.
    """
    GROUPS: tl.constexpr = HEADS // PER_PROGRAM
    pid = tl.program_id(0)
    token = (pid // GROUPS) * (32 * G)
    head0 = (pid % GROUPS) * PER_PROGRAM
    position = token % S
    base = d_ptr + (token // S).to(tl.int64) * BATCH_STRIDE + position.to(tl.int64) * TOKEN_STRIDE
    if OUTLIERS:
        listed = tl.load(scale_ptr + token + tl.arange(0, 32 * G)) == 0
        heads = PER_PROGRAM * tl.max(listed.to(tl.int32), 0)
    else:
        heads: tl.constexpr = PER_PROGRAM
    for i in range(heads):
        head = head0 + i
        w = load_words(base + head.to(tl.int64) * HEAD_STRIDE, TOKEN_STRIDE, G, 64, VEC, one)
        if ROTATE:
            w = rotate_back(w, table_ptr, position, VEC, one, ASM)
        feature = head * 128
        if RULE == "none":
            out = row_ptr + token.to(tl.int64) * (N // 2) + feature // 2
            store_rows(out, w, N // 2, VEC, one)
        else:
            random = 0
            if SR:
                random = random_words(sr_ptr, producer, token, feature, HEADS * 128, G, 64)
            _store_views(
                w, random, row_ptr, col_ptr, row_state, col_state, scale_ptr, token, feature, T, one,
                N, RULE, ROW, COL, SR, HADAMARD, SCALED, VEC, ASM,
            )  # fmt: skip


def rope_table(cos: Tensor, sin: Tensor, *, planes: bool) -> Tensor:
    """FP32 cos, sin [S, 64] in the kernels' order: even and odd entries of cos, then of sin.

    ``planes``: [S, 4, 32], for ``rope_forward_``; else [S, 32, 4], for ``rope_backward``. Every block asks
    for the same one, so the last few are kept.
    """
    key = (planes, *((t.device, t.data_ptr(), t.shape, t.stride(), _version(t)) for t in (cos, sin)))
    if key not in _TABLES:
        parts = (cos[:, 0::2], cos[:, 1::2], sin[:, 0::2], sin[:, 1::2])
        while len(_TABLES) >= 4:
            del _TABLES[next(iter(_TABLES))]
        # with what it was made from: as long as they live, nothing else has their addresses
        _TABLES[key] = (cos, sin, torch.stack(parts, dim=1 if planes else 2))
    return _TABLES[key][2]


_TABLES: dict[tuple, tuple[Tensor, Tensor, Tensor]] = {}


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def check_rope(length: int, head_dim: int) -> None:
    """Raise ValueError for what the kernels do not rotate."""
    if head_dim != 128 or length % 32:
        raise ValueError(
            f"rope: got head_dim {head_dim}, sequence {length}; needed 128 and a multiple of 32 "
            "(the unfused path takes any)"
        )


# Programs that fill a Hopper GPU once: two of these kernels' fit on each of 132 multiprocessors.
_PROGRAMS = 256


def _heads_per_program(heads: int, tiles: int) -> int:
    """As many as share a tile's rotations while the GPU has work: K and V of 8 heads are a quarter of Q."""
    fitting = [n for n in (8, 4, 2, 1) if heads % n == 0]
    return next((n for n in fitting if tiles * (heads // n) >= _PROGRAMS), 1)


def rope_forward_(qkv: Tensor, heads: int, length: int, planes: Tensor) -> Tensor:
    """Rotate the first ``heads`` heads (128 features each) of BF16 [T, N] in place; returns it.

    The T tokens are sequences of ``length``; planes are ``rope_table``'s, of that many positions.
    """
    check_rope(length, 128)
    t = qkv.shape[0]
    g = groups_per_tile(length)
    tiles = t // (32 * g)
    per = _heads_per_program(heads, tiles)
    rope_forward_kernel[(tiles * (heads // per),)](
        pointer(qkv, qkv),
        planes,
        length,
        1,
        N=qkv.stride(0),
        HEADS=heads,
        PER_PROGRAM=per,
        ASM=packed_instructions(qkv.device),
        G=g,
        VEC=2,
        num_warps=g,
    )
    return qkv


def rope_backward(
    d: Tensor,
    table: Tensor,
    *,
    rotate: bool,
    row: View | None,
    col: View | None,
    row_out: Tensor,
    col_out: Tensor | None,
    states: tuple[Tensor, Tensor] | None,
    sr: tuple[Tensor, int] | None,
    scales: Tensor | None = None,
    outliers: bool = False,
) -> None:
    """Views of one gradient of attention's inputs into slices of the joint carriers.

    Args:
        d: BF16 [B, heads, S, 128], any strides with the last axis contiguous.
        table: of ``rope_table(..., planes=False)``.
        rotate: True for dQ and dK.
        row, col: views of one MX format; without both the rotated gradient itself goes to ``row_out``.
        row_out: [T, heads * 128] slice of the joint row carrier (or BF16 matrix) [T, N].
        col_out: [heads * 128, T] slice of the joint column carrier [N, T].
        states: int32 [4] of row and col.
        sr: random state and producer of the row view, for a stochastic ``row``.
        scales: int32 [T] of ``row_scales``: the row view is of each row times its scale. A rotation makes a
            value 1.42 times as large at most.
        outliers: write only groups of tokens in which ``scales`` has a zero, and their rows unscaled.
    """
    batch, heads, length, head_dim = d.shape
    check_rope(length, head_dim)
    if d.stride(-1) != 1:
        d = d.contiguous()
    g, t = groups_per_tile(length), batch * length
    tiles = t // (32 * g)
    per = _heads_per_program(heads, tiles)
    base = pointer(d, d)
    rope_backward_kernel[(tiles * (heads // per),)](
        base,
        table,
        pointer(row_out, d),
        pointer(col_out, base),
        *(states or (base, base)),
        base if sr is None else sr[0],
        base if scales is None else scales,
        0 if sr is None else sr[1],
        t,
        length,
        d.stride(0) // 2,
        d.stride(1) // 2,
        1,
        TOKEN_STRIDE=d.stride(2) // 2,
        N=row_out.stride(0),
        HEADS=heads,
        PER_PROGRAM=per,
        ROTATE=rotate,
        SCALED=scales is not None and not outliers,
        OUTLIERS=outliers,
        RULE="none" if row is None else rule(row.format),
        ROW="bf16" if row is None else row.carrier,
        SR=row is not None and row.rounding == "stochastic",
        COL="none" if col is None else col.carrier,
        HADAMARD="none" if col is None else col.hadamard,
        ASM=packed_instructions(d.device),
        G=g,
        VEC=2,
        num_warps=g,
        # no maxnreg: any bound spills and is slower (168: 1.4 to 1.8 times)
    )
