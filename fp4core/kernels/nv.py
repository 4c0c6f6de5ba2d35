"""NVFP4, CTA-local NVFP4 and UE5M3: block scales in FP32, BF16 carriers.

A carrier holds E2M1 code x block scale, at most six significant bits, so it is exact in BF16; the FP32 outer
scale stays with the GEMM's epilogue. Scale chains follow ``reference.scales`` operation by operation;
divisions are correctly rounded.

    nv_te      enc = min(2688 / amax, FLT_MAX); s = E4M3(amax_b (enc (1/6)));
               multiplier = min(1 / (s (1 / enc)), FLT_MAX)
    nv_global  enc as above; M = E4M3(6 / (amax_b enc)); s = E4M3(1 / M); multiplier = min(M enc, FLT_MAX)
    nv_cta     enc = min(448 / amax_c, FLT_MAX); M, multiplier as above; g = amax_c / 448;
               s = E4M3(E4M3(1 / M) g / outer)
    ue5m3      s = UE5M3(512 (0.875 amax_b / amax)), zero becomes 1; multiplier = min(1 / (s outer), FLT_MAX)
"""

# ruff: noqa: RET505  Triton compiles what follows a constexpr branch unless it is in its else
from __future__ import annotations

import triton
import triton.language as tl

from fp4core.kernels.device import (
    approximate_reciprocal,
    decode_ue5m3,
    divide_by,
    encode_ue5m3,
    high_f32,
    low_f32,
    magnitudes,
    pack_exact,
    reciprocal,
    round_e2m1,
    round_e2m1_stochastic,
    round_e4m3,
    round_ue5m3,
    six_over,
)

FLT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def finite_or_nan(amax):
    """Infinite maxima become NaN; FP32."""
    return tl.where(amax < float("inf"), amax, float("nan"))


@triton.jit
def _capped(x):
    return tl.where(x > FLT_MAX, FLT_MAX, x)  # not a minimum, which would lose a NaN in the interpreter


@triton.jit
def nv_enc(amax, ALGORITHM: tl.constexpr):
    """FP32 encode scale of a tensor's (chunk's) amax."""
    if ALGORITHM == "nv_cta":
        return _capped(tl.div_rn(448.0 + tl.zeros_like(amax), amax))
    else:
        return _capped(tl.div_rn(2688.0 + tl.zeros_like(amax), amax))


@triton.jit
def in_fast_range(amax):
    """True where no step of a scale chain leaves FP32's normal range or meets zero: 2^-60 < amax < 2^60."""
    return (amax > 8.673617379884035e-19) & (amax < 1.152921504606847e18)


@triton.jit
def nv_block(amax_b, amax, outer, ALGORITHM: tl.constexpr, TWO_D: tl.constexpr):
    """Block scales of one domain, any values: the chain of ``reference.scales`` with checked divisions.

    Args:
        amax_b: FP32 block maxima, already through ``finite_or_nan``.
        amax: FP32 amax of the tensor or (nv_cta) chunk, a scalar.
        outer: FP32 outer scale of the tensor or stripe, a scalar; only nv_cta and ue5m3 read it.

    Returns:
        (multiplier, decoded block scale), FP32 of amax_b's shape.
    """
    zero = tl.zeros_like(amax_b)
    one = zero + 1.0
    if ALGORITHM == "nv_te":
        enc = nv_enc(amax, ALGORITHM)
        value = round_e4m3(_capped(amax_b * (enc * 0.16666667163372040)), False)
        step = value * tl.div_rn(1.0 + enc * 0.0, enc)
        multiplier = _capped(tl.div_rn(one, step))
    elif ALGORITHM == "ue5m3":
        ratio = tl.div_rn(amax_b * 0.875, amax + zero) * 512.0
        ratio = tl.where(amax_b == 0.0, 0.0, ratio)
        byte = encode_ue5m3(tl.where(amax == amax, ratio, amax + zero))
        value = decode_ue5m3(tl.where(byte == 0, 120, byte))
        multiplier = _capped(tl.div_rn(one, value * outer))
    else:
        enc = nv_enc(amax, ALGORITHM)
        m = round_e4m3(tl.div_rn(zero + 6.0, amax_b * enc), False)
        multiplier = _capped(m * enc)
        s = tl.div_rn(one, m)
        whole = amax
        if ALGORITHM == "nv_cta":
            g = tl.div_rn(amax, amax * 0.0 + 448.0)
            s = tl.div_rn(round_e4m3(s, False) * g, outer + zero)
            if TWO_D:
                s = tl.where((s > 0.0) & (s < 0.001953125), 0.001953125, s)
            whole = outer
        s = tl.where(amax_b == 0.0, 0.0, s)
        value = round_e4m3(tl.where(whole == whole, s, whole + zero), False)
    return multiplier, value


