"""The public functions: shapes, packing, transposes, dual views, held amax, backends, errors."""

import pytest
import torch

import fp4core
from fp4core import SRKey, formats
from fp4core.ops import backends, fake_quant, te_support
from fp4core.recipe import Operand

TILES = [n for n in formats.names() if formats.get(n).two_d]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def same(a: fp4core.QuantizedTensor, b: fp4core.QuantizedTensor) -> bool:
    pairs = [(a.codes, b.codes), (a.block_scale, b.block_scale), (a.outer_scale, b.outer_scale)]
    return a.shape == b.shape and all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("shape", [(256, 384), (100, 75)], ids=["whole", "ragged"])
def test_weight_and_its_transpose_carry_one_encoding(name, shape):
    w = randn(*shape, seed=1) * torch.logspace(-2, 2, shape[1])
    rows, cols = fp4core.quantize(w, name), fp4core.quantize(w.T.contiguous(), name)
    assert torch.equal(rows.unpack(), cols.unpack().T)
    assert torch.equal(rows.block_scale, cols.block_scale.T)
    assert torch.equal(rows.outer_scale, cols.outer_scale)
    assert torch.equal(rows.dequantize(), cols.dequantize().T)
    assert same(cols, fp4core.quantize(w, name, transposed=True))


def test_packing_puts_the_even_index_low():
    q = fp4core.quantize(torch.tensor([[0.5, 6.0, -1.0]]), "mxfp4_ocp")
    assert q.unpack().tolist() == [[1, 7, 10]]
    assert q.codes.tolist() == [[0x71, 0x0A]]


