"""Device functions on words: BF16 pairs in 32-bit registers.

Tile convention of every kernel here. A tile of BF16 values [tokens, features] is held as int32 *words*
``w_GTW`` of shape [G, 32, W]: G groups of 32 tokens, W words of two neighbouring features, the even feature
in the low half. A "packed" quantity carries one 16-bit value per half.

    G  groups of 32 tokens (one warp holds whole groups, so token-wise work stays in one thread)
    T  tokens of a group (32)      W  words of a row's piece (2 features each)

Why words. Hopper's packed BF16 instructions work on two values at once, and `fma.rn.bf16x2` forms x * c + M
exactly and rounds once. With M = 1.5 x 2^(e + 6) x s its unit in the last place is the E2M1 grid step of the
block, so the adder itself rounds 6x to the grid of a block of scale s and no conversion to FP32 is needed.

Every function has two bodies with the same bits: packed PTX when ``ASM`` (sm_90 and up), and plain integer
and FP32 arithmetic otherwise, which is what the Triton interpreter and older GPUs run.
"""

# ruff: noqa: RET505  Triton compiles what follows a constexpr branch unless it is in its else
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def low_f32(w):
    """FP32 of the low (even feature) BF16 of each word."""
    return (w << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_f32(w):
    """FP32 of the high (odd feature) BF16 of each word."""
    return (w & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pack_exact(low, high):
    """Words of two FP32 tensors whose values are exact in BF16 (upper halves, no rounding)."""
    a = low.to(tl.int32, bitcast=True)
    b = high.to(tl.int32, bitcast=True)
    return ((a >> 16) & 0xFFFF) | (b & -65536)


@triton.jit
def _bf16_rne_bits(x):
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF0000, rounded)


@triton.jit
def pack_rne(low, high, ASM: tl.constexpr):
    """Words of two FP32 tensors rounded to BF16, nearest even; NaN gives 0x7FFF."""
    if ASM:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((_bf16_rne_bits(low) >> 16) & 0xFFFF) | _bf16_rne_bits(high)


@triton.jit
def duplicate(half):
    """A 16-bit value in both halves."""
    return (half & 0xFFFF) | (half << 16)


@triton.jit
def magnitudes(w):
    """Packed BF16 magnitude bits, which order like integers (NaN above infinity)."""
    return w & 0x7FFF7FFF


@triton.jit
def _max2_asm(a, b):
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _low16(a):
    return a & 0xFFFF


@triton.jit
def _high16(a):
    return (a >> 16) & 0xFFFF


@triton.jit
def max2(a, b, ASM: tl.constexpr):
    """Packed unsigned 16-bit maximum."""
    if ASM:
        return _max2_asm(a, b)
    else:
        return tl.maximum(_low16(a), _low16(b)) | (tl.maximum(_high16(a), _high16(b)) << 16)


@triton.jit
def min2(a, b, ASM: tl.constexpr):
    """Packed unsigned 16-bit minimum."""
    if ASM:
        return tl.inline_asm_elementwise(
            "min.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.minimum(_low16(a), _low16(b)) | (tl.minimum(_high16(a), _high16(b)) << 16)


@triton.jit
def reduce_max2(a, AXIS: tl.constexpr, ASM: tl.constexpr):
    """Packed unsigned maximum along an axis, which is kept with length one."""
    if ASM:
        return tl.reduce(a, AXIS, _max2_asm, keep_dims=True)
    else:
        low = tl.max(_low16(a), AXIS, keep_dims=True)
        return low | (tl.max(_high16(a), AXIS, keep_dims=True) << 16)


@triton.jit
def halves_max(a, ASM: tl.constexpr):
    """max(low half, high half), in both halves."""
    swapped = ((a >> 16) & 0xFFFF) | (a << 16)
    return max2(a, swapped, ASM)


@triton.jit
def permute_bytes(a, b, SELECT: tl.constexpr, ASM: tl.constexpr):
    """PRMT: byte i of the result is byte (SELECT >> 4i) & 7 of the eight bytes of (a low, b high)."""
    if ASM:
        selector = tl.full([1] * len(a.shape), SELECT, tl.int32)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        out = _byte(a, b, SELECT & 7)
        out |= _byte(a, b, (SELECT >> 4) & 7) << 8
        out |= _byte(a, b, (SELECT >> 8) & 7) << 16
        return out | (_byte(a, b, (SELECT >> 12) & 7) << 24)


@triton.jit
def _byte(a, b, INDEX: tl.constexpr):
    if INDEX < 4:
        return (a >> (8 * INDEX)) & 0xFF
    else:
        return (b >> (8 * (INDEX - 4))) & 0xFF


@triton.jit
def round_e2m1(y):
    """Round FP32 to E2M1 values: nearest, ties to the even code. The caller keeps |y| <= 7.

    Branch-free: the step at |y| in [2^e, 2^(e+1)) is 2^(e-1), e >= 0, and 1.5 x 2^(e+22) has just that unit
    in the last place. The sign of a zero is lost; NaN stays NaN.
    """
    magic = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000) + ((22 << 23) | 0x400000)
    m = magic.to(tl.float32, bitcast=True)
    return (y + m) - m


@triton.jit
def round_e2m1_stochastic(y, byte):
    """Round FP32 to E2M1 values with one random byte: up when delta + (2 byte + 1) / 512 >= 1.

    ``y`` finite, |y| <= 6; ``byte`` int32 0..255. The fraction of a step is floored to 1/512, which leaves
    the decision unchanged because the threshold is an integer number of 1/512.
    """
    a = tl.abs(y)
    exponent = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    inverse_step = ((255 << 23) - exponent).to(tl.float32, bitcast=True)  # 2^(1 - e)
    step = (exponent - (1 << 23)).to(tl.float32, bitcast=True)  # 2^(e - 1)
    units = a * inverse_step
    whole = tl.floor(units)
    part = tl.floor((units - whole) * 512.0).to(tl.int32)
    up = part + 2 * byte + 1 >= 512
    q = tl.where(up, whole + 1.0, whole) * step
    return tl.where(y < 0, -q, q)


@triton.jit
def code_e2m1(q, negative):
    """Codes 0..15 (int32) of FP32 E2M1 values; ``negative`` is the sign of the quantiser's input."""
    top = ((q.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 22) - 252  # 0.5 -> 0, 1 -> 2, 6 -> 7
    code = tl.maximum(top, 0) + tl.where(top == 0, 1, 0)
    return code | tl.where(negative, 8, 0)


@triton.jit
def encode_e4m3(value, ASM: tl.constexpr):
    """Byte (int32) of the E4M3 nearest to non-negative FP32, ties to even, saturating at 448; NaN is 0x7F."""
    if ASM:
        pair = tl.inline_asm_elementwise(
            "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $1, $1; cvt.u32.u16 $0, t; }",
            "=r,r",
            [value],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return pair & 0xFF
    else:
        v = tl.minimum(value, 448.0)
        exponent = tl.maximum(v.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
        m = (exponent + ((20 << 23) | 0x400000)).to(tl.float32, bitcast=True)  # unit 2^(e - 3)
        v = (v + m) - m
        normal = (v.to(tl.int32, bitcast=True) >> 20) - ((127 - 7) << 3)
        subnormal = (v * 512.0).to(tl.int32)
        byte = tl.where(v < 0.015625, subnormal, normal)
        return tl.where(value != value, 0x7F, byte)


@triton.jit
def decode_e4m3(byte):
    """FP32 of non-negative E4M3 bytes (int32); 0x7F is NaN."""
    normal = ((byte + ((127 - 7) << 3)) << 20).to(tl.float32, bitcast=True)
    value = tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)
    return tl.where(byte == 0x7F, float("nan"), value)


@triton.jit
def round_e4m3(value, ASM: tl.constexpr):
    """The E4M3 value (FP32) nearest to non-negative FP32, ties to even, saturating at 448; NaN stays NaN."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 t, u;
            .reg .b32 h;
            cvt.rn.satfinite.e4m3x2.f32 t, $3, $2;
            cvt.rn.f16x2.e4m3x2 h, t;
            mov.b32 {t, u}, h;
            cvt.f32.f16 $0, t;
            cvt.f32.f16 $1, u;
            }""",
            "=r,=r,r,r",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return decode_e4m3(encode_e4m3(value, ASM))


@triton.jit
def round_ue5m3(value):
    """The UE5M3 value (FP32) nearest to non-negative finite FP32, ties to even, saturating at 61440."""
    v = tl.minimum(value, 61440.0)
    exponent = tl.maximum(v.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 14) << 23)
    m = (exponent + ((20 << 23) | 0x400000)).to(tl.float32, bitcast=True)
    return (v + m) - m


@triton.jit
def approximate_reciprocal(x):
    """1 / x to one unit in the last place, by the hardware's approximation."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x):
    """Correctly rounded 1 / x for |x| in [2^-100, 2^100]: the compiler's path without its range check."""
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 r, e;
        rcp.approx.ftz.f32 r, $1;
        fma.rn.f32 e, $1, r, 0fBF800000;
        neg.f32 e, e;
        fma.rn.f32 $0, r, e, r;
        }""",
        "=r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def divide_by(a, b, r):
    """Correctly rounded a / b from the correctly rounded reciprocal r of b: two remainder corrections.

    a, b and a / b well inside the normal range, or a / b so small that only its smallness matters.
    """
    q = a * r
    q = tl.fma(tl.fma(-q, b, a), r, q)
    return tl.fma(tl.fma(-q, b, a), r, q)


@triton.jit
def six_over(d):
    """6 / d for d in [2^-100, 2^100], near enough to round to E4M3 as the correctly rounded quotient does.

    One correction; a test compares the E4M3 of both for every mantissa of d.
    """
    r = reciprocal(d)
    q = 6.0 * r
    return tl.fma(tl.fma(-q, d, 6.0 + 0.0 * r), r, q)


@triton.jit
def encode_ue5m3(value):
    """Byte (int32) of the UE5M3 nearest to non-negative FP32, ties to even, saturating at 61440; NaN 0xFF."""
    v = tl.minimum(value, 61440.0)
    exponent = tl.maximum(v.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 14) << 23)
    m = (exponent + ((20 << 23) | 0x400000)).to(tl.float32, bitcast=True)
    v = (v + m) - m
    normal = (v.to(tl.int32, bitcast=True) >> 20) - ((127 - 15) << 3)
    subnormal = (v * 131072.0).to(tl.int32)
    byte = tl.where(v < 0.00006103515625, subnormal, normal)
    return tl.where(value != value, 0xFF, byte)


@triton.jit
def decode_ue5m3(byte):
    """FP32 of UE5M3 bytes (int32); 0xF8 and up are NaN."""
    normal = ((byte + ((127 - 15) << 3)) << 20).to(tl.float32, bitcast=True)
    value = tl.where(byte < 8, byte.to(tl.float32) * 7.62939453125e-06, normal)
    return tl.where(byte >= 0xF8, float("nan"), value)


@triton.jit
def decode_e8m0(byte):
    """FP32 of E8M0 bytes (int32): 2^(byte - 127), 255 is NaN."""
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10; all arguments and results uint32 (tensors or scalars that broadcast)."""
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3
