"""Device functions of the native producers: a tile of BF16 values to packed E2M1 codes and scale bytes.

Legend: R rows of the tile, C its columns along the contraction, B a block along the contraction, BR rows
under one scale (1, or the tile size of 2D formats). A tile arrives as int32 ``bits_RC``: BF16 bits in the
upper half, that is the bits of the FP32 of the same value.

Two bodies with the same bits. PTX (sm_100a, sm_103a): ``cvt.rn.satfinite.e2m1x2.f32`` rounds two magnitudes
at once. The PTX ISA specifies it as round-to-nearest-even onto E2M1 with saturation to 6, which is the
reference's rule; signs do not go through it but are taken from the input, because what the conversion makes
of -0 and of NaN is no part of the reference's contract. Everything else, and the other body, is integer and
FP32 arithmetic. Stochastic rounding is
software in both: the instruction's own (``cvt.rs``) does not follow delta + (2r + 1) / 512 >= 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4core.kernels._dual import is_mx_rule
from fp4core.kernels.codes import mx_byte
from fp4core.kernels.device import (
    code_e2m1,
    decode_e8m0,
    encode_e4m3,
    philox4x32,
    round_e2m1,
    round_e2m1_stochastic,
)
from fp4core.kernels.mx import is_ocp
from fp4core.kernels.nv import finite_or_nan, nv_block
from fp4core.kernels.tiles import rotate_f32


@triton.jit
def bf16_bits(x):
    """int32 whose upper half is the BF16 (nearest even; NaN 0x7FFF) of FP32 ``x``."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF0000, rounded)