def test_shapes_with_leading_axes():
    x = randn(2, 3, 70)
    q = fp4core.quantize(x, "nvfp4")
    assert (q.codes.shape, q.block_scale.shape, q.outer_scale.shape) == ((2, 3, 35), (2, 3, 5), ())
    assert (q.format, q.shape, q.backend) == ("nvfp4", x.shape, "reference")
    flat = fp4core.quantize(x.reshape(6, 70), "nvfp4")
    assert torch.equal(q.unpack().reshape(6, 70), flat.unpack())
    one = fp4core.quantize(x[0, 0], "mxfp4")
    assert one.codes.shape == (35,) and one.dequantize().shape == (70,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_inputs_are_rounded_to_bf16_first(dtype):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert same(fp4core.quantize(x, "nvfp4"), fp4core.quantize(x.bfloat16(), "nvfp4"))


def test_inputs_are_not_changed_and_may_be_strided():
    x = torch.randn(64, 96)
    before = x.clone()
    assert same(fp4core.quantize(x.T, "mxfp4"), fp4core.quantize(x.T.contiguous(), "mxfp4"))
    fake_quant(x, Operand("mxfp4", "nearest", "fixed16"))
    assert torch.equal(x, before)


def test_quantisers_stay_out_of_autograd():
    w = torch.randn(64, 96, requires_grad=True)
    assert same(fp4core.quantize(w, "mxfp4_w2d"), fp4core.quantize(w.detach(), "mxfp4_w2d"))
    assert not fake_quant(w, Operand("mxfp4_w2d", "nearest", "none")).requires_grad
    assert not fp4core.quantize(w, "nvfp4").dequantize().requires_grad


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", formats.names())
def test_fake_quant_equals_quantise_then_dequantise(name, rounding, columns):
    x = randn(300, 150, seed=4) * torch.logspace(-3, 3, 150)
    key = SRKey(1, 2, 3, offset=150 * 5)
    for hadamard in ("none", "fixed32"):
        fake = fake_quant(x, Operand(name, rounding, hadamard), key=key, transposed=columns)
        q = fp4core.quantize(x, name, rounding=rounding, hadamard=hadamard, key=key, transposed=columns)
        assert fake.dtype == torch.float32 and fake.shape == q.shape
        assert torch.equal(fake.contiguous().view(torch.int32), q.dequantize().view(torch.int32))


def test_dual_views_equal_two_single_ones():
    dy = randn(3, 32, 48, seed=5)
    row_key, col_key = SRKey(1, 2, 8), SRKey(1, 2, 9)
    sr = Operand("mxfp4", "stochastic", "none")
    column = {"format": "nvfp4_te", "rounding": "stochastic", "hadamard": "fixed16"}
    rows, cols = fp4core.quantize_dual(dy, row=sr, col=column, row_key=row_key, col_key=col_key)
    assert rows.shape == dy.shape and cols.shape == (48, 96)
    assert same(rows, fp4core.quantize(dy, "mxfp4", rounding="stochastic", key=row_key))
    assert same(cols, fp4core.quantize(dy, **column, key=col_key, transposed=True))
    plain, _ = fp4core.quantize_dual(dy, row="nvfp4_cta", col="mxfp4")
    assert same(plain, fp4core.quantize(dy, "nvfp4_cta"))
    with pytest.raises(ValueError, match="both views use producer 8"):
        fp4core.quantize_dual(dy, row=sr, col=sr, row_key=row_key, col_key=SRKey(1, 2, 8))
    with pytest.raises(ValueError, match="a view is a format name"):
        fp4core.quantize_dual(dy, row="mxfp4", col={"fmt": "mxfp4"})


@pytest.mark.parametrize("name", ["ue5m3", "ue5m3_w2d"])
def test_held_amax(name):
    x = randn(64, 64, seed=6)
    own = x.float().abs().max()
    assert same(fp4core.quantize(x, name), fp4core.quantize(x, name, amax=own))
    held = fp4core.quantize(x, name, amax=own / 2)
    assert held.outer_scale == own / 2 / 2688
    # block scales reach beyond 448, so an outgrown amax costs precision of nothing but the scale grid
    assert held.dequantize().abs().max() > 0.9 * own
    assert same(fp4core.quantize(x, name, amax=0.0), fp4core.quantize(x, name))  # nothing seen yet
    operand = Operand(name, "nearest", "none")
    assert torch.equal(fake_quant(x, operand, amax=own / 2), held.dequantize())
    for amax, message in ((torch.ones(2), "needed one value"), (torch.ones(1, 2), "needed one value")):
        with pytest.raises(ValueError, match=message):
            fp4core.quantize(x, name, amax=amax)
    with pytest.raises(ValueError, match="only ue5m3, ue5m3_w2d take a held one"):
        fp4core.quantize(x, "nvfp4", amax=1.0)


SR = {"rounding": "stochastic"}
VECTOR = {"x": torch.ones(32)}
BAD_CALLS = {
    "format": ({"format": "mxpf4"}, "did you mean 'mxfp4'"),
    "bf16": ({"format": "bf16"}, "unknown format 'bf16'"),
    "rounding": ({"rounding": "up"}, "rounding: got 'up'; needed 'nearest' or 'stochastic'"),
    "no key": (SR, "stochastic rounding needs key=fp4core.SRKey"),
    "key of another type": (SR | {"key": 7}, r"needs key=fp4core.SRKey.*got 7"),
    "hadamard": ({"hadamard": "h16"}, "hadamard: got 'h16'; needed None, 'plain16'"),
    "backend": ({"backend": "cuda"}, "backend: got 'cuda'; needed 'auto' or one of reference"),
    "0-dim": ({"x": torch.tensor(1.0)}, "0-dim tensor"),
    "integers": ({"x": torch.ones(2, 32, dtype=torch.int32)}, "got dtype torch.int32"),
    "list": ({"x": [1.0]}, "got list; needed a torch tensor"),
    "tiles of a vector": (VECTOR | {"format": "nvfp4_w2d"}, "16 x 16 tiles and needs a 2-dim tensor"),
    "transposed vector": (VECTOR | {"transposed": True}, "transposed needs at least two axes"),
}


@pytest.mark.parametrize(("change", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls(change, message):
    with pytest.raises(ValueError, match=message):
        fp4core.quantize(**({"x": torch.ones(2, 32), "format": "mxfp4"} | change))


def test_backends_say_what_runs_and_why_not():
    found = fp4core.backends()
    assert tuple(found) == backends.NAMES
    assert found["reference"].available and "cpu" in found["reference"].device
    for name, backend in found.items():
        assert backend.name == name and backend.reason
        if not torch.cuda.is_available() and name != "reference":
            assert not backend.available and "no CUDA GPU" in backend.reason


GPUS = {  # description and compute capability -> backends whose hardware needs are met
    "A100 (sm_80)": (80, {"carrier"}),
    "L40S (sm_89)": (89, {"carrier"}),
    "H200 (sm_90)": (90, {"carrier"}),
    "B200 (sm_100)": (100, {"carrier", "native", "te"}),
    "B300 (sm_103)": (103, {"carrier", "native", "te"}),
    "RTX 5090 (sm_120)": (120, {"carrier", "te"}),
    "GB10 (sm_121)": (121, {"carrier", "te"}),
    "V100 (sm_70)": (70, set()),
}


@pytest.mark.parametrize("gpu", GPUS)
def test_backends_by_compute_capability(gpu, monkeypatch):
    capability, fit = GPUS[gpu]
    monkeypatch.setattr(backends, "_gpu", lambda: (gpu, capability))
    monkeypatch.setattr(backends, "_kernel_problem", lambda name: "")
    monkeypatch.setattr(te_support, "problem", lambda: "")
    monkeypatch.setattr(te_support, "version_problem", lambda: "")
    found = backends.backends()
    assert {name for name, b in found.items() if b.available} == fit | {"reference"}
    for name, backend in found.items():
        assert backend.available or f"{gpu} lacks what it needs" in backend.reason
        assert gpu in backend.device, name
    monkeypatch.setattr(backends, "_kernel_problem", lambda name: "no Triton")
    assert not any(backends.backends()[name].available for name in ("carrier", "native"))


@pytest.mark.parametrize("name", ["carrier", "native", "te"])
def test_an_unusable_backend_is_refused(name):
    with pytest.raises(ValueError, match=f"backend '{name}' cannot quantize here: "):
        fp4core.quantize(torch.ones(2, 32), "mxfp4", backend=name)
