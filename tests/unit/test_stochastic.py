"""Stochastic rounding: gfloat's StochasticFast byte for byte, unbiased, reproducible, decorrelated."""

import itertools

import gfloat
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_ocp_e2m1

import fp4core
from fp4core import SRKey, formats
from fp4core.reference import casts, quantize_2d, random_bytes


def gfloat_fast(y: np.ndarray, r: np.ndarray) -> np.ndarray:
    mode = gfloat.RoundMode.StochasticFast
    y64 = np.clip(y.astype(np.float64), -6, 6)
    bits = r.astype(np.int64)
    return gfloat.round_ndarray(format_info_ocp_e2m1, y64, mode, sat=True, srbits=bits, srnumbits=8)


def test_equals_gfloat_for_every_byte():
    rng = np.random.default_rng(0)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    # every decision threshold of every interval, and its FP32 neighbours
    thresholds = np.concatenate(
        [lo + (hi - lo) * (511 - 2 * np.arange(256)) / 512 for lo, hi in itertools.pairwise(grid)]
    )
    points = np.concatenate([grid, thresholds]).astype(np.float32)
    tiny = np.float32([1e-45, 1e-38, 2**-30, 2**-24, 2**-12, 1e30, np.inf])
    up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))
    y = np.concatenate([points, up, down, tiny, rng.uniform(0, 7, 4096).astype(np.float32)])
    for r in range(0, 256, 5):
        sign = rng.choice(np.float32([-1, 1]), y.shape)
        random = np.full(y.shape, r, dtype=np.uint8)
        got = casts.e2m1_stochastic_(torch.from_numpy(y * sign), torch.from_numpy(random)).numpy()
        want = gfloat_fast(y * sign, random)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(y * sign))


def test_mean_over_all_bytes_is_unbiased_inside_the_range():
    y = torch.linspace(-6, 6, 4001)
    mean = torch.zeros_like(y, dtype=torch.float64)
    for r in range(256):
        mean += casts.e2m1_stochastic_(y.clone(), torch.full(y.shape, r, dtype=torch.uint8)) / 256
    step = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
    # 256 equidistant thresholds in the middle of their cells: the mean is off by at most half a cell
    assert ((mean - y).abs() <= step / 512).all()


def y_of(x: torch.Tensor, q: fp4core.QuantizedTensor) -> np.ndarray:
    """What E2M1 rounds in ``mxfp4``: 6x / s."""
    s = casts.e8m0_decode(q.block_scale).repeat_interleave(32, -1)[..., : x.shape[-1]]
    return (x.double() * 6 / s.double()).float().numpy()


@pytest.mark.parametrize("shape", [(8, 64), (5, 75)], ids=["whole", "ragged"])
def test_row_view_draws_bytes_by_place(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    key = SRKey(11, 3, 40, offset=shape[1] * 7)
    q = fp4core.quantize(x, "mxfp4", rounding="stochastic", key=key)
    want = gfloat_fast(y_of(x, q), random_bytes(*shape, key).numpy())
    np.testing.assert_array_equal(casts.e2m1_decode(q.unpack()).numpy(), want)
    # scales are those of nearest rounding
    assert torch.equal(q.block_scale, fp4core.quantize(x, "mxfp4").block_scale)


def test_column_view_uses_places_of_the_untransposed_tensor():
    x = torch.randn(96, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    key = SRKey(11, 3, 41, offset=40 * 32)
    q = fp4core.quantize(x, "mxfp4", rounding="stochastic", key=key, transposed=True)
    want = gfloat_fast(y_of(x.T, q), random_bytes(96, 40, key).numpy().T)
    np.testing.assert_array_equal(casts.e2m1_decode(q.unpack()).numpy(), want)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_shards_round_like_the_whole_batch(transposed):
    x = torch.randn(4, 32, 48, generator=torch.Generator().manual_seed(3)).bfloat16()

    def codes(part: torch.Tensor, token: int) -> torch.Tensor:
        key = SRKey(5, 9, 2, offset=token * 48)
        q = fp4core.quantize(part, "mxfp4", rounding="stochastic", key=key, transposed=transposed)
        return q.unpack() if transposed else q.unpack().reshape(-1, 48)

    whole = codes(x, 0)
    parts = torch.cat([codes(x[i], 32 * i) for i in range(4)], dim=1 if transposed else 0)
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4_te", "nvfp4", "nvfp4_cta", "ue5m3"])
def test_mean_over_steps_approaches_the_input(name):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    fmt, draws = formats.get(name), 400
    values = torch.zeros(32, 64, dtype=torch.float64)
    for step in range(draws):
        q = quantize_2d(x, fmt, key=SRKey(1, step, 7))
        values += q.values / draws
    scales, block = q.scales, fmt.block_cols
    y = x.double() * scales.multiplier.double().repeat_interleave(block, 1) * scales.post  # in code units
    step = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
    inside = y.abs() < 6
    assert inside.double().mean() > 0.9
    # a two-point draw has standard deviation <= step / 2; 6 sigma for 2048 elements, plus 1/512 step of bias
    error = (values - y) / step
    assert (error.abs()[inside] <= 6 * 0.5 / draws**0.5 + 1 / 512).all()
    # no common drift: the mean residual of all elements averages over draws x elements
    assert error[inside].mean().abs() < 5 * 0.5 / (draws * inside.sum().item()) ** 0.5 + 1 / 512
    if fmt.direction == "decode" or fmt.block_scale == "e8m0":
        # the multiplier inverts the stored scale, so decoded values are unbiased too; encode-centric NVFP4
        # rounds M and s apart, and each block keeps the gain M S s outer (within 1/8 of 1)
        gain = scales.multiplier.double() * scales.post * scales.value.double() * scales.outer.double()
        torch.testing.assert_close(gain, torch.ones_like(gain), rtol=1e-6, atol=0)


def residual(x: torch.Tensor, key: SRKey, transposed: bool) -> torch.Tensor:
    q = fp4core.quantize(x, "mxfp4", rounding="stochastic", key=key, transposed=transposed).dequantize()
    return ((q.T if transposed else q) - x.float()).reshape(-1).double()


def test_views_and_steps_are_uncorrelated():
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    base = residual(x, SRKey(1, 0, 8), transposed=False)
    bound = 5 / 256  # five standard deviations of the correlation of 65536 pairs
    others = {
        "column view": residual(x, SRKey(1, 0, 9), transposed=True),
        "next step": residual(x, SRKey(1, 1, 8), transposed=False),
        "other seed": residual(x, SRKey(2, 0, 8), transposed=False),
    }
    for name, other in others.items():
        assert abs(torch.corrcoef(torch.stack((base, other)))[0, 1]) < bound, name
    same = residual(x, SRKey(1, 0, 8), transposed=False)
    assert torch.equal(base, same)
    # neighbours in a row, which share a Philox block
    assert abs(torch.corrcoef(torch.stack((base[:-1], base[1:])))[0, 1]) < bound
