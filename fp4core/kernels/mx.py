"""MXFP4 on words: scale rules, rounding in packed BF16, and exact FP8 or BF16 carriers.

value = E2M1(6x / s) x s x 1/6 (or E2M1(x / s) x s for the OCP rules), s = 2^k per block.

A carrier holds E2M1 x 2^(k - ref) and the GEMM multiplies by 2^ref. All arithmetic happens in BF16 shifted by
SHIFT so that the result's BF16 exponent *is* the carrier's exponent field:

    carrier   SHIFT   k - ref held exactly    bits of the byte in the shifted BF16
    e5m2      -112    -15 .. 13               sign, 12..5
    e4m3      -120    -8 .. 6                 sign, 11..4
    bf16         0    any, |k| <= 100         all 16

so that packing is a shift and a sign, subnormals included. A block outside the range is a *misfit*: it is
counted, never rounded; the caller falls back to a wider carrier.

Scale rules need only integer arithmetic on the BF16 bits of the block maximum, because a power of two is
a BF16 with an empty mantissa: s = (bits + ADD) & 0x7F80, with ADD the rounding rule.

    rule        ADD    s shifted by   meaning
    mx_ceil     127    0              2^ceil(log2 amax)
    mx_finer     33    0              mx_ceil, halved when amax < 0.87 s (mantissa <= 94/128)
    mx_floor      0    0              2^floor(log2 amax)
    ocp_floor     0    -2             2^(floor(log2 amax) - 2)
    ocp_rceil    63    -2             2^ceil(log2(amax / 6))
    ocp_even     32    -2             amax rounded half up to one mantissa bit, then floor
"""

# ruff: noqa: RET505  Triton compiles what follows a constexpr branch unless it is in its else
from __future__ import annotations

import triton
import triton.language as tl

from fp4core.kernels.device import (
    duplicate,
    high_f32,
    low_f32,
    magnitudes,
    min2,
    pack_exact,
)


@triton.constexpr_function
def rule_add(name):
    """ADD of a scale rule."""
    return {"mx_ceil": 127, "mx_finer": 33, "ocp_rceil": 63, "ocp_even": 32}.get(name, 0)


@triton.constexpr_function
def is_ocp(name):
    """True for the rules whose codes are x / s rather than 6x / s."""
    return name.startswith("ocp_")


@triton.constexpr_function
def can_exceed(name):
    """True for rules under which x / s (6x / s) can exceed 6 and saturates."""
    return name not in ("mx_ceil", "ocp_rceil")


@triton.constexpr_function
def carrier_shift(carrier):
    """SHIFT of a carrier."""
    return {"e5m2": -112, "e4m3": -120, "bf16": 0}[carrier]


# (smallest, largest) k - ref that a carrier holds exactly, and (smallest, largest) reference exponent
SPANS = {"e5m2": (-15, 13, -100, 22), "e4m3": (-8, 6, -100, 14), "bf16": (-100, 100, -16, 16)}


@triton.constexpr_function
def carrier_range(carrier):
    """``SPANS`` for kernels."""
    return SPANS[carrier]


@triton.jit
def _bf16_scaled(factor: tl.constexpr, exponent):
    """BF16 bits, in both halves, of factor x 2^exponent; exact down to the subnormals of two-bit factors."""
    half = exponent >> 1
    a = ((half + 127) << 23).to(tl.float32, bitcast=True)
    b = ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)
    bits = (a * factor * b).to(tl.int32, bitcast=True)
    return duplicate(bits >> 16)


@triton.jit
def mx_constants(ref, CARRIER: tl.constexpr, RULE: tl.constexpr):
    """Packed constants (c, c64, ct) of a reference exponent (int32 scalar or tensor).

    c multiplies x, c64 = 64 c, and ct turns the power of two s into the smallest 64 x step's exponent.
    """
    exponent = carrier_shift(CARRIER) - ref
    if is_ocp(RULE):
        return (
            _bf16_scaled(1.0, exponent),
            _bf16_scaled(1.0, exponent + 6),
            _bf16_scaled(1.0, exponent + 4),
        )
    else:
        return _bf16_scaled(6.0, exponent), _bf16_scaled(6.0, exponent + 6), _bf16_scaled(1.0, exponent + 6)