@triton.jit
def rotate_rows(bits_RC, rows, HADAMARD: tl.constexpr):
    """The tile rotated along its rows (tokens); a last incomplete group of the tensor stays as it is.

    ``rows``: how many rows of the tile exist.
    """
    R: tl.constexpr = bits_RC.shape[0]
    C: tl.constexpr = bits_RC.shape[1]
    GROUP: tl.constexpr = 32 if HADAMARD == "fixed32" else 16
    x = bits_RC.to(tl.float32, bitcast=True)
    y = tl.reshape(rotate_f32(tl.reshape(x, [R // 32, 32, C]), HADAMARD), [R, C])
    whole = tl.arange(0, R)[:, None] // GROUP * GROUP + GROUP <= rows
    return tl.where(whole, bf16_bits(y), bits_RC)


@triton.jit
def random_tile(
    sr_ptr, producer, row, column, PLACES, R: tl.constexpr, C: tl.constexpr, ALIGNED: tl.constexpr
):
    """Random bytes, int32 [R, C], of the elements from (row, column) on; places as in ``reference.philox``.

    ``sr_ptr``: int64 (seed, step, place of the tensor's first element); PLACES: features of the tensor.
    ALIGNED: that place and PLACES are multiples of 16, so that one call of Philox serves 16 neighbours.
    """
    seed = tl.load(sr_ptr)
    step = tl.load(sr_ptr + 1)
    first = tl.load(sr_ptr + 2) + row.to(tl.int64) * PLACES + column
    r = tl.arange(0, R)[:, None].to(tl.int64)
    if ALIGNED:
        place16 = first // 16 + r * (PLACES // 16) + tl.arange(0, C // 16)[None, :]
    else:
        place = first + r * PLACES + tl.arange(0, C)[None, :]
        place16 = place >> 4
    zero = tl.zeros_like(place16).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        place16.to(tl.uint32),
        (place16 >> 32).to(tl.uint32),
        zero + step.to(tl.uint32),
        zero + producer.to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    if ALIGNED:
        words = tl.reshape(
            tl.join(tl.join(w0, w2), tl.join(w1, w3)), [R, C // 4, 1]
        )  # words 0, 1, 2, 3 in order
        shift = (tl.arange(0, 4) * 8)[None, None, :].to(tl.uint32)
        drawn = tl.reshape((words >> shift) & 0xFF, [R, C])
    else:
        byte = (place & 15).to(tl.int32)
        word = tl.where(byte < 8, tl.where(byte < 4, w0, w1), tl.where(byte < 12, w2, w3))
        drawn = (word >> (8 * (byte & 3)).to(tl.uint32)) & 0xFF
    return drawn.to(tl.int32)


@triton.jit
def _pack_nearest(low, high, PTX: tl.constexpr):
    """Packed magnitude codes (int32, two nibbles) of two FP32 tensors, nearest even, saturating at 6."""
    if PTX:
        packed = tl.inline_asm_elementwise(
            """{
            .reg .f32 a, b;
            .reg .b8 t;
            abs.f32 a, $1;
            abs.f32 b, $2;
            cvt.rn.satfinite.e2m1x2.f32 t, b, a;
            cvt.u32.u8 $0, t;
            }""",
            "=r,r,r",
            [low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        a = round_e2m1(tl.minimum(tl.abs(low), 6.0))
        b = round_e2m1(tl.minimum(tl.abs(high), 6.0))
        packed = code_e2m1(a, a < 0.0) | (code_e2m1(b, b < 0.0) << 4)
    return packed


@triton.jit
def _blocks(bits_RC, BR: tl.constexpr, B: tl.constexpr):
    return tl.reshape(bits_RC, [bits_RC.shape[0] // BR, BR, bits_RC.shape[1] // B, B])


@triton.jit
def block_scales(amax_b, amax, outer, RULE: tl.constexpr, TWO_D: tl.constexpr, ASM: tl.constexpr):
    """(multiplier, multiplier's power-of-two rest, byte int32) of FP32 block maxima; a NaN multiplier where
    NaN.

    ``amax``, ``outer``: scalars of the tile's domain, for NVFP4 rules.
    """
    if is_mx_rule(RULE):
        nan = amax_b != amax_b
        byte = mx_byte(tl.where(nan, 0.0, amax_b), RULE)
        inverse = decode_e8m0(254 - byte)
        if is_ocp(RULE):
            multiplier = tl.where(nan, float("nan"), inverse)
            post = 1.0
        else:
            # 6 / s as 1.5 / s and 4: with s = 2^-127 the product itself would overflow
            multiplier = tl.where(nan, float("nan"), inverse * 1.5)
            post = 4.0
        byte = tl.where(nan, 255, byte)
    else:
        multiplier, value = nv_block(amax_b, amax, outer, RULE, TWO_D)
        post = 1.0
        byte = encode_e4m3(value, ASM)
    return multiplier, post, byte


@triton.jit
def encode_tile(
    bits_RC,
    random_RC,
    amax,
    outer,
    RULE: tl.constexpr,
    BR: tl.constexpr,
    B: tl.constexpr,
    SR: tl.constexpr,
    ASM: tl.constexpr,
    PTX: tl.constexpr,
):
    """(packed codes uint8 [R, C / 2], scale bytes uint8 [R, C / B]) of a tile.

    ``random_RC``: bytes where SR. Scales of 2D blocks are repeated for each of their rows.
    """
    R: tl.constexpr = bits_RC.shape[0]
    C: tl.constexpr = bits_RC.shape[1]
    blocks = _blocks(bits_RC, BR, B)
    top = tl.max(tl.max(blocks & 0x7FFFFFFF, 3, keep_dims=True), 1, keep_dims=True)
    amax_b = finite_or_nan(top.to(tl.float32, bitcast=True))
    multiplier, post, byte = block_scales(amax_b, amax, outer, RULE, BR > 1, ASM)
    nan = multiplier != multiplier
    y = tl.where(nan, 0.0, blocks.to(tl.float32, bitcast=True) * multiplier) * post
    # an all-zero block has codes 0, also for its negative zeros; under a NaN scale the codes are 0
    sign = tl.where((amax_b > 0.0) & (multiplier == multiplier), (blocks >> 28) & 8, 0)
    sign_low, sign_high = tl.split(tl.reshape(sign, [R, C // 2, 2]))
    if SR:
        y = tl.minimum(tl.maximum(y, -6.0), 6.0)
        q = round_e2m1_stochastic(tl.abs(y), _blocks(random_RC, BR, B))
        low, high = tl.split(tl.reshape(code_e2m1(q, q < 0.0), [R, C // 2, 2]))
        packed = low | (high << 4)
    else:
        low, high = tl.split(tl.reshape(y, [R, C // 2, 2]))
        packed = _pack_nearest(low, high, PTX)
    packed = packed | sign_low | (sign_high << 4)
    scales = tl.reshape(tl.broadcast_to(byte, [R // BR, BR, C // B, 1]), [R, C // B])
    return packed.to(tl.uint8), scales.to(tl.uint8)
