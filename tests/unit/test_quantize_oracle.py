"""Every format against a second implementation: numpy scalars, one block at a time, casts by ml_dtypes.

Where the golden vectors stop (ragged shapes, extreme exponents, zero blocks beside others, transposed views)
this oracle goes on. It repeats the rules of the format table literally and shares no code with the package.
"""

import math
from fractions import Fraction

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch

import fp4core
from fp4core import formats

F32 = np.float32
FLT_MAX = np.finfo(F32).max
UE5M3 = gfloat.FormatInfo(
    "ue5m3", 8, 4, bias=15, is_signed=False, domain=gfloat.Domain.Extended, has_nz=False, num_high_nans=7,
    has_subnormals=True, is_twos_complement=False,
)  # fmt: skip


def e4m3(v) -> F32:
    return F32(min(v, F32(448)).astype(ml_dtypes.float8_e4m3fn))


def e2m1(y: np.ndarray) -> np.ndarray:
    return np.clip(y, F32(-6), F32(6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def floor_log2(x: Fraction) -> int:
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def ceil_log2(x: Fraction) -> int:
    e = floor_log2(x)
    return e if Fraction(2) ** e == x else e + 1


def mx_block(name: str, block: np.ndarray, amax: F32) -> tuple[int, np.ndarray]:
    exact = Fraction(float(amax))
    if name in ("mxfp4", "mxfp4_w2d"):
        exponent = ceil_log2(exact)
    elif name == "mxfp4_decode":
        exponent = floor_log2(exact)
    elif name == "mxfp4_ocp":
        exponent = floor_log2(exact) - 2
    elif name == "mxfp4_rceil":
        exponent = ceil_log2(exact / 6)
    else:  # even: from 1.75 x 2^e on, the mantissa rounds up to the next power of two
        exponent = floor_log2(exact)
        exponent += (exact >= Fraction(7, 4) * Fraction(2) ** exponent) - 2
    byte = min(max(exponent + 127, 0), 254)
    if name == "mxfp4_w2d" and byte > 1 and amax < F32(0.87) * F32(2.0 ** (byte - 127)):
        byte -= 1
    six = 6 if name in ("mxfp4", "mxfp4_w2d", "mxfp4_decode") else 1
    exact_y = block.astype(np.float64) / 2.0 ** (byte - 127) * six
    return byte, e2m1(exact_y.astype(F32))


def oracle(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """codes [R, C], scale bytes on the block grid, outer scale; contraction along columns of BF16 values."""
    fmt = formats.get(name)
    br, bc = fmt.block
    rows, cols = x.shape
    grid = (math.ceil(rows / br), math.ceil(cols / bc))
    codes, byte = np.zeros(x.shape, np.uint8), np.zeros(grid, np.uint8)
    tensor_amax = F32(np.abs(x).max())
    stripe = F32([np.abs(x[i : i + 256]).max() for i in range(0, rows, 256)]) / F32(448)
    for i, j in np.ndindex(grid):
        at = np.s_[i * br : (i + 1) * br, j * bc : (j + 1) * bc]
        block = x[at].astype(F32)
        amax = F32(np.abs(block).max())
        if amax == 0:
            byte[i, j] = 120 if name.startswith("ue5m3") else 0
            continue
        if fmt.block_scale == "e8m0":
            byte[i, j], codes[at] = mx_block(name, block, amax)
            continue
        if fmt.algorithm == "nv_te":
            enc = min(F32(2688) / tensor_amax, FLT_MAX)
            s = e4m3(min(amax * (enc * F32(1 / 6)), FLT_MAX))
            multiplier = min(F32(1) / (s * (F32(1) / enc)), FLT_MAX)
        elif fmt.algorithm == "nv_global":
            enc = min(F32(2688) / tensor_amax, FLT_MAX)
            m = e4m3(F32(6) / (amax * enc))
            s, multiplier = e4m3(F32(1) / m), min(m * enc, FLT_MAX)
        elif fmt.algorithm == "nv_cta":
            r, c = i * br // 128 * 128, j * bc // 128 * 128
            chunk = F32(np.abs(x[r : r + 128, c : c + 128]).max())
            enc, g = min(F32(448) / chunk, FLT_MAX), chunk / F32(448)
            m = e4m3(F32(6) / (amax * enc))
            outer = tensor_amax / F32(448) if fmt.two_d else stripe[i // 256]
            s = e4m3(F32(1) / m) * g / outer
            s = e4m3(max(s, F32(2**-9)) if fmt.two_d and s > 0 else s)
            multiplier = min(m * enc, FLT_MAX)
        else:
            exact = Fraction(float(amax)) * 448 / Fraction(float(tensor_amax))
            s = F32(gfloat.round_float(UE5M3, float(exact), sat=True)) or F32(1)
            multiplier = min(F32(1) / (s * (tensor_amax / F32(2688))), FLT_MAX)
            byte[i, j] = gfloat.encode_float(UE5M3, float(s))
        if fmt.block_scale == "e4m3":
            byte[i, j] = s.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        codes[at] = e2m1(block * multiplier)
    outer = {
        "constant": F32(fmt.outer_constant or 0),
        "tensor": tensor_amax / F32(fmt.outer_divisor or 1),
        "stripe": stripe,
    }[fmt.outer]
    return codes, byte, outer


def sample(family: str, shape: tuple[int, int], seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if family == "exponents":
        x *= 2.0 ** rng.integers(-30, 30, shape)
    elif family == "blocks":  # rows and column groups of very different size, some of them all zero
        x *= 2.0 ** rng.integers(-20, 20, (shape[0], 1)) * 2.0 ** (np.arange(shape[1]) // 16 % 24 - 12.0)
        x[rng.random(shape) < 0.2] = -0.0
        x[:, 16:48] = 0.0
        x[1:, 48:64] = -0.0
    elif family == "subnormal":
        x *= 2.0**-127
    elif family == "huge":
        x = np.clip(x * 1.5e38, -3.38e38, 3.38e38)
    elif family == "powers":  # amax exactly at a power of two, or one BF16 step off
        x = np.sign(x) * 2.0 ** rng.integers(-3, 3, shape) * rng.choice([1, 1 + 2**-7, 1 - 2**-8], shape)
    return torch.from_numpy(x).float().bfloat16()


SHAPES = {"odd": (33, 75), "one_row": (1, 130), "chunks": (300, 150), "one_column": (40, 1)}
FAMILIES = ["normal", "exponents", "blocks", "subnormal", "huge", "powers"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", formats.names())
def test_equals_the_scalar_oracle(name, shape, family):
    x = sample(family, shape, seed=7)
    with np.errstate(all="ignore"):
        codes, byte, outer = oracle(x.float().numpy(), name)
    q = fp4core.quantize(x, name)
    np.testing.assert_array_equal(q.block_scale.numpy(), byte)
    np.testing.assert_array_equal(q.outer_scale.numpy(), outer)
    np.testing.assert_array_equal(q.unpack().numpy(), codes)
    # the column view of the transpose is the row view
    t = fp4core.quantize(x.T.contiguous(), name, transposed=True)
    assert t.shape == x.shape
    assert torch.equal(t.codes, q.codes) and torch.equal(t.block_scale, q.block_scale)
    assert torch.equal(t.outer_scale, q.outer_scale)


def positive_bf16() -> np.ndarray:
    return (np.arange(1, 0x7F80, dtype=np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("name", [n for n in formats.names() if n.startswith("mxfp4")])
def test_mx_scale_byte_of_every_bf16_amax(name):
    amax = positive_bf16()
    rows = formats.get(name).block_rows
    x = torch.zeros(rows * len(amax), 32)
    x[::rows, 5] = torch.from_numpy(amax)
    got = fp4core.quantize(x, name).block_scale[:, 0].numpy()
    want = [mx_block(name, np.zeros((1, 1), F32), a)[0] for a in amax]
    np.testing.assert_array_equal(got, want)
