"""Packed codes and block scales of one view, bit for bit those of the reference.

This is the kernel behind ``fp4core.quantize(..., backend="carrier")``: it writes what the report's format
stores (nibbles, scale bytes, outer scales), where ``producers`` writes what a GEMM reads. One program makes
the codes of 32 x 128 values; the arithmetic is plain FP32 in the order of ``reference``, whole range, no
packed tricks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4core.formats import Format
from fp4core.kernels._amax import chunk_amax, outer_scales
from fp4core.kernels._launch import check_matrix
from fp4core.kernels.device import (
    code_e2m1,
    decode_e8m0,
    encode_e4m3,
    encode_ue5m3,
    philox4x32,
    round_e2m1,
    round_e2m1_stochastic,
)
from fp4core.kernels.nv import finite_or_nan, nv_block
from fp4core.kernels.tiles import rotate_f32


@triton.jit
def _rotate_kernel(
    x_ptr, out_ptr, ROWS, LENGTH, ROW_STRIDE, STRIDE, HADAMARD: tl.constexpr, BLOCK: tl.constexpr
):
    """32 places along the contraction of BLOCK rows, rotated; a last incomplete group stays as it is."""
    GROUP: tl.constexpr = 32 if HADAMARD == "fixed32" else 16
    place = tl.program_id(0) * 32 + tl.arange(0, 32)[None, :, None]
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    where = row.to(tl.int64) * ROW_STRIDE + place.to(tl.int64) * STRIDE
    real = (place < LENGTH) & (row < ROWS)
    x = (tl.load(x_ptr + where, mask=real, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    y = rotate_f32(x, HADAMARD)
    y = tl.where(place // GROUP * GROUP + GROUP <= LENGTH, y, x)
    bits = y.to(tl.int32, bitcast=True)
    bits = tl.where(y == y, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FFF)
    tl.store(out_ptr + where, bits.to(tl.int16), mask=real)


@triton.jit
def mx_byte(amax, RULE: tl.constexpr):
    """E8M0 bytes (int32) of FP32 block maxima without NaN."""
    if RULE == "ocp_rceil":
        amax = tl.div_rn(amax, tl.zeros_like(amax) + 6.0)
    bits = amax.to(tl.int32, bitcast=True)
    if RULE == "mx_floor":
        byte = tl.minimum(bits >> 23, 254)
    elif RULE == "ocp_floor":
        byte = tl.maximum((bits >> 23) - 2, 0)
    elif RULE == "ocp_even":
        byte = tl.maximum(((bits + 0x200000) >> 23) - 2, 0)
    else:
        byte = tl.where(bits <= 0x400000, 0, tl.minimum((bits + 0x7FFFFF) >> 23, 254))
        if RULE == "mx_finer":
            finer = (amax < 0.87 * decode_e8m0(byte)) & (byte > 1)
            byte = tl.where(finer, byte - 1, byte)
    return byte


@triton.jit
def _byte_tile(sr_ptr, row, col, FEATURES):
    """Random bytes (int32) of the elements at (row, col); sr: int64 [4] seed, step, producer, offset."""
    seed = tl.load(sr_ptr)
    place = tl.load(sr_ptr + 3) + row.to(tl.int64) * FEATURES + col
    zero = tl.zeros_like(place).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        (place >> 4).to(tl.uint32),
        (place >> 36).to(tl.uint32),
        zero + tl.load(sr_ptr + 1).to(tl.uint32),
        zero + tl.load(sr_ptr + 2).to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    byte = (place & 15).to(tl.int32)
    word = tl.where(byte < 8, tl.where(byte < 4, w0, w1), tl.where(byte < 12, w2, w3))
    return ((word >> (8 * (byte & 3)).to(tl.uint32)) & 0xFF).to(tl.int32)


@triton.jit
def _codes_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    amax_ptr,
    outer_ptr,
    sr_ptr,
    R,
    C,
    ROW_STRIDE,
    COL_STRIDE,
    CHUNK_ROW_STRIDE,
    CHUNK_COL_STRIDE,
    RULE: tl.constexpr,
    IS_MX: tl.constexpr,
    OCP: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    SR: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Codes and scales of 32 x 128 values of the view [R, C], contraction along C.

    ``x_ptr``: int16 BF16 bits, at row x ROW_STRIDE + col x COL_STRIDE. TRANSPOSED: places of random bytes are
    those of (col, row) in the untransposed tensor. Chunk maxima likewise by their own strides.
    """
    r0 = tl.program_id(1) * 32
    c0 = tl.program_id(0) * 128
    row = r0 + tl.arange(0, 32)[:, None]
    col = c0 + tl.arange(0, 128)[None, :]
    real = (row < R) & (col < C)
    where = row.to(tl.int64) * ROW_STRIDE + col.to(tl.int64) * COL_STRIDE
    bits = tl.load(x_ptr + where, mask=real, other=0).to(tl.int32) << 16
    blocks = tl.reshape(bits & 0x7FFFFFFF, [32 // BR, BR, 128 // BC, BC])
    top = tl.max(tl.max(blocks, 3, keep_dims=True), 1, keep_dims=True)
    amax_b = finite_or_nan(top.to(tl.float32, bitcast=True))
    x = tl.reshape(bits, [32 // BR, BR, 128 // BC, BC]).to(tl.float32, bitcast=True)
    if IS_MX:
        nan = amax_b != amax_b
        byte = mx_byte(tl.where(nan, 0.0, amax_b), RULE)
        inverse = decode_e8m0(254 - byte)
        if OCP:
            y = x * inverse
        else:
            y = (x * (inverse * 1.5)) * 4.0
        byte = tl.where(nan, 255, byte)
    else:
        if RULE == "nv_cta":
            chunk = (r0 // 128) * CHUNK_ROW_STRIDE + (c0 // 128) * CHUNK_COL_STRIDE
            amax = tl.load(amax_ptr + chunk)
            outer = tl.load(outer_ptr + (0 if BR > 1 else r0 // 256))
        else:
            amax = tl.load(amax_ptr)
            outer = tl.load(outer_ptr)
        multiplier, value = nv_block(amax_b, amax, outer, RULE, BR > 1)
        nan = multiplier != multiplier
        y = x * multiplier
        if RULE == "ue5m3":
            byte = encode_ue5m3(value)
        else:
            byte = encode_e4m3(value, False)
    y = tl.minimum(tl.maximum(tl.where(nan, 0.0, y), -6.0), 6.0)
    negative = (tl.reshape(bits, y.shape) < 0) & (amax_b > 0.0) & (nan == 0)
    if SR:
        if TRANSPOSED:
            random = _byte_tile(sr_ptr, col, row, R)
        else:
            random = _byte_tile(sr_ptr, row, col, C)
        q = round_e2m1_stochastic(y, tl.reshape(random, y.shape))
    else:
        q = round_e2m1(y)
    code = tl.reshape(code_e2m1(q, negative), [32, 64, 2])
    low, high = tl.split(code)
    packed = (c0 // 2) + tl.arange(0, 64)[None, :]
    half = (C + 1) // 2
    tl.store(
        codes_ptr + row.to(tl.int64) * half + packed,
        (low | (high << 4)).to(tl.uint8),
        mask=(row < R) & (packed < half),
    )
    br = r0 // BR + tl.arange(0, 32 // BR)[:, None]
    bc = c0 // BC + tl.arange(0, 128 // BC)[None, :]
    scales_r = (R + BR - 1) // BR
    scales_c = (C + BC - 1) // BC
    tl.store(
        scale_ptr + br.to(tl.int64) * scales_c + bc,
        tl.reshape(byte, [32 // BR, 128 // BC]).to(tl.uint8),
        mask=(br < scales_r) & (bc < scales_c),
    )


def _rotated(x: Tensor, axis: int, hadamard: str) -> Tensor:
    out = torch.empty_like(x)
    rows, length = x.shape[1 - axis], x.shape[axis]
    grid = (triton.cdiv(length, 32), triton.cdiv(rows, 32))
    _rotate_kernel[grid](
        x.view(torch.int16),
        out.view(torch.int16),
        rows,
        length,
        x.stride(1 - axis),
        x.stride(axis),
        HADAMARD=hadamard,
        BLOCK=32,
    )
    return out


def quantize_codes(
    x: Tensor,
    fmt: Format,
    *,
    axis: int = 1,
    hadamard: str | None = None,
    key: object | None = None,
    held_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and outer scales of one view of a matrix.

    Args:
        x: [rows, columns], floating point; rounded to BF16 first.
        fmt: format descriptor.
        axis: 1 for the row view, 0 for the column view (transposed: blocks along the rows of x).
        hadamard: rotation along ``axis``, or None.
        key: an object with seed, step, producer, offset (``fp4core.SRKey``) for stochastic rounding.
        held_amax: sampled tensor amax (formats with ``sampled_amax``).

    Returns: (codes uint8 [R, ceil(C / 2)], scales uint8 [ceil(R / block rows), ceil(C / block columns)],
        outer FP32 0-dim or [stripes]); R x C is the view, C its contraction.
    """
    x = x.to(torch.bfloat16).contiguous()
    check_matrix(x)
    r, c = x.shape[1 - axis], x.shape[axis]
    grid_r, grid_c = triton.cdiv(r, fmt.block_rows), triton.cdiv(c, fmt.block_cols)
    codes = x.new_empty((r, (c + 1) // 2), dtype=torch.uint8)
    scale = x.new_empty((grid_r, grid_c), dtype=torch.uint8)
    is_mx = fmt.block_scale == "e8m0"
    empty = r == 0 or c == 0
    if hadamard is not None and hadamard != "none" and not empty:
        x = _rotated(x, axis, hadamard)
    chunks = outer_vector = outer = x.new_zeros(1, dtype=torch.float32)
    if is_mx:
        outer = x.new_full((), fmt.outer_constant, dtype=torch.float32)
    elif not empty:
        chunks, outer_vector = _outer(x, fmt, axis, held_amax)
        outer = outer_vector if fmt.outer == "stripe" else outer_vector[0]
    elif fmt.outer == "stripe":
        outer = x.new_zeros(triton.cdiv(r, fmt.stripe_rows), dtype=torch.float32)
    else:
        outer = outer[0]
    if empty:
        return codes, scale.zero_(), outer
    sr = None
    if key is not None:
        words = [torch.as_tensor(v, dtype=torch.int64) for v in _signed(key)]
        sr = torch.stack([w.to(x.device) for w in words])
    by_chunk = (chunks.stride(0), chunks.stride(1)) if chunks.dim() == 2 else (0, 0)
    _codes_kernel[(triton.cdiv(c, 128), triton.cdiv(r, 32))](
        x.view(torch.int16),
        codes,
        scale,
        chunks,
        outer_vector,
        codes if sr is None else sr,
        r,
        c,
        x.stride(1 - axis),
        x.stride(axis),
        by_chunk[1 - axis],
        by_chunk[axis],
        RULE="mx_finer" if fmt.finer_below is not None else fmt.algorithm,
        IS_MX=is_mx,
        OCP=is_mx and fmt.outer_constant == 1.0,
        BR=fmt.block_rows,
        BC=fmt.block_cols,
        SR=sr is not None,
        TRANSPOSED=axis == 0,
    )
    return codes, scale, outer


def _signed(key: object) -> tuple[int | Tensor, ...]:
    seed = key.seed - (1 << 64) if key.seed >= 1 << 63 else key.seed
    return seed, key.step, key.producer, key.offset


def _outer(x: Tensor, fmt: Format, axis: int, held_amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """(amax vector or chunk grid, outer vector) of an NV-style format."""
    wide = x if x.shape[1] % 2 == 0 else torch.nn.functional.pad(x, (0, 1))
    chunks, _ = chunk_amax(wide)
    if fmt.algorithm == "nv_cta":
        kind = "tensor" if fmt.outer == "tensor" else ("row", "col")[1 - axis]
        return chunks, outer_scales(chunks, kind, fmt.outer_divisor)[1]
    if held_amax is not None and fmt.sampled_amax:
        held = held_amax.to(device=x.device, dtype=torch.float32).reshape(1, 1)
        held = torch.where(held < torch.inf, held, torch.nan)
        chunks = torch.where(held == 0, outer_scales(chunks, "tensor", 1.0)[0].reshape(1, 1), held)
    return outer_scales(chunks, "tensor", fmt.outer_divisor)
