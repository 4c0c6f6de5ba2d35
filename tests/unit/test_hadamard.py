"""Signed Hadamard rotation: the matrix, the exact FP32 order, paired cancellation, ragged tails."""

import numpy as np
import pytest
import scipy.linalg
import torch

import fp4core
from fp4core.ops import fake_quant
from fp4core.recipe import Operand
from fp4core.reference import hadamard

NAMES = ("plain16", "fixed16", "fixed32")
GROUP = {"plain16": 16, "fixed16": 16, "fixed32": 32}
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]  # 0x2817, bit 0 first


def matrix(name: str) -> np.ndarray:
    n = GROUP[name]
    signs = np.ones(n) if name == "plain16" else np.tile(SIGNS, n // 16)
    return scipy.linalg.hadamard(n) * signs / np.sqrt(n)


@pytest.mark.parametrize("name", NAMES)
def test_is_the_signed_sylvester_matrix(name):
    h = matrix(name)
    got = hadamard.rotate(torch.eye(GROUP[name]), name, axis=1).T  # row i is H e_i
    # entries are +-1/sqrt(n): BF16 rounding is at most half a unit in 2^-8
    np.testing.assert_allclose(got.numpy(), h, rtol=2**-9)
    np.testing.assert_allclose(h @ h.T, np.eye(GROUP[name]), atol=1e-15)


def butterfly(x: np.ndarray, name: str) -> np.ndarray:
    """The documented order, one FP32 operation at a time."""
    n = GROUP[name]
    v = [np.float32(a) if name == "plain16" or SIGNS[i % 16] > 0 else -np.float32(a) for i, a in enumerate(x)]
    for h in (1, 2, 4, 8, 16)[: n.bit_length() - 1]:
        for i in range(n):
            if not i & h:
                v[i], v[i + h] = v[i] + v[i + h], v[i] - v[i + h]
    scale = np.float32(0.25) if n == 16 else np.float32(1 / np.sqrt(32))
    return np.array([a * scale for a in v], dtype=np.float32)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_bits_follow_the_documented_order(name, axis):
    n = GROUP[name]
    rng = np.random.default_rng(3)
    # exponents far apart, so that the FP32 sums do round and their order shows
    x = rng.standard_normal((6, 3 * n)) * 2.0 ** rng.integers(-14, 14, (6, 3 * n))
    x = torch.from_numpy(x).bfloat16().float()
    want = np.stack([np.concatenate([butterfly(g, name) for g in row.reshape(3, n)]) for row in x.numpy()])
    want = torch.from_numpy(want).bfloat16().float()
    got = hadamard.rotate(x if axis == 1 else x.T.contiguous(), name, axis=axis)
    assert torch.equal(got if axis == 1 else got.T, want)


def test_scale_place_does_not_matter_for_h32():
    """H16 with its 1/4 on each half, then 1/sqrt(2): the same bits as one product with 1/sqrt(32)."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    v = (x * hadamard.signs("fixed32")).view(64, 2, 16)
    hadamard._butterfly_(v, 2)
    v = v * 0.25
    a, b = v[:, 0], v[:, 1]
    halves = torch.cat((a + b, a - b), dim=1) * torch.tensor(1 / np.sqrt(2), dtype=torch.float32)
    assert torch.equal(halves.bfloat16().float(), hadamard.rotate(x, "fixed32", axis=1))


@pytest.mark.parametrize("name", ["plain16", "fixed16"])
def test_paired_rotation_cancels_exactly_on_integers(name):
    # |x| <= 8: rotated values are multiples of 1/4 up to 32, exact in BF16
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randint(-8, 9, (64, 5), generator=g).float() for _ in range(2))
    bf16 = Operand("bf16", "nearest", name)
    product = fake_quant(x, bf16, transposed=True) @ fake_quant(y, bf16, transposed=True).T
    assert torch.equal(product, x.T @ y)


@pytest.mark.parametrize("tokens", [96, 75, 7], ids=["whole", "ragged", "short"])
@pytest.mark.parametrize("name", NAMES)
def test_paired_rotation_cancels_in_wgrad(name, tokens):
    g = torch.Generator().manual_seed(2)
    x, y = (torch.randn(tokens, 6, generator=g).bfloat16() for _ in range(2))
    bf16 = Operand("bf16", "nearest", name)
    rx, ry = (fake_quant(t, bf16, transposed=True).double() for t in (x, y))
    assert rx.shape == (6, tokens)
    want = x.double().T @ y.double()
    # each rotated value is off by at most 2^-9 of itself (BF16) plus FP32 noise
    bound = 2.1 * 2**-9 * rx.abs() @ ry.abs().T + 1e-12
    assert ((rx @ ry.T - want).abs() <= bound).all()


def test_tail_shorter_than_a_group_is_left_alone():
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    got = hadamard.rotate(x, "fixed32", axis=1)
    assert torch.equal(got[:, 32:], x[:, 32:])
    assert torch.equal(got[:, :32], hadamard.rotate(x[:, :32], "fixed32", axis=1))


def test_none_is_identity_and_weights_keep_their_bits():
    w = torch.randn(8, 16)
    before = w.clone()
    assert hadamard.rotate(w, None) is w and hadamard.check_hadamard("none") is None
    fp4core.quantize(w, "mxfp4", hadamard="fixed16")
    assert torch.equal(w, before)


def test_quantising_rotated_equals_rotating_then_quantising():
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(4)).bfloat16()
    rotated = hadamard.rotate(x.float(), "fixed32", axis=0)
    a = fp4core.quantize(x, "mxfp4", hadamard="fixed32", transposed=True)
    b = fp4core.quantize(rotated, "mxfp4", transposed=True)
    assert torch.equal(a.codes, b.codes) and torch.equal(a.block_scale, b.block_scale)
    assert (a.hadamard, b.hadamard) == ("fixed32", None)


@pytest.mark.parametrize("name", ["h16", "fixed64", "", 16])
def test_unknown_rotation(name):
    with pytest.raises(ValueError, match=r"hadamard: got .*plain16.*fixed32"):
        fp4core.quantize(torch.ones(2, 32), "mxfp4", hadamard=name)
