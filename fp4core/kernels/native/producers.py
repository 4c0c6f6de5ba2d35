"""Native producers: both views of a BF16 matrix as packed codes and swizzled block scales, from one read of
memory.

One program makes a tile of 128 tokens x 128 features. That tile is the unit of everything around it: 128
rows are the rows of a scale atom (``layout``), so each view fills code rows and whole atoms without
touching a neighbour's; and it is the chunk of CTA-local NVFP4. A view is made in four strips of 32 of its
rows x 128 along its contraction, which keeps a thread at 32 values; the second view finds the tile in the
L1 cache. Strips of the column view are transposed as 16-bit values through shared memory, after rotation.
Scales that need a larger domain (tensor, stripe) come from ``scaling``, a pass before.

Codes have rows of ceil(K / 32) * 16 bytes (TMA wants multiples of 16), zero beyond K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4core import formats
from fp4core.kernels._amax import chunk_amax
from fp4core.kernels._dual import nv_domain
from fp4core.kernels._launch import check_matrix, packed_instructions, round_up
from fp4core.kernels.native.encode import encode_tile, random_tile, rotate_rows
from fp4core.kernels.native.layout import ATOM, atoms
from fp4core.kernels.producers import Scaling, View, rule, scaling

TILE = 128
WARPS = 4


@dataclass(frozen=True)
class Packed:
    """One view in FP4, as the native GEMM reads it.

    Attributes:
        codes: uint8 [R, ceil(K / 32) * 16], even index in the low nibble.
        scales: uint8 [ceil(R / 128), ceil(ceil(K / B) / 4), 512], swizzled (``layout``); 2D scales repeated
            per row.
        outer: FP32 [1], or one per 256 rows.
        format: format name.
        shape: (R, K) without padding.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor
    format: str
    shape: tuple[int, int]


@dataclass(frozen=True)
class Stream:
    """Random bytes of a stochastic view: int64 [3] on the device (seed, step, place of the first element),
    producer.

    ``aligned``: that place is a multiple of 16, which saves fifteen of sixteen Philox calls where K is one
    too.
    """

    words: Tensor
    producer: int
    aligned: bool = True