@triton.jit
def nv_block_fast(amax_b, amax, outer, ALGORITHM: tl.constexpr, TWO_D: tl.constexpr):
    """``nv_block`` for carriers where ``in_fast_range(amax)`` holds (nv_cta: of the chunk and of 448 outer).

    Packed conversions, divisions without range checks, and no care for what a carrier does not show: the
    scale of an all-zero block, the codes under a zero scale. Finite maxima follow from a finite amax, except
    under the held amax of ue5m3.
    """
    if ALGORITHM == "nv_te":
        enc = nv_enc(amax, ALGORITHM)
        value = round_e4m3(amax_b * (enc * 0.16666667163372040), True)
        # a zero scale (below 2^-10) hides its codes; the maximum keeps them finite
        multiplier = reciprocal(tl.maximum(value, 0.0009765625) * tl.div_rn(1.0 + enc * 0.0, enc))
    elif ALGORITHM == "ue5m3":
        ratio = divide_by(amax_b * 0.875, amax, tl.div_rn(1.0 + amax * 0.0, amax)) * 512.0
        value = round_ue5m3(ratio)
        value = tl.where(value == 0.0, 1.0, value)
        value = tl.where(amax_b < float("inf"), value, float("nan"))
        multiplier = reciprocal(value * outer)
    else:
        enc = nv_enc(amax, ALGORITHM)
        # below 2^-20 the quotient saturates at 448 anyway
        d = tl.maximum(amax_b * enc, 9.5367431640625e-07)
        m = round_e4m3(six_over(d), True)
        multiplier = m * enc
        # 1 / m is a power of two or at least 1e-3 of itself away from every midpoint of E4M3
        s = round_e4m3(approximate_reciprocal(m), True)
        if ALGORITHM == "nv_cta":
            g = tl.div_rn(amax, amax * 0.0 + 448.0)
            s = divide_by(s * g, outer, tl.div_rn(1.0 + outer * 0.0, outer))
            if TWO_D:
                s = tl.maximum(s, 0.001953125)
            s = round_e4m3(s, True)
        value = s
    return multiplier, value


@triton.jit
def nv_block_safe(amax_b, amax, outer, ALGORITHM: tl.constexpr, TWO_D: tl.constexpr, ASM: tl.constexpr):
    """Block scales for carriers from raw block maxima: the fast chain where its range allows."""
    if ASM:
        fast = in_fast_range(amax)
        if ALGORITHM == "nv_cta":
            fast = fast & in_fast_range(outer * 448.0)
        if fast:
            multiplier, value = nv_block_fast(amax_b, amax, outer, ALGORITHM, TWO_D)
        else:
            multiplier, value = nv_block(finite_or_nan(amax_b), amax, outer, ALGORITHM, TWO_D)
            multiplier = tl.where(value == 0.0, 0.0, multiplier)  # codes under a zero scale may overflow
        return multiplier, value
    else:
        return nv_block(finite_or_nan(amax_b), amax, outer, ALGORITHM, TWO_D)


@triton.jit
def nv_quantise(x, multiplier):
    """E2M1 values (FP32) of x; a NaN multiplier gives 0 (its scale is NaN)."""
    y = tl.minimum(tl.maximum(x * multiplier, -6.0), 6.0)
    return round_e2m1(tl.where(multiplier == multiplier, y, 0.0))


@triton.jit
def nv_quantise_stochastic(x, multiplier, byte):
    """As ``nv_quantise`` with stochastic rounding by int32 bytes."""
    y = tl.minimum(tl.maximum(x * multiplier, -6.0), 6.0)
    return round_e2m1_stochastic(tl.where(multiplier == multiplier, y, 0.0), byte)


@triton.jit
def six_times(low, high, ASM: tl.constexpr):
    """Packed BF16 6 s of two FP32 block scales (exact): where a carrier saturates."""
    return pack_exact(low * 6.0, high * 6.0)


