"""Casts to and from the four small number types, element by element.

E2M1 (codes 0..7 = 0 .5 1 1.5 2 3 4 6, bit 3 the sign), E4M3 (bytes of ``float8_e4m3fn``), UE5M3
(unsigned, bias 15, largest 61440, smallest 2^-17) and E8M0 (byte 127 + exponent). All inputs and decoded
values are FP32. Rounding is to nearest, ties to even, except ``e2m1_stochastic_``.
"""

from __future__ import annotations

import torch

from fp4core.formats import E2M1_VALUES, E4M3_MAX, UE5M3_MAX

_EXPONENT = 0x7F800000
_ONE = 0x3F800000
E8M0_NAN, E4M3_NAN, UE5M3_NAN = 0xFF, 0x7F, 0xFF


def e2m1_nearest_(y: torch.Tensor) -> torch.Tensor:
    """Round FP32 ``y`` in place to E2M1 values: nearest, ties to the even code, saturating at 6.

    The grid step at |y| in [2^e, 2^(e+1)) is 2^(e-1), e >= 0. Adding M = 1.5 x 2^(e+22), whose unit in
    the last place is that step, lets the FP32 adder round; subtracting M again is exact. The zero of a
    negative underflow keeps its sign. NaN is the caller's business (the quantiser maps it to 0 under a
    NaN scale).

    Returns:
        ``y``, now with values in {0, .5, 1, 1.5, 2, 3, 4, 6} and signs.
    """
    y.clamp_(-6.0, 6.0)
    magic = (y.view(torch.int32) & _EXPONENT).clamp_min_(_ONE).add_((22 << 23) | 0x400000).view(torch.float32)
    q = y + magic
    q -= magic
    return torch.copysign(q, y, out=y)


def e2m1_stochastic_(y: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round FP32 ``y`` in place to E2M1 values with one random byte r per element.

    With delta the position between the two neighbours in magnitude, 0 <= delta < 1, round up when
    delta + (2r + 1) / 512 >= 1 (gfloat's ``StochasticFast``); saturates at 6. The thresholds are
    multiples of 2^-10 or coarser, so |y| is first floored to 2^-10, which is exact for the decision;
    below 1 the grid is that of [1, 2) shifted, so 1 is added (exactly) and taken off again; then
    (2r + 1) x 2^13 added to the FP32 bits carries into the kept mantissa bit exactly when rounding up.

    Args:
        y: FP32, no NaN.
        random: uint8, of y's shape.
    """
    a = y.abs().clamp_(max=6.0).mul_(1024.0).floor_().mul_(1 / 1024)
    below_one = a.clamp(max=1.0).floor_().neg_().add_(1.0)
    a += below_one
    bits = a.view(torch.int32)
    bits += random.to(torch.int32).mul_(1 << 14).add_(1 << 13)
    bits &= -(1 << 22)
    a -= below_one
    return torch.copysign(a, y, out=y)


def e2m1_codes(q: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (uint8) of FP32 tensor ``q`` of E2M1 values."""
    bits = q.view(torch.int32)
    top = (bits & 0x7FFFFFFF) >> 22  # exponent and first mantissa bit: 252 is 0.5, 254 is 1, 259 is 6
    code = (top - 252).clamp_min(0) + (top == 252)
    return (code | ((bits >> 28) & 8)).to(torch.uint8)


def e2m1_decode(codes: torch.Tensor) -> torch.Tensor:
    """FP32 values of codes 0..15."""
    values = [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def e4m3_round(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(byte uint8, value FP32) of the E4M3 nearest to non-negative FP32 ``value``; saturates at 448."""
    small = value.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    byte = small.view(torch.uint8)
    return byte.masked_fill(value.isnan(), E4M3_NAN), small.float()


def e4m3_decode(byte: torch.Tensor) -> torch.Tensor:
    """FP32 values of E4M3 bytes."""
    return byte.contiguous().view(torch.float8_e4m3fn).float()


def ue5m3_round(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(byte uint8, value FP32) of the UE5M3 nearest to non-negative FP32 ``value``; saturates at 61440.

    The same adder trick as ``e2m1_nearest_``, with exponents from -14 and a step of 2^(e-3).
    """
    nan = value.isnan()
    v = value.nan_to_num(0.0, posinf=UE5M3_MAX).clamp_(max=UE5M3_MAX)
    exponent = (v.view(torch.int32) & _EXPONENT).clamp_min_((127 - 14) << 23)
    magic = (exponent + ((20 << 23) | 0x400000)).view(torch.float32)
    v = (v + magic) - magic
    normal = (v.view(torch.int32) >> 20) - ((127 - 15) << 3)
    subnormal = (v * 2.0**17).to(torch.int32)
    byte = torch.where(v < 2.0**-14, subnormal, normal).to(torch.uint8)
    return byte.masked_fill(nan, UE5M3_NAN), v.masked_fill(nan, float("nan"))


def ue5m3_decode(byte: torch.Tensor) -> torch.Tensor:
    """FP32 values of UE5M3 bytes; bytes from 0xF8 up decode to NaN (no infinity is ever stored)."""
    b = byte.to(torch.int32)
    normal = ((b + ((127 - 15) << 3)) << 20).view(torch.float32)
    value = torch.where(b < 8, b.float() * 2.0**-17, normal)
    return value.masked_fill(b >= 0xF8, float("nan"))


def e8m0_decode(byte: torch.Tensor) -> torch.Tensor:
    """FP32 powers of two of E8M0 bytes: 2^(byte - 127), byte 255 is NaN."""
    b = byte.to(torch.int32)
    bits = (b << 23).masked_fill(b == 0, 0x400000).masked_fill(b == E8M0_NAN, 0x7FC00000)
    return bits.view(torch.float32)


DECODE = {"e8m0": e8m0_decode, "e4m3": e4m3_decode, "ue5m3": ue5m3_decode}
