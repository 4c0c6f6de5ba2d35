"""NVFP4, CTA-local NVFP4 and UE5M3: block scales in FP32, BF16 carriers.

A carrier holds E2M1 code x block scale, at most six significant bits, so it is exact in BF16; the FP32 outer
scale stays with the GEMM's epilogue. Scale chains follow ``reference.scales`` operation by operation; divisions
are correctly rounded.

    algorithm   enc                          block scale s                      multiplier of x
    nv_te       min(2688 / amax, FLT_MAX)    E4M3(amax_b (enc (1/6)))           min(1 / (s (1 / enc)), FLT_MAX)
    nv_global   min(2688 / amax, FLT_MAX)    E4M3(1 / M), M = E4M3(6 / (amax_b enc))     min(M enc, FLT_MAX)
    nv_cta      min(448 / amax_c, FLT_MAX)   E4M3(E4M3(1 / M) g / outer), g = amax_c / 448    min(M enc, FLT_MAX)
    ue5m3       -                            UE5M3(512 (0.875 amax_b / amax)), zero is 1   min(1 / (s outer), FLT_MAX)
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4core.kernels.device import (
    decode_ue5m3,
    divide,
    encode_ue5m3,
    high_f32,
    low_f32,
    pack_exact,
    round_e2m1,
    round_e2m1_stochastic,
    round_e4m3,
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
    """True where no step of a scale chain leaves FP32's normal range (or meets zero): 2^-60 <= amax <= 2^60."""
    return (amax > 8.673617379884035e-19) & (amax < 1.152921504606847e18)


@triton.jit
def nv_block(amax_b, amax, outer, ALGORITHM: tl.constexpr, TWO_D: tl.constexpr, FAST: tl.constexpr):
    """Block scales of one domain.

    Args:
        amax_b: FP32 block maxima, already through ``finite_or_nan``.
        amax: FP32 amax of the tensor or (nv_cta) chunk, a scalar.
        outer: FP32 outer scale of the tensor or stripe, a scalar; only nv_cta and ue5m3 read it.
        FAST: packed conversions and divisions without range checks; same bits where ``in_fast_range(amax)``
            holds (nv_cta: of the chunk and of 448 outer).

    Returns:
        (multiplier, decoded block scale), FP32 of amax_b's shape.
    """
    zero = tl.zeros_like(amax_b)
    one = zero + 1.0
    if ALGORITHM == "nv_te":
        enc = nv_enc(amax, ALGORITHM)
        value = round_e4m3(_capped(amax_b * (enc * 0.16666667163372040)), FAST)
        step = value * tl.div_rn(1.0 + enc * 0.0, enc)
        multiplier = _capped(divide(one, tl.where(step == 0.0, 1.0, step), FAST))
        multiplier = tl.where(step == 0.0, FLT_MAX, multiplier)
    elif ALGORITHM == "ue5m3":
        ratio = divide(amax_b * 0.875, amax + zero, FAST) * 512.0
        ratio = tl.where(amax_b == 0.0, 0.0, ratio)
        byte = encode_ue5m3(tl.where(amax == amax, ratio, amax + zero))
        value = decode_ue5m3(tl.where(byte == 0, 120, byte))
        step = value * outer
        multiplier = _capped(divide(one, tl.where(step == 0.0, 1.0, step), FAST))
        multiplier = tl.where(step == 0.0, FLT_MAX, multiplier)
    else:
        enc = nv_enc(amax, ALGORITHM)
        # below 2^-20 the quotient saturates at 448 anyway
        d = amax_b * enc
        d = tl.where(d < 9.5367431640625e-07, 9.5367431640625e-07, d)
        m = round_e4m3(divide(zero + 6.0, d, FAST), FAST)
        multiplier = _capped(m * enc)
        s = _reciprocal(m, FAST)
        whole = amax
        if ALGORITHM == "nv_cta":
            g = tl.div_rn(amax, amax * 0.0 + 448.0)
            s = divide(round_e4m3(s, FAST) * g, outer + zero, FAST)
            if TWO_D:
                s = tl.where((s > 0.0) & (s < 0.001953125), 0.001953125, s)
            whole = outer
        s = tl.where(amax_b == 0.0, 0.0, s)
        value = round_e4m3(tl.where(whole == whole, s, whole + zero), FAST)
    return multiplier, value


@triton.jit
def nv_block_safe(amax_b, amax, outer, ALGORITHM: tl.constexpr, TWO_D: tl.constexpr, ASM: tl.constexpr):
    """``nv_block`` by the fast chain where its range allows, by checked divisions elsewhere."""
    if ASM:
        fast = in_fast_range(amax)
        if ALGORITHM == "nv_cta":
            fast = fast & in_fast_range(outer * 448.0)
        if fast:
            multiplier, value = nv_block(amax_b, amax, outer, ALGORITHM, TWO_D, True)
        else:
            multiplier, value = nv_block(amax_b, amax, outer, ALGORITHM, TWO_D, False)
        return multiplier, value
    else:
        return nv_block(amax_b, amax, outer, ALGORITHM, TWO_D, False)


