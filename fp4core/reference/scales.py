"""Block scales: from block maxima to stored bytes, encode multipliers and outer scales.

One function per family, each a transcription of the ``rule`` of its format descriptor: FP32 throughout,
one rounding per operation, in the written order. Grids are [block rows, block columns].

Non-finite input. A NaN or infinity anywhere under an amax makes that amax NaN. From there it spreads by
itself: the block scale becomes the NaN byte, the outer scale of a tensor or stripe NaN, the multiplier NaN.
All-zero blocks get byte 0 (UE5M3: its 1.0) whatever the rule would say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fp4core.formats import E4M3_MAX, Format
from fp4core.reference import casts

FLT_MAX = torch.finfo(torch.float32).max


def _div(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """Correctly rounded FP32 quotient.

    Between a tensor and a Python number torch multiplies by a reciprocal in some cases (``1 / x`` by
    ``__rtruediv__``, ``x / c`` on CUDA), which rounds twice; between two tensors it divides.
    """
    like = a if isinstance(a, torch.Tensor) else b
    a, b = (v if isinstance(v, torch.Tensor) else like.new_full((), v) for v in (a, b))
    return torch.div(a, b)


@dataclass(frozen=True)
class Scales:
    """What a quantiser needs to know about its blocks.

    Attributes:
        byte: uint8 grid of stored block scales.
        value: FP32 grid, what the bytes decode to.
        multiplier: FP32 grid; E2M1 rounds x * multiplier * post.
        post: 4 for the MX formats whose codes are 6x / s, else 1. Kept apart from the multiplier, which
            could overflow (6 / s with s = 2^-127).
        outer: FP32, 0-dim, or [stripes].
    """

    byte: torch.Tensor
    value: torch.Tensor
    multiplier: torch.Tensor
    post: float
    outer: torch.Tensor


def compute(amax_b: torch.Tensor, fmt: Format, axis: int, held_amax: torch.Tensor | None = None) -> Scales:
    """Scales of a grid of block maxima.

    Args:
        amax_b: FP32 [block rows, block columns], largest magnitude per block, non-finite as it comes.
        fmt: the format.
        axis: which axis of the grid runs along the contraction (stripes run along the other).
        held_amax: replaces the tensor amax in formats that sample it.
    """
    amax_b = amax_b.masked_fill(~(amax_b < math.inf), math.nan)
    if fmt.block_scale == "e8m0":
        return _mx(amax_b, fmt)
    if fmt.algorithm == "nv_cta":
        return _nv_cta(amax_b, fmt, axis)
    amax = amax_b.amax() if amax_b.numel() else amax_b.new_zeros(())
    if fmt.algorithm == "nv_te":
        return _nv_te(amax_b, amax, fmt)
    if fmt.algorithm == "nv_global":
        return _nv_global(amax_b, amax, fmt)
    if held_amax is not None:
        held = held_amax.to(amax_b).masked_fill(~(held_amax.to(amax_b) < math.inf), math.nan)
        amax = torch.where(held == 0, amax, held)  # nothing was seen when it was sampled
    return _ue5m3(amax_b, amax, fmt)


def _mx_byte(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """int32 E8M0 bytes, before the NaN encoding."""
    # biased exponents straight from the bits: floor is a shift, ceil a shift after adding all mantissa bits
    if fmt.algorithm == "ocp_rceil":
        amax = _div(amax, 6.0)
    bits = amax.view(torch.int32)
    if fmt.algorithm in ("mx_ceil", "ocp_rceil"):
        # subnormals: 2^-127 (bits 0x400000) and below clamp to byte 0
        return ((bits + 0x7FFFFF) >> 23).masked_fill(bits <= 0x400000, 0).clamp_max(254)
    if fmt.algorithm == "mx_floor":
        return (bits >> 23).clamp_max(254)
    if fmt.algorithm == "ocp_even":
        bits = bits + 0x200000
    return ((bits >> 23) - 2).clamp(0, 254)


def _mx(amax: torch.Tensor, fmt: Format) -> Scales:
    nan = amax.isnan()
    byte = _mx_byte(amax.nan_to_num(0.0), fmt)
    if fmt.finer_below is not None:
        scale = casts.e8m0_decode(byte)
        finer = (amax < torch.tensor(fmt.finer_below, dtype=torch.float32, device=amax.device) * scale) & (
            byte > 1
        )
        byte = byte - finer.to(torch.int32)
    inverse = casts.e8m0_decode(254 - byte)  # 1 / s, exact; s = 2^127 gives the subnormal 2^-127
    sixfold = fmt.outer_constant != 1.0
    byte = byte.masked_fill(nan, casts.E8M0_NAN)
    return Scales(
        byte=byte.to(torch.uint8),
        value=casts.e8m0_decode(byte),
        multiplier=(inverse * 1.5 if sixfold else inverse).masked_fill(nan, math.nan),
        post=4.0 if sixfold else 1.0,
        outer=torch.tensor(fmt.outer_constant, dtype=torch.float32, device=amax.device),
    )


def _nv_te(amax_b: torch.Tensor, amax: torch.Tensor, fmt: Format) -> Scales:
    sixth = torch.tensor(1 / 6, dtype=torch.float32, device=amax.device)
    enc = _div(fmt.outer_divisor, amax).clamp(max=FLT_MAX)
    byte, value = casts.e4m3_round((amax_b * (enc * sixth)).clamp(max=FLT_MAX))
    # an underflowed (zero) scale gives FLT_MAX: codes saturate under a scale of zero, as in the source
    multiplier = _div(1.0, value * _div(1.0, enc)).clamp(max=FLT_MAX)
    return Scales(byte, value, multiplier, 1.0, _div(amax, fmt.outer_divisor))


def _encode_scale(amax_b: torch.Tensor, enc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """M = E4M3(6 / (amax_b S)) and the multiplier M S; M saturates at 448, which covers amax_b = 0."""
    _, m = casts.e4m3_round(_div(6.0, amax_b * enc))
    return m, (m * enc).clamp(max=FLT_MAX)


def _nv_global(amax_b: torch.Tensor, amax: torch.Tensor, fmt: Format) -> Scales:
    enc = _div(fmt.outer_divisor, amax).clamp(max=FLT_MAX)
    m, multiplier = _encode_scale(amax_b, enc)
    s = _div(1.0, m).masked_fill(amax_b == 0, 0.0).where(amax == amax, amax)
    byte, value = casts.e4m3_round(s)
    return Scales(byte, value, multiplier, 1.0, _div(amax, fmt.outer_divisor))


def _chunk_amax(amax_b: torch.Tensor, ratio: tuple[int, int]) -> torch.Tensor:
    """Maximum over chunks of ratio[0] x ratio[1] blocks, repeated onto the block grid."""
    rows, cols = amax_b.shape
    if amax_b.numel() == 0:
        return amax_b
    padded = F.pad(amax_b, (0, -cols % ratio[1], 0, -rows % ratio[0]))
    chunks = padded.view(padded.shape[0] // ratio[0], ratio[0], padded.shape[1] // ratio[1], ratio[1])
    chunks = chunks.amax(3).amax(1)
    return chunks.repeat_interleave(ratio[0], 0)[:rows].repeat_interleave(ratio[1], 1)[:, :cols]


def _nv_cta(amax_b: torch.Tensor, fmt: Format, axis: int) -> Scales:
    ratio = (fmt.chunk[0] // fmt.block_rows, fmt.chunk[1] // fmt.block_cols)
    amax_c = _chunk_amax(amax_b, ratio if axis == 1 else ratio[::-1])
    enc = _div(E4M3_MAX, amax_c).clamp(max=FLT_MAX)
    g = _div(amax_c, E4M3_MAX)
    m, multiplier = _encode_scale(amax_b, enc)
    _, s0 = casts.e4m3_round(_div(1.0, m))
    if fmt.outer == "tensor":
        outer = g.amax() if g.numel() else g.new_zeros(())
        outer_grid = outer
    else:
        per_row = g.amax(axis) if g.shape[axis] else g.new_zeros(g.shape[1 - axis])
        blocks = fmt.stripe_rows // fmt.block_rows
        padded = F.pad(per_row, (0, -per_row.numel() % blocks))
        outer = padded.view(-1, blocks).amax(1) if padded.numel() else padded
        outer_grid = outer.repeat_interleave(blocks)[: per_row.numel()].unsqueeze(axis)
    s = _div(s0 * g, outer_grid)
    if fmt.two_d:
        s = torch.where(s > 0, s.clamp(min=2.0**-9), s)
    s = s.masked_fill(amax_b == 0, 0.0).where(outer_grid == outer_grid, outer_grid)
    byte, value = casts.e4m3_round(s)
    return Scales(byte, value, multiplier, 1.0, outer)


def _ue5m3(amax_b: torch.Tensor, amax: torch.Tensor, fmt: Format) -> Scales:
    # 448 amax_b is exact in FP32 but may overflow; 0.875 amax_b cannot, and 512 is a power of two
    ratio = _div(amax_b * 0.875, amax) * 512.0
    byte, value = casts.ue5m3_round(ratio.masked_fill(amax_b == 0, 0.0).where(amax == amax, amax))
    byte, value = byte.masked_fill(value == 0, 120), value.masked_fill(value == 0, 1.0)
    outer = _div(amax, fmt.outer_divisor)
    multiplier = _div(1.0, value * outer).clamp(max=FLT_MAX)
    return Scales(byte, value, multiplier, 1.0, outer)
