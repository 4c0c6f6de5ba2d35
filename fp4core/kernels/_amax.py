"""Maxima of a BF16 matrix per 128 x 128 chunk, and the outer scales that follow from them.

The chunk grid serves every NV-style format: its maximum is the tensor's amax, a pair of its rows (columns)
the 256-row stripe of the row (column) view. FP32, NaN where a chunk holds a NaN or infinity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4core.kernels._launch import GROUP, check_matrix, packed_instructions, padded, words
from fp4core.kernels.device import high_f32, magnitudes
from fp4core.kernels.nv import finite_or_nan
from fp4core.kernels.tiles import column_amax, load_any, rotate_tokens, rotate_tokens_tail

CHUNK = 128
STRIPE = 256


@triton.jit(do_not_specialize=["one"])
def _chunk_kernel(
    x_ptr,
    out_ptr,
    rotated_ptr,
    M,
    one,
    K: tl.constexpr,
    PLAIN: tl.constexpr,
    HADAMARD: tl.constexpr,
    TAIL: tl.constexpr,
    FP32: tl.constexpr,
    MASKED: tl.constexpr,
    ASM: tl.constexpr,
):
    """One 128 x 128 chunk: amax of x (PLAIN) and of x rotated along tokens (HADAMARD not "none").

    TAIL: M ends inside a Hadamard group. FP32: x is FP32 (int64 words).
    """
    CHUNKS: tl.constexpr = (K + 127) // 128
    pid = tl.program_id(0)
    row = (pid // CHUNKS) * 128
    col = (pid % CHUNKS) * 128
    base = x_ptr + row.to(tl.int64) * (K // 2) + col // 2
    w = load_any(base, K // 2, 4, 64, 2, one, M - row, K // 2 - col // 2, FP32, MASKED, ASM)
    if PLAIN:
        tl.store(out_ptr + pid, _largest(w, ASM))
    if HADAMARD != "none":
        if TAIL:
            rotated = rotate_tokens_tail(w, HADAMARD, M - row, ASM)
        else:
            rotated = rotate_tokens(w, HADAMARD, ASM)
        tl.store(rotated_ptr + pid, _largest(rotated, ASM))


@triton.jit
def _largest(w, ASM: tl.constexpr):
    columns = column_amax(w, 32, ASM)
    bits = tl.max(tl.maximum(magnitudes(columns) & 0xFFFF, (columns >> 16) & 0xFFFF))
    return finite_or_nan(high_f32(bits << 16))


@triton.jit
def _outer_kernel(
    chunk_ptr, amax_ptr, outer_ptr, R, C, KIND: tl.constexpr, DIVISOR: tl.constexpr, BLOCK: tl.constexpr
):
    """Maximum over a stripe's chunks (KIND "row", "col") or all ("tensor"); outer = maximum / DIVISOR."""
    pid = tl.program_id(0)
    if KIND == "row":
        first = pid * 2 * C
        count = tl.minimum(2 * C, R * C - first)
    elif KIND == "col":
        first = pid * 2
        count = 2 * R
    else:
        first = pid
        count = R * C
    best = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < count:
        i = start + tl.arange(0, BLOCK)
        if KIND == "col":
            where = first + (i // 2) * C + i % 2
            real = (i < count) & (first + i % 2 < C)
        else:
            where = first + i
            real = i < count
        a = tl.load(chunk_ptr + where, mask=real, other=0.0)
        best = tl.maximum(best, a.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        start += BLOCK
    amax = tl.max(best).to(tl.float32, bitcast=True)
    tl.store(amax_ptr + pid, amax)
    tl.store(outer_ptr + pid, tl.div_rn(amax, amax * 0.0 + DIVISOR))


def chunk_amax(
    x: Tensor, *, hadamard: str = "none", plain: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Chunk maxima of x [M, K] and of x rotated along tokens.

    Args:
        x: BF16 or FP32 (rounded to BF16) [M, K], contiguous.
        hadamard: rotation of the second grid; "none" leaves it out.
        plain: whether the first grid is wanted.

    Returns:
        FP32 grids [ceil(M / 128), ceil(K / 128)], None for one not asked for.
    """
    check_matrix(x)
    x = padded(x, 1, 32)
    m, k = x.shape
    whole = m % CHUNK == 0 and k % CHUNK == 0
    grid = (-(-m // CHUNK), -(-k // CHUNK))
    out = x.new_empty(grid, dtype=torch.float32)
    rotated = torch.empty_like(out) if hadamard != "none" else out
    _chunk_kernel[(grid[0] * grid[1],)](
        words(x),
        out,
        rotated,
        m,
        1,
        K=k,
        PLAIN=plain,
        HADAMARD=hadamard,
        TAIL=hadamard != "none" and m % GROUP[hadamard] != 0,
        FP32=x.dtype == torch.float32,
        MASKED=not whole,
        ASM=packed_instructions(x.device),
        num_warps=4,
    )
    return out if plain else None, rotated if hadamard != "none" else None


def outer_scales(chunks: Tensor, kind: str, divisor: float) -> tuple[Tensor, Tensor]:
    """(amax, outer) FP32 vectors of a chunk grid.

    Args:
        chunks: from ``chunk_amax``.
        kind: "tensor" (one value), "row" or "col" (one per stripe of 256 rows of that view).
        divisor: outer = amax / divisor.
    """
    rows, cols = chunks.shape
    count = 1 if kind == "tensor" else -(-(rows if kind == "row" else cols) // (STRIPE // CHUNK))
    both = chunks.new_empty(2, count)
    _outer_kernel[(count,)](
        chunks, both[0], both[1], rows, cols, KIND=kind, DIVISOR=divisor, BLOCK=1024, num_warps=4
    )
    return both[0], both[1]