@triton.jit(do_not_specialize=["row_producer", "col_producer"])
def native_kernel(
    x_ptr,
    row_codes,
    row_scales,
    row_amax,
    row_outer,
    col_codes,
    col_scales,
    col_amax,
    col_outer,
    row_sr,
    col_sr,
    row_producer,
    col_producer,
    M,
    K,
    X_STRIDE,
    ROW_BYTES,
    COL_BYTES,
    ROW_ATOMS,
    COL_ATOMS,
    ROW: tl.constexpr,
    ROW_BR: tl.constexpr,
    ROW_B: tl.constexpr,
    ROW_SR: tl.constexpr,
    COL: tl.constexpr,
    COL_BR: tl.constexpr,
    COL_B: tl.constexpr,
    COL_SR: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROW_ALIGNED: tl.constexpr,
    COL_ALIGNED: tl.constexpr,
    ASM: tl.constexpr,
    PTX: tl.constexpr,
):
    """Row and column view of x [M, K]; ``x_ptr`` int16, ROW and COL scale rules or "none"."""
    CHUNKS = (K + 127) // 128
    pid = tl.program_id(0)
    pm = pid // CHUNKS
    pk = pid % CHUNKS
    row = pm * 128
    col = pk * 128
    chunk = pm * CHUNKS + pk
    base = x_ptr + row.to(tl.int64) * X_STRIDE + col
    rows = M - row
    cols = K - col
    if ROW != "none":
        amax, outer = nv_domain(row_amax, row_outer, ROW, chunk, 0 if ROW_BR > 1 else row // 256)
        r = tl.arange(0, 32)[:, None]
        c = tl.arange(0, 128)[None, :]
        for strip in tl.range(4):
            t = strip * 32 + r
            bits = tl.load(base + t * X_STRIDE + c, mask=(t < rows) & (c < cols), other=0).to(tl.int32) << 16
            random = bits
            if ROW_SR:
                random = random_tile(row_sr, row_producer, row + strip * 32, col, K, 32, 128, ROW_ALIGNED)
            codes, scales = encode_tile(bits, random, amax, outer, ROW, ROW_BR, ROW_B, ROW_SR, ASM, PTX)
            _store(row_codes, row_scales, codes, scales, pm, pk, strip, M, ROW_BYTES, ROW_ATOMS)
    if COL != "none":
        amax, outer = nv_domain(col_amax, col_outer, COL, chunk, 0 if COL_BR > 1 else col // 256)
        t = tl.arange(0, 128)[:, None]
        for strip in tl.range(4):
            f = strip * 32 + tl.arange(0, 32)[None, :]
            bits = tl.load(base + t * X_STRIDE + f, mask=(t < rows) & (f < cols), other=0).to(tl.int32) << 16
            if HADAMARD != "none":
                bits = rotate_rows(bits, rows, HADAMARD)
            turned = tl.trans((bits >> 16).to(tl.int16)).to(tl.int32) << 16
            random = turned
            if COL_SR:
                drawn = random_tile(col_sr, col_producer, row, col + strip * 32, K, 128, 32, COL_ALIGNED)
                random = tl.trans(drawn.to(tl.uint8)).to(tl.int32)
            codes, scales = encode_tile(turned, random, amax, outer, COL, COL_BR, COL_B, COL_SR, ASM, PTX)
            _store(col_codes, col_scales, codes, scales, pk, pm, strip, K, COL_BYTES, COL_ATOMS)


@triton.jit
def _store(codes_ptr, scales_ptr, codes, scales, tile_row, tile_col, strip, ROWS, BYTES, ATOMS):
    """Strip ``strip`` of tile (tile_row, tile_col) of a view: codes [32, 64] and scales [32, 4 A].

    In an atom the strip's rows are 16 bytes apart, four scales of a row side by side (``layout``).
    """
    r = tl.arange(0, 32)[:, None]
    b = tile_col * 64 + tl.arange(0, 64)[None, :]
    row = tile_row * 128 + strip * 32 + r
    tl.store(codes_ptr + row.to(tl.int64) * BYTES + b, codes, mask=(row < ROWS) & (b < BYTES))
    A: tl.constexpr = scales.shape[1] // 4
    atom = tile_col * A + tl.arange(0, A)[None, :, None]
    place = atom * 512 + tl.arange(0, 32)[:, None, None] * 16 + tl.arange(0, 4)[None, None, :]
    first = scales_ptr + tile_row.to(tl.int64) * ATOMS * 512 + strip * 4
    tl.store(first + place, tl.reshape(scales, [32, A, 4]), mask=(atom < ATOMS) & (place >= 0))


def check_view(view: View, what: str) -> None:
    """Raise ValueError for a view that FP4 Tensor Cores cannot multiply."""
    fmt = formats.get(view.format)
    if fmt.block_scale not in ("e8m0", "e4m3"):
        raise ValueError(
            f"native: got {view.format} for {what}; tcgen05.mma scales blocks by E8M0 or E4M3 only, so "
            f"{fmt.block_scale} formats need backend='carrier' or 'reference'"
        )


def produce(
    x: Tensor,
    row: View | None = None,
    col: View | None = None,
    *,
    row_stream: Stream | None = None,
    col_stream: Stream | None = None,
) -> tuple[Packed | None, Packed | None]:
    """Both views of a matrix from one load (two where an outer scale needs a maximum first).

    Args:
        x: BF16 [M, K], contiguous.
        row, col: the views wanted (``carrier`` is ignored).
        row_stream, col_stream: random bytes of stochastic views.

    Returns:
        (row view [M, K], column view [K, M]), None for one not asked for.

    Raises:
        ValueError: x is not such a matrix, a format without FP4 Tensor Core support, a rotated row view or
            2D format, a stochastic view without its stream.
    """
    check_matrix(x)
    m, k = x.shape
    for view, where, stream in ((row, "the row view", row_stream), (col, "the column view", col_stream)):
        if view is None:
            continue
        check_view(view, where)
        if view.hadamard != "none" and (where == "the row view" or formats.get(view.format).two_d):
            raise ValueError(
                f"native: got hadamard {view.hadamard!r} for {where} of {view.format}; needed 'none' "
                "(rotations run along the tokens of a column view of a 1D format)"
            )
        if (view.rounding == "stochastic") != (stream is not None):
            raise ValueError(
                f"native: got rounding {view.rounding!r} for {where} {'with' if stream else 'without'} a "
                "stream of random bytes; stochastic views, and only they, need one"
            )
    row_parts = _allocate(x, row, m, k, "row")
    col_parts = _allocate(x, col, k, m, "col")
    if m and k:
        _launch(x, row, col, row_parts, col_parts, row_stream, col_stream)
    return (
        None if row is None else Packed(row_parts[0], row_parts[1], row_parts[3], row.format, (m, k)),
        None if col is None else Packed(col_parts[0], col_parts[1], col_parts[3], col.format, (k, m)),
    )


def _allocate(x: Tensor, view: View | None, rows: int, k: int, where: str) -> tuple[Tensor, ...]:
    """(codes, scales, amax, outer) of a view; empty tensors stand in for an absent one."""
    if view is None:
        empty = x.new_empty(0, dtype=torch.uint8)
        number = x.new_empty(0, dtype=torch.float32)
        return empty, empty, number, number
    fmt = formats.get(view.format)
    p, a = atoms(rows, -(-k // fmt.block_cols))
    codes = x.new_empty((rows, round_up(k, 32) // 2), dtype=torch.uint8)
    scales = x.new_empty((p, a, ATOM), dtype=torch.uint8)
    if fmt.outer == "constant":
        constant = x.new_full((1,), fmt.outer_constant, dtype=torch.float32)
        return codes, scales, constant, constant
    if not x.numel():
        zeros = x.new_zeros(-(-rows // fmt.stripe_rows) if fmt.outer == "stripe" else 1, dtype=torch.float32)
        return codes, scales, zeros, zeros
    found: Scaling = scaling(view, where, _chunks(x, view.hadamard))
    return codes, scales, found.amax, found.outer


def _chunks(x: Tensor, hadamard: str) -> Tensor:
    """Maxima per 128 x 128 chunk of x, or of x rotated along its rows."""
    plain, rotated = chunk_amax(x, hadamard=hadamard, plain=hadamard == "none")
    return plain if hadamard == "none" else rotated


def _launch(x, row, col, row_parts, col_parts, row_stream, col_stream) -> None:
    m, k = x.shape
    bits = x.view(torch.int16)
    kinds = [None if v is None else formats.get(v.format) for v in (row, col)]
    native_kernel[(triton.cdiv(m, TILE) * triton.cdiv(k, TILE),)](
        bits,
        *row_parts,
        *col_parts,
        bits if row_stream is None else row_stream.words,
        bits if col_stream is None else col_stream.words,
        0 if row_stream is None else row_stream.producer,
        0 if col_stream is None else col_stream.producer,
        m,
        k,
        x.stride(0),
        0 if row is None else row_parts[0].stride(0),
        0 if col is None else col_parts[0].stride(0),
        0 if row is None else row_parts[1].shape[1],
        0 if col is None else col_parts[1].shape[1],
        ROW="none" if row is None else rule(row.format),
        ROW_BR=1 if row is None else kinds[0].block_rows,
        ROW_B=16 if row is None else kinds[0].block_cols,
        ROW_SR=row_stream is not None,
        COL="none" if col is None else rule(col.format),
        COL_BR=1 if col is None else kinds[1].block_rows,
        COL_B=16 if col is None else kinds[1].block_cols,
        COL_SR=col_stream is not None,
        HADAMARD="none" if col is None else col.hadamard,
        ROW_ALIGNED=row_stream is not None and row_stream.aligned and k % 16 == 0,
        COL_ALIGNED=col_stream is not None and col_stream.aligned and k % 16 == 0,
        ASM=packed_instructions(x.device),
        PTX=has_fp4_instructions(x.device),
        num_warps=WARPS,
    )


def has_fp4_instructions(device: torch.device) -> bool:
    """Whether the device has the E2M1 conversion and tcgen05 (sm_100, sm_103)."""
    return packed_instructions(device) and torch.cuda.get_device_capability(device) in ((10, 0), (10, 3))
