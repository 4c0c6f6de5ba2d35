"""MXFP8 for the output-head screen: E4M3 elements, one E8M0 scale per 32 values of the contraction axis.

Scale 2^ceil(log2(amax / 448)) (the rule of cuBLAS and Transformer Engine), so nothing saturates; elements
are RNE(x / scale). Inputs are rounded to BF16 first. A block with a NaN or inf has scale byte 0xFF and
decodes to NaN; an all-zero block has byte 0 and decodes to 0. Plain torch on any device, and E4M3 x 2^k is
exact in BF16, so a BF16 GEMM computes with exactly these values: a screen of numerics, not of speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
_E4M3_MAX = 448.0


def mxfp8_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(elements float8_e4m3fn [R, K], scale bytes uint8 [R, ceil(K / 32)]) of x [R, K]."""
    blocks, width = _blocks(x)
    amax = blocks.abs().amax(dim=-1)
    finite = torch.isfinite(amax)
    mantissa, exponent = torch.frexp(torch.where(finite, amax, 0.0) / _E4M3_MAX)
    # amax is a BF16 number and neighbours differ by 2^-8, so the FP32 quotient never crosses a power of two
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=-127)
    exponent = torch.where(amax == 0, -127, exponent)
    inverse = _power_of_two(-exponent)[..., None]
    elements = torch.where(finite[..., None], blocks * inverse, torch.nan).to(torch.float8_e4m3fn)
    scale = torch.where(finite, exponent + 127, 255).to(torch.uint8)
    return elements.flatten(1)[:, :width], scale


def mxfp8_dequantize(elements: Tensor, scale: Tensor) -> Tensor:
    """FP32 [R, K] values; every one is exact in BF16."""
    power = torch.where(scale == 255, torch.nan, _power_of_two(scale.to(torch.int32) - 127))
    factors = power.repeat_interleave(BLOCK, dim=1)[:, : elements.shape[1]]
    return elements.float() * factors


def mxfp8_round(x: Tensor) -> Tensor:
    """x [R, K] through MXFP8 and back, FP32; blocks of 32 along K."""
    return mxfp8_dequantize(*mxfp8_quantize(x))


def _blocks(x: Tensor) -> tuple[Tensor, int]:
    """FP32 [R, K / 32, 32] of BF16-rounded values, zeros behind the last, and K."""
    width = x.shape[-1]
    values = x.to(torch.bfloat16).float()
    padding = -width % BLOCK
    if padding:
        values = torch.nn.functional.pad(values, (0, padding))
    return values.unflatten(-1, (-1, BLOCK)), width


def _power_of_two(exponent: Tensor) -> Tensor:
    """FP32 2^exponent from its bits, exact on every device, for -127 <= exponent <= 127."""
    bits = torch.where(exponent == -127, 1 << 22, (exponent.to(torch.int32) + 127) << 23)
    return bits.to(torch.int32).view(torch.float32)