@triton.jit
def mx_bounds(ref, CARRIER: tl.constexpr, RULE: tl.constexpr):
    """Smallest and largest BF16 bits of a nonzero block maximum whose block the carrier holds exactly.

    An out-of-range reference gives an empty range, so that every block counts as a misfit.
    """
    SPAN: tl.constexpr = carrier_range(CARRIER)
    BIAS: tl.constexpr = 129 if is_ocp(RULE) else 127
    low = tl.maximum(((ref + (SPAN[0] + BIAS)) << 7) - rule_add(RULE), 0x80)
    high = tl.minimum(((ref + (SPAN[1] + BIAS + 1)) << 7) - 1 - rule_add(RULE), 0x7F7F)
    high = tl.where((ref < SPAN[2]) | (ref > SPAN[3]), -1, high)
    return low, high


@triton.jit
def mul2(a, b, ASM: tl.constexpr):
    """Packed BF16 product; exact in every use here (one factor is a power of two)."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return pack_exact(low_f32(a) * low_f32(b), high_f32(a) * high_f32(b))


@triton.jit
def mx_threshold(amax2, ct, RULE: tl.constexpr, ASM: tl.constexpr):
    """Packed BF16 64 s of packed block maxima (16-bit magnitudes); infinite or NaN maxima give infinity."""
    s = (min2(amax2, 0x7F807F80 + tl.zeros_like(amax2), ASM) + rule_add(RULE) * 0x10001) & 0x7F807F80
    return mul2(s, ct, ASM)


@triton.jit
def _round_half(x, c, t, CLAMP: tl.constexpr):
    """E2M1 rounding of x c on the grid whose smallest binade starts at t / 64; NaN where t is infinite."""
    y = x * c
    if CLAMP:
        limit = t * 0.09375  # 6 s
        y = tl.where(tl.abs(y) > limit, tl.where(y < 0, -limit, limit), y)
    e = tl.maximum((tl.abs(y) * 64.0).to(tl.int32, bitcast=True) & 0x7F800000, t.to(tl.int32, bitcast=True))
    m = e.to(tl.float32, bitcast=True) * 98304.0  # 1.5 x 2^16: unit in the last place e / 128
    q = (y + m) - m
    return tl.where(t < float("inf"), q, float("nan"))


@triton.jit
def mx_round(w, t, c, c64, RULE: tl.constexpr, ASM: tl.constexpr):
    """Words of E2M1(c x) in shifted BF16.

    ``w`` words, ``t`` the packed thresholds (broadcast to w), ``c``, ``c64`` from ``mx_constants``. Five
    packed instructions: |64 c x|, max with t, exponent to M, fused multiply-add, subtract; one more where the
    rule can leave 6x / s above 6.
    """
    CLAMP: tl.constexpr = can_exceed(RULE)
    if ASM:
        if CLAMP:
            six = mul2(t, 0x3DC03DC0 + tl.zeros_like(t), True)  # 6 s = t x 0.09375
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 p, m, r;
                mul.rn.bf16x2 p, $1, $4;
                max.NaN.xorsign.abs.bf16x2 p, p, $2;
                lop3.b32 m, p, 0x7F807F80, 0x00400040, 0xEA;
                fma.rn.bf16x2 r, $1, $3, m;
                sub.rn.bf16x2 r, r, m;
                min.NaN.xorsign.abs.bf16x2 $0, r, $5;
                }""",
                "=r,r,r,r,r,r",
                [w, t, c, c64, six],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 p, m, r;
            mul.rn.bf16x2 p, $1, $4;
            max.NaN.xorsign.abs.bf16x2 p, p, $2;
            lop3.b32 m, p, 0x7F807F80, 0x00400040, 0xEA;
            fma.rn.bf16x2 r, $1, $3, m;
            sub.rn.bf16x2 $0, r, m;
            }""",
            "=r,r,r,r,r",
            [w, t, c, c64],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = _round_half(low_f32(w), low_f32(c), low_f32(t), CLAMP)
        high = _round_half(high_f32(w), high_f32(c), high_f32(t), CLAMP)
        return pack_exact(low, high)


@triton.jit
def _stochastic_half(x, byte, c, t, CLAMP: tl.constexpr):
    """Magnitude of E2M1(|x| c) rounded with random bytes; t = 64 s, infinite for a NaN block.

    On [64 s 2^e, 64 s 2^(e+1)) the grid step is 2^(e-1) s. M = 2^13 x that binade's start has the unit
    step / 512, so adding 2 byte + 1 units before truncating at a whole step decides as the contract does.
    """
    a = tl.abs(x)
    y = a * c
    if CLAMP:
        y = tl.minimum(y, t * 0.09375)
    # 64 times the binade's start: of the smallest scales the start itself is subnormal
    e = tl.maximum((y * 64.0).to(tl.int32, bitcast=True) & 0x7F800000, t.to(tl.int32, bitcast=True))
    inverse = ((254 << 23) - e).to(tl.float32, bitcast=True)
    units = (y * 64.0) * inverse * 2.0
    whole = tl.floor(units)
    part = tl.floor((units - whole) * 512.0).to(tl.int32)
    q = tl.where(part + 2 * byte + 1 >= 512, whole + 1.0, whole) * e.to(tl.float32, bitcast=True) * 0.0078125
    return tl.where(t < float("inf"), q, float("nan"))


@triton.jit
def fp8_bytes_signed(v, signs, CARRIER: tl.constexpr, ASM: tl.constexpr):
    """Words whose bytes 1 and 3 are the FP8 bytes of shifted BF16 words ``v`` with the signs of ``signs``."""
    SHIFT: tl.constexpr = 3 if CARRIER == "e5m2" else 4
    moved = v << SHIFT
    if ASM:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, 0x7FFF7FFF, $1, $2, 0xCA;",
            "=r,r,r",
            [moved, signs],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return (moved & 0x7FFF7FFF) | (signs & -2147450880)


@triton.jit
def fp8_bytes(v, CARRIER: tl.constexpr, ASM: tl.constexpr):
    """``fp8_bytes_signed`` with v's own signs."""
    return fp8_bytes_signed(v, v, CARRIER, ASM)


