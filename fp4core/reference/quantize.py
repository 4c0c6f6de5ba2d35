"""The quantiser oracle: plain torch, any device.

Works on a [rows, columns] tensor in place, with the contraction along either axis, so that a transposed
view needs no transposed copy: blocks, chunks, stripes and Hadamard groups follow ``axis``. Inputs are
rounded to BF16 first; everything after is FP32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fp4core.formats import Format
from fp4core.reference import casts
from fp4core.reference.hadamard import rotate
from fp4core.reference.philox import SRKey, random_bytes
from fp4core.reference.pieces import slices
from fp4core.reference.scales import Scales, compute


@dataclass(frozen=True)
class Quantised:
    """Rounded values and scales of one view, still in the layout of the input.

    Attributes:
        values: FP32 [rows, columns] of E2M1 values.
        scales: of the block grid.
        fmt, axis: format and contraction axis.
    """

    values: torch.Tensor
    scales: Scales
    fmt: Format
    axis: int

    def dequantize_(self) -> torch.Tensor:
        """FP32 [rows, columns] of decoded values; overwrites ``values``."""
        return decode_(self.values, self.scales.value, self.scales.outer, self.fmt, self.axis)


def block_shape(fmt: Format, axis: int) -> tuple[int, int]:
    """(rows, columns) of a block of a [rows, columns] tensor contracted along ``axis``."""
    return fmt.block if axis == 1 else fmt.block[::-1]


def _tiles(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """x [R, C], zero-padded to whole blocks, as a view [GR, block rows, GC, block columns]."""
    pad_rows, pad_cols = -x.shape[0] % block[0], -x.shape[1] % block[1]
    if pad_rows or pad_cols:
        x = F.pad(x, (0, pad_cols, 0, pad_rows))
    return x.reshape(x.shape[0] // block[0], block[0], x.shape[1] // block[1], block[1])


def _block_amax(tiles: torch.Tensor) -> torch.Tensor:
    """Largest magnitude per block, [GR, GC]; NaN where a NaN is."""
    grid = tiles.new_empty(tiles.shape[0], tiles.shape[2])
    for s in slices(tiles):
        amax = tiles[s].abs()
        for dim in (1, 3):
            if amax.shape[dim] > 1:
                amax = amax.amax(dim, keepdim=True)
        grid[s] = amax[:, 0, :, 0]
    return grid


def _expand(grid: torch.Tensor) -> torch.Tensor:
    return grid[:, None, :, None]


def _outer_per_row(outer: torch.Tensor, fmt: Format, rows: int, axis: int) -> torch.Tensor:
    """Outer scale in a shape that broadcasts against [rows, columns]."""
    if fmt.outer != "stripe":
        return outer
    return outer.repeat_interleave(fmt.stripe_rows)[:rows].unsqueeze(axis)


def round_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """FP32 copy of x with its values rounded to BF16 (FP64 input goes through FP32)."""
    return x.to(torch.bfloat16).to(torch.float32)


def quantize_2d(
    x: torch.Tensor,
    fmt: Format,
    *,
    axis: int = 1,
    hadamard: str | None = None,
    key: SRKey | None = None,
    held_amax: torch.Tensor | None = None,
) -> Quantised:
    """Quantise a matrix with its contraction along ``axis``.

    Args:
        x: [rows, columns], floating point.
        fmt: format descriptor.
        axis: 1 for the row view (blocks along columns), 0 for the column view.
        hadamard: rotation along ``axis`` before quantising, or None.
        key: stochastic rounding with these bytes; None rounds to nearest even. Places are those of x as
            given, whatever the axis.
        held_amax: sampled tensor amax (formats with ``sampled_amax``).
    """
    rows, cols = x.shape
    block = block_shape(fmt, axis)
    tiles = _tiles(rotate(round_to_bf16(x), hadamard, axis), block)
    amax_b = _block_amax(tiles)
    scales = compute(amax_b, fmt, axis, held_amax)
    # x * multiplier + bias. The bias is +0 in all-zero blocks, so that a -0 there gives code 0, and -0
    # elsewhere, which changes nothing: a -0 or a negative underflow in a live block gives code 8.
    bias = torch.full_like(amax_b, -0.0).masked_fill_(amax_b == 0, 0.0)
    random = None if key is None else _tiles(random_bytes(rows, cols, key, x.device), block)
    for s in slices(tiles):
        y = tiles[s].mul_(_expand(scales.multiplier[s])).add_(_expand(bias[s]))
        if scales.post != 1.0:
            y *= scales.post
        y.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)  # under a NaN scale the code is 0
        if random is None:
            casts.e2m1_nearest_(y)
        else:
            casts.e2m1_stochastic_(y, random[s])
    q = tiles.view(tiles.shape[0] * block[0], tiles.shape[2] * block[1])[:rows, :cols]
    return Quantised(q, scales, fmt, axis)


def decode_blocks_(values: torch.Tensor, grid: torch.Tensor, fmt: Format, axis: int) -> torch.Tensor:
    """values x grid, the grid repeated over blocks; overwrites and returns ``values`` [rows, columns]."""
    rows, cols = values.shape
    br, bc = block_shape(fmt, axis)
    if rows % br == 0 and cols % bc == 0 and values.is_contiguous():
        values.view(rows // br, br, cols // bc, bc).mul_(_expand(grid))
        return values
    full = grid.repeat_interleave(br, 0)[:rows].repeat_interleave(bc, 1)[:, :cols]
    return values.mul_(full)


def decode_(
    values: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor, fmt: Format, axis: int
) -> torch.Tensor:
    """E2M1 value x block scale x outer scale in FP32; overwrites ``values`` [rows, columns].

    E4M3 and UE5M3: (value x block scale) is exact, then one rounding with the outer scale. E8M0: the
    constant goes into the power of two first, which is exact for bytes above 2, and keeps the product
    finite where 6 x 2^127 would not be; again one rounding.
    """
    if fmt.outer == "constant":
        return decode_blocks_(values, scale * outer, fmt, axis)
    decode_blocks_(values, scale, fmt, axis)
    return values.mul_(_outer_per_row(outer, fmt, values.shape[1 - axis], axis))


def fake_quant_2d(x: torch.Tensor, fmt: Format, **options: object) -> torch.Tensor:
    """Quantise and decode: FP32 [rows, columns] in the layout of ``x``; options of ``quantize_2d``."""
    return quantize_2d(x, fmt, **options).dequantize_()


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., K] to bytes [..., ceil(K / 2)], even index in the low nibble, pad nibble 0."""
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor, length: int) -> torch.Tensor:
    """Inverse of ``pack``: uint8 codes 0..15 [..., length]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :length]
