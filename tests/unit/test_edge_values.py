"""Zeros, negative zeros, NaN, infinities, subnormals, odd and empty shapes, padding."""

import pytest
import torch

import fp4core
from fp4core import formats

NAMES = formats.names()
MX = [n for n in NAMES if formats.get(n).block_scale == "e8m0"]
TENSOR_WIDE = [n for n in NAMES if formats.get(n).outer == "tensor"]
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}
NAN_BYTE = {"e8m0": 0xFF, "e4m3": 0x7F, "ue5m3": 0xFF}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("zero", [0.0, -0.0], ids=["plus", "minus"])
def test_all_zero_tensor(name, zero):
    q = fp4core.quantize(torch.full((64, 64), zero), name)
    assert (q.block_scale == (120 if name.startswith("ue5m3") else 0)).all()
    assert (q.codes == 0).all()
    assert (q.dequantize().view(torch.int32) == 0).all()


@pytest.mark.parametrize("hadamard", ["plain16", "fixed16", "fixed32"])
def test_rotated_zeros_stay_positive_zeros(hadamard):
    q = fp4core.quantize(torch.zeros(4, 64), "mxfp4", hadamard=hadamard)
    assert not q.codes.any() and not q.block_scale.any()


@pytest.mark.parametrize("name", NAMES)
def test_zero_block_beside_others(name):
    x = randn(32, 128)
    x[:, 32:64] = 0
    q = fp4core.quantize(x, name)
    columns = slice(32 // formats.get(name).block_cols, 64 // formats.get(name).block_cols)
    assert (q.block_scale[:, columns] == (120 if name.startswith("ue5m3") else 0)).all()
    assert (q.unpack()[:, 32:64] == 0).all() and (q.dequantize()[:, 32:64] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_negative_zero_and_underflow_keep_their_sign(name):
    x = torch.full((32, 32), 1.0)
    x[0, 1], x[0, 2], x[0, 3] = -0.0, 0.0, -1e-6
    q = fp4core.quantize(x, name)
    assert q.unpack()[0, 1:4].tolist() == [8, 0, 8]
    assert q.dequantize()[0, 1:4].view(torch.int32).tolist() == [-(1 << 31), 0, -(1 << 31)]


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", MX)
def test_non_finite_poisons_its_own_mx_block(name, value):
    x = randn(64, 96)
    clean = fp4core.quantize(x, name)
    x[1, 40] = value
    q = fp4core.quantize(x, name)
    bad = torch.zeros_like(q.block_scale, dtype=torch.bool)
    bad[0 if formats.get(name).two_d else 1, 1] = True
    assert (q.block_scale[bad] == 0xFF).all()
    assert torch.equal(q.block_scale[~bad], clean.block_scale[~bad])
    rows = slice(0, 32) if formats.get(name).two_d else slice(1, 2)
    nan = q.dequantize().isnan()
    assert nan[rows, 32:64].all() and nan.sum() == nan[rows, 32:64].numel()
    assert (q.unpack()[rows, 32:64] == 0).all()
    same = ~nan
    assert torch.equal(q.unpack()[same], clean.unpack()[same])


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", TENSOR_WIDE)
def test_non_finite_poisons_everything_under_a_tensor_amax(name, value):
    x = randn(40, 72)
    x[:, 16:32] = 0
    x[3, 3] = value
    q = fp4core.quantize(x, name)
    assert q.dequantize().isnan().all() and q.outer_scale.isnan()
    assert (q.block_scale == NAN_BYTE[formats.get(name).block_scale]).all()


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_non_finite_poisons_its_stripe(value):
    x = randn(600, 160)
    clean = fp4core.quantize(x, "nvfp4_cta")
    x[300, 150] = value
    q = fp4core.quantize(x, "nvfp4_cta")
    nan = q.dequantize().isnan()
    assert nan[256:512].all() and not nan[:256].any() and not nan[512:].any()
    assert q.outer_scale.isnan().tolist() == [False, True, False]
    assert (q.block_scale[256:512] == 0x7F).all()
    assert torch.equal(q.codes[:256], clean.codes[:256]) and torch.equal(q.codes[512:], clean.codes[512:])


@pytest.mark.parametrize("name", ["ue5m3", "ue5m3_w2d"])
def test_held_amax_confines_a_nan_to_its_block(name):
    x = randn(32, 64)
    x[0, 20] = float("nan")
    q = fp4core.quantize(x, name, amax=4.0)
    assert (q.block_scale == 0xFF).sum() == 1 and q.block_scale[0, 1] == 0xFF
    assert q.dequantize().isnan().sum() == (16 if name == "ue5m3" else 256)
    assert fp4core.quantize(x, name, amax=float("nan")).dequantize().isnan().all()


def test_fake_quant_agrees_on_non_finite_values():
    for name in NAMES:
        x = randn(300, 64)
        x[290, 3] = float("inf")
        operand = fp4core.recipe.Operand(name, "nearest", "none")
        want = fp4core.quantize(x, name).dequantize()
        torch.testing.assert_close(fp4core.ops.fake_quant(x, operand), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_decode"])
def test_mx_extremes_of_bf16(name):
    tiny, huge = 2.0**-133, torch.finfo(torch.bfloat16).max
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 0], x[1, 1] = tiny, huge, -huge
    q = fp4core.quantize(x, name)
    assert q.block_scale.flatten().tolist() == [0, 254]
    # 2^-133 is 1/64 of the smallest scale, below a quarter of the first code
    assert q.unpack()[0, 0] == 0 and q.unpack()[1, :2].tolist() == [7, 15]
    assert q.dequantize().isfinite().all()


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (2, 0, 32), (3, 2, 0)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_empty(name, shape):
    if formats.get(name).two_d and len(shape) > 2:
        with pytest.raises(ValueError, match="2-dim"):
            fp4core.quantize(torch.zeros(shape), name)
        return
    q = fp4core.quantize(torch.zeros(shape), name)
    assert q.shape == q.unpack().shape == q.dequantize().shape == shape
    t = fp4core.quantize(torch.zeros(shape), name, transposed=True)
    assert t.dequantize().shape == (shape[-1], 0 if len(shape) == 2 and shape[0] == 0 else t.shape[1])


ODD = [(1, 1), (3, 7), (63, 100), (130, 257), (2, 5, 33)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [(n, s) for n in NAMES for s in ODD if len(s) == 2 or not formats.get(n).two_d],  # tiles need a matrix
    ids=str,
)
def test_padding_never_reaches_a_result(name, shape):
    fmt = formats.get(name)
    x = randn(*shape, seed=3)
    q = fp4core.quantize(x, name)
    k = shape[-1]
    assert q.shape == x.shape and q.codes.shape == (*shape[:-1], -(-k // 2))
    assert q.block_scale.shape[-1] == -(-k // fmt.block_cols)
    x2d = x.reshape(-1, k)
    padded = torch.zeros(-(-x2d.shape[0] // 256) * 256, -(-k // 128) * 128)
    padded[: x2d.shape[0], :k] = x2d
    p = fp4core.quantize(padded, name)
    rows = x2d.shape[0]
    assert torch.equal(p.unpack()[:rows, :k], q.unpack().reshape(-1, k))
    assert torch.equal(p.dequantize()[:rows, :k], q.dequantize().reshape(-1, k))
    assert torch.equal(p.outer_scale, q.outer_scale)
    if k % 2:
        assert (q.codes[..., -1] >> 4 == 0).all()  # the pad nibble