@triton.jit
def with_signs(v, signs):
    """Words of the magnitudes of ``v`` and the signs of ``signs``."""
    return (v & 0x7FFF7FFF) | (signs & -2147450880)


@triton.jit
def mx_magnitudes_stochastic(w, t, random, c, RULE: tl.constexpr, PAIR: tl.constexpr, ASM: tl.constexpr):
    """Words of |E2M1(c x)| in shifted BF16, rounded with bytes 2 PAIR, 2 PAIR + 1 of the words ``random``.

    One block scale per word (row blocks); places and bytes as in ``reference.philox``. The sum starts at
    M = 2^13 x (start of y's binade), whose unit is step / 512; see ``nv.nv_carrier_stochastic``. The binade
    comes from the packed product: 1.5 x (eight significant bits) rounded to eight bits never reaches the next
    power of two, so the rounding does not disturb it.
    """
    floor = mul2(t, 0x43004300 + tl.zeros_like(t), ASM) if ASM else t
    return mx_magnitudes_above(w, t, floor, random, c, RULE, PAIR, ASM)


@triton.jit
def mx_magnitudes_above(w, t, floor, random, c, RULE: tl.constexpr, PAIR: tl.constexpr, ASM: tl.constexpr):
    """``mx_magnitudes_stochastic`` with ``floor`` = 2^13 s given, which the packed body reads."""
    CLAMP: tl.constexpr = can_exceed(RULE)
    if ASM:
        cf = high_f32(c)
        k = mul2(c, 0x46004600 + tl.zeros_like(c), True)  # 2^13 c
        pick_low = tl.full([1] * len(w.shape), 2 << (16 * PAIR), tl.int32)
        pick_high = tl.full([1] * len(w.shape), 2 << (16 * PAIR + 8), tl.int32)
        six = high_f32(t) * 0.09375 if CLAMP else cf  # 6 s
        CUT: tl.constexpr = "min.NaN.f32 a, a, $8; min.NaN.f32 b, b, $8;" if CLAMP else ""
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, p, q, y, z;
            mul.rn.bf16x2 p, $1, $4;
            max.NaN.bf16x2 p, p, $2;
            shl.b32 a, $1, 16;
            and.b32 b, $1, 0xFFFF0000;
            and.b32 p, p, 0x7F807F80;
            lop3.b32 q, p, 0xFFFF0000, 1, 0xEA;
            mad.lo.u32 p, p, 65536, 1;
            dp4a.u32.u32 y, $5, $6, p;
            dp4a.u32.u32 z, $5, $7, q;
            fma.rz.f32 a, a, $3, y;
            fma.rz.f32 b, b, $3, z;
            lop3.b32 a, a, 0xFFFFFE00, 1, 0xEA;
            lop3.b32 b, b, 0xFFFFFE00, 1, 0xEA;
            sub.f32 a, a, p;
            sub.f32 b, b, q;
            """
            + CUT
            + """
            prmt.b32 $0, a, b, 0x7632;
            }""",
            "=r,r,r,r,r,r,r,r,r",
            [magnitudes(w), floor, cf, k, random, pick_low, pick_high, six],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = _stochastic_half(low_f32(w), (random >> (16 * PAIR)) & 0xFF, low_f32(c), low_f32(t), CLAMP)
        high = _stochastic_half(
            high_f32(w), (random >> (16 * PAIR + 8)) & 0xFF, high_f32(c), high_f32(t), CLAMP
        )
        return pack_exact(low, high)
