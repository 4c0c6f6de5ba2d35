"""E2M1, E4M3, UE5M3 and E8M0 against ml_dtypes and gfloat, exhaustively where finite."""

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e4m3

from fp4core.reference import casts

UE5M3 = gfloat.FormatInfo(
    "ue5m3", 8, 4, bias=15, is_signed=False, domain=gfloat.Domain.Extended, has_nz=False, num_high_nans=7,
    has_subnormals=True, is_twos_complement=False,
)  # fmt: skip


def all_bf16(nonnegative: bool = False) -> np.ndarray:
    """Every BF16 value that is not NaN."""
    bits = np.arange(0x8000 if nonnegative else 0x10000, dtype=np.uint32) << 16
    x = bits.view(np.float32)
    return x[~np.isnan(x)]


def around(points: np.ndarray) -> np.ndarray:
    """Points and the FP32 numbers just above and below."""
    points = points.astype(np.float32)
    return np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, -points)])


def random_bits(n: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)
    return x[~np.isnan(x)]


def e2m1_inputs() -> np.ndarray:
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, 8], dtype=np.float32)
    dense = np.random.default_rng(0).uniform(-7, 7, 1 << 18).astype(np.float32)
    return np.concatenate([all_bf16(), around(grid), around(-grid), random_bits(1 << 18, 1), dense])


def test_e2m1_nearest_equals_ml_dtypes_and_gfloat():
    x = e2m1_inputs()
    q = casts.e2m1_nearest_(torch.from_numpy(x.copy()))
    codes = casts.e2m1_codes(q).numpy()
    clipped = np.clip(x, -6, 6)
    np.testing.assert_array_equal(codes, clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15)
    want = gfloat.round_ndarray(format_info_ocp_e2m1, clipped.astype(np.float64), sat=True)
    np.testing.assert_array_equal(q.numpy(), want)
    np.testing.assert_array_equal(np.signbit(q.numpy()), np.signbit(x))  # -0 and negative underflow stay -0


def test_e2m1_ties_and_zeros_spelled_out():
    x = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 0.0, -0.0, -0.1, -0.25, 1e30, -float("inf")]
    )
    want = [0, 2, 2, 4, 4, 6, 6, 7, 0, 8, 8, 8, 7, 15]
    assert casts.e2m1_codes(casts.e2m1_nearest_(x)).tolist() == want


def test_e2m1_codes_decode_round_trip():
    codes = torch.arange(16, dtype=torch.uint8)
    values = casts.e2m1_decode(codes)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(casts.e2m1_codes(values), codes)


def midpoints(values: np.ndarray) -> np.ndarray:
    values = np.unique(values[np.isfinite(values)])
    return around((values[1:].astype(np.float64) + values[:-1]) / 2)


def scale_inputs(table: np.ndarray) -> np.ndarray:
    return np.abs(np.concatenate([all_bf16(nonnegative=True), midpoints(table), random_bits(1 << 17, 2)]))


def test_e4m3_equals_ml_dtypes_and_gfloat():
    table = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    x = np.concatenate(
        [all_bf16(nonnegative=True), np.abs(midpoints(table)), np.abs(random_bits(1 << 17, 2))]
    )
    byte, value = casts.e4m3_round(torch.from_numpy(x))
    want = np.minimum(x, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(byte.numpy(), want.view(np.uint8))
    np.testing.assert_array_equal(value.numpy(), want.astype(np.float32))
    fi = gfloat.round_ndarray(format_info_ocp_e4m3, x.astype(np.float64), sat=True)
    np.testing.assert_array_equal(value.numpy(), fi)


def test_ue5m3_equals_gfloat():
    table = np.array([gfloat.decode_float(UE5M3, i).fval for i in range(256)])
    assert table[np.isfinite(table)].max() == 61440 and table[1] == 2.0**-17 and table[120] == 1.0
    decoded = casts.ue5m3_decode(torch.arange(256).to(torch.uint8)).numpy()
    np.testing.assert_array_equal(decoded[:0xF8], table[:0xF8])
    assert np.isnan(decoded[0xF8:]).all()

    x = np.concatenate(
        [all_bf16(nonnegative=True), np.abs(midpoints(table)), np.abs(random_bits(1 << 17, 3))]
    )
    byte, value = casts.ue5m3_round(torch.from_numpy(x))
    want = gfloat.round_ndarray(UE5M3, x.astype(np.float64), sat=True)
    np.testing.assert_array_equal(value.numpy(), want)
    np.testing.assert_array_equal(casts.ue5m3_decode(byte).numpy(), want)


@pytest.mark.parametrize("cast", [casts.e4m3_round, casts.ue5m3_round], ids=["e4m3", "ue5m3"])
def test_nan_gives_the_nan_byte(cast):
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    byte, value = cast(nans)
    assert byte.tolist() == [0x7F if cast is casts.e4m3_round else 0xFF] * 3
    assert value.isnan().all()


def test_scale_bytes_decode_like_ml_dtypes():
    byte = torch.arange(256).to(torch.uint8)
    for decode, dtype in (
        (casts.e8m0_decode, ml_dtypes.float8_e8m0fnu),
        (casts.e4m3_decode, ml_dtypes.float8_e4m3fn),
    ):
        np.testing.assert_array_equal(decode(byte).numpy(), byte.numpy().view(dtype).astype(np.float32))