@triton.jit
def nv_carrier(w, m_low, m_high, s_low, s_high, WIDE: tl.constexpr, ASM: tl.constexpr):
    """Words of E2M1(x multiplier) x block scale; multiplier and scale for the two halves.

    y = |x| m is on the FP32 grid; the E2M1 step at y is the unit in the last place of M = 2^22 max(y, 1) + 4,
    so M - (M - y) is y rounded, ties to even: at a tie y has three significant bits and M / step is even.
    Compared with isolating the exponent this takes half the integer-pipe instructions. Values above 6 are cut
    at 6 s, two at a time, with the sign of x.
    WIDE: y may be far above 8 (ue5m3 under a held amax).
    """
    if ASM:
        CUT: tl.constexpr = "min.f32 a, a, 0f49800000; min.f32 b, b, 0f49800000;" if WIDE else ""
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, p, q, r, t;
            shl.b32 a, $2, 16;
            and.b32 b, $2, 0xFFFF0000;
            mul.f32 a, a, $3;
            mul.f32 b, b, $4;"""
            + CUT
            + """
            max.f32 p, a, 0f3F800000;
            max.f32 q, b, 0f3F800000;
            fma.rn.f32 p, p, 0f4A800000, 0f40800000;
            fma.rn.f32 q, q, 0f4A800000, 0f40800000;
            sub.f32 r, p, a;
            sub.f32 t, q, b;
            sub.f32 a, p, r;
            sub.f32 b, q, t;
            mul.f32 a, a, $5;
            mul.f32 b, b, $6;
            prmt.b32 a, a, b, 0x7632;
            lop3.b32 b, $1, 0x80008000, $7, 0xEA;
            min.NaN.xorsign.abs.bf16x2 $0, a, b;
            }""",
            "=r,r,r,r,r,r,r,r",
            [w, magnitudes(w), m_low, m_high, s_low, s_high, six_times(s_low, s_high, ASM)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = nv_quantise(low_f32(w), m_low) * s_low
        high = nv_quantise(high_f32(w), m_high) * s_high
        return (pack_exact(low, high) & 0x7FFF7FFF) | (w & -2147450880)


@triton.jit
def nv_carrier_stochastic(
    w, m_low, m_high, s_low, s_high, random, PAIR: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr
):
    """As ``nv_carrier``, rounded with bytes 2 PAIR and 2 PAIR + 1 of the words ``random``.

    M = 2^13 x (start of y's binade) has the unit step / 512: adding 2 byte + 1 units, then truncating at a
    whole step, rounds up just when delta + (2 byte + 1) / 512 >= 1. y is added with a truncating instruction,
    because its fraction below step / 512 must not carry. The odd unit of 2 byte + 1 rides along in M and in
    the truncated sum, whose difference it leaves alone.
    """
    if ASM:
        CUT: tl.constexpr = "min.f32 a, a, 0f49800000; min.f32 b, b, 0f49800000;" if WIDE else ""
        pick_low = tl.full([1] * len(w.shape), 2 << (16 * PAIR), tl.int32)
        pick_high = tl.full([1] * len(w.shape), 2 << (16 * PAIR + 8), tl.int32)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, p, q, r, t;
            shl.b32 a, $2, 16;
            and.b32 b, $2, 0xFFFF0000;
            mul.f32 a, a, $3;
            mul.f32 b, b, $4;"""
            + CUT
            + """
            max.f32 p, a, 0f3F800000;
            max.f32 q, b, 0f3F800000;
            lop3.b32 p, p, 0x7F800000, 1, 0xEA;
            lop3.b32 q, q, 0x7F800000, 1, 0xEA;
            dp4a.u32.u32 r, $8, $9, p;
            dp4a.u32.u32 t, $8, $10, q;
            fma.rz.f32 a, r, 0f46000000, a;
            fma.rz.f32 b, t, 0f46000000, b;
            lop3.b32 a, a, 0xFFFFFE00, 1, 0xEA;
            lop3.b32 b, b, 0xFFFFFE00, 1, 0xEA;
            fma.rn.f32 a, p, 0fC6000000, a;
            fma.rn.f32 b, q, 0fC6000000, b;
            mul.f32 a, a, $5;
            mul.f32 b, b, $6;
            prmt.b32 a, a, b, 0x7632;
            lop3.b32 b, $1, 0x80008000, $7, 0xEA;
            min.NaN.xorsign.abs.bf16x2 $0, a, b;
            }""",
            "=r,r,r,r,r,r,r,r,r,r,r",
            [
                w,
                magnitudes(w),
                m_low,
                m_high,
                s_low,
                s_high,
                six_times(s_low, s_high, ASM),
                random,
                pick_low,
                pick_high,
            ],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = nv_quantise_stochastic(low_f32(w), m_low, (random >> (16 * PAIR)) & 0xFF) * s_low
        high = nv_quantise_stochastic(high_f32(w), m_high, (random >> (16 * PAIR + 8)) & 0xFF) * s_high
        return (pack_exact(low, high) & 0x7FFF7FFF) | (w & -2147450880)