@triton.jit
def _reciprocal(m, ASM: tl.constexpr):
    """1 / m for an E4M3 value m, near enough to round to E4M3 as the exact quotient does.

    1 / m differs from every midpoint of E4M3 by more than 1e-3 of itself unless it is a power of two, which the
    approximation keeps on the right side as well.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [m], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(tl.zeros_like(m) + 1.0, m)


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
def nv_carrier(w, m_low, m_high, s_low, s_high, ASM: tl.constexpr):
    """Words of E2M1(x multiplier) x block scale; multiplier and scale for the two halves."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, p, q;
            shl.b32 a, $1, 16;
            and.b32 b, $1, 0x7FFF0000;
            abs.f32 a, a;
            mul.f32 a, a, $2;
            mul.f32 b, b, $3;
            min.f32 a, a, 0f40C00000;
            min.f32 b, b, 0f40C00000;
            max.f32 p, a, 0f3F800000;
            max.f32 q, b, 0f3F800000;
            and.b32 p, p, 0x7F800000;
            and.b32 q, q, 0x7F800000;
            fma.rn.f32 a, p, 0f4AC00000, a;
            fma.rn.f32 b, q, 0f4AC00000, b;
            fma.rn.f32 a, p, 0fCAC00000, a;
            fma.rn.f32 b, q, 0fCAC00000, b;
            mul.f32 a, a, $4;
            mul.f32 b, b, $5;
            prmt.b32 a, a, b, 0x7632;
            lop3.b32 $0, 0x7FFF7FFF, a, $1, 0xCA;
            }""",
            "=r,r,r,r,r,r",
            [w, m_low, m_high, s_low, s_high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = nv_quantise(low_f32(w), m_low) * s_low
        high = nv_quantise(high_f32(w), m_high) * s_high
        return (pack_exact(low, high) & 0x7FFF7FFF) | (w & -2147450880)


@triton.jit
def nv_carrier_stochastic(w, m_low, m_high, s_low, s_high, random, PAIR: tl.constexpr, ASM: tl.constexpr):
    """As ``nv_carrier``, rounded with bytes 2 PAIR and 2 PAIR + 1 of the words ``random``.

    M = 2^13 x (start of y's binade) has the unit step / 512: adding 2 byte + 1 units, then truncating at a
    whole step, rounds up just when delta + (2 byte + 1) / 512 >= 1. y is added with a truncating
    instruction, because its fraction below step / 512 must not carry.
    """
    if ASM:
        pick_low = tl.full([1] * len(w.shape), 0x4440 + 2 * PAIR, tl.int32)
        pick_high = tl.full([1] * len(w.shape), 0x4441 + 2 * PAIR, tl.int32)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, p, q, r, u;
            shl.b32 a, $1, 16;
            and.b32 b, $1, 0x7FFF0000;
            abs.f32 a, a;
            mul.f32 a, a, $2;
            mul.f32 b, b, $3;
            min.f32 a, a, 0f40C00000;
            min.f32 b, b, 0f40C00000;
            max.f32 p, a, 0f3F800000;
            max.f32 q, b, 0f3F800000;
            and.b32 p, p, 0x7F800000;
            and.b32 q, q, 0x7F800000;
            add.u32 p, p, 0x06800000;
            add.u32 q, q, 0x06800000;
            prmt.b32 r, $6, 0, $7;
            mad.lo.u32 r, r, 2, p;
            add.u32 r, r, 1;
            add.rz.f32 a, a, r;
            prmt.b32 u, $6, 0, $8;
            mad.lo.u32 u, u, 2, q;
            add.u32 u, u, 1;
            add.rz.f32 b, b, u;
            and.b32 a, a, 0xFFFFFE00;
            and.b32 b, b, 0xFFFFFE00;
            sub.f32 a, a, p;
            sub.f32 b, b, q;
            mul.f32 a, a, $4;
            mul.f32 b, b, $5;
            prmt.b32 a, a, b, 0x7632;
            lop3.b32 $0, 0x7FFF7FFF, a, $1, 0xCA;
            }""",
            "=r,r,r,r,r,r,r,r,r",
            [w, m_low, m_high, s_low, s_high, random, pick_low, pick_high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = nv_quantise_stochastic(low_f32(w), m_low, (random >> (16 * PAIR)) & 0xFF) * s_low
        high = nv_quantise_stochastic(high_f32(w), m_high, (random >> (16 * PAIR + 8)) & 0xFF) * s_high
        return (pack_exact(low, high) & 0x7FFF7FFF) | (w & -2147450880)
