"""The FP4 contraction: exact products, outer scales in the epilogue, the report's operator gate."""

import pytest
import torch

import fp4core
from fp4core import formats


def randn(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def metrics(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float, float]:
    """Relative L2 error, cosine, norm ratio."""
    got = got.double()
    norms = got.norm() * want.norm()
    return (
        ((got - want).norm() / want.norm()).item(),
        ((got * want).sum() / norms).item(),
        (got.norm() / want.norm()).item(),
    )


# relative L2, cosine, norm ratio of the report's own GPU gate
GATE = {"mxfp4": ("fixed32", 0.1671, 0.98598, 0.9950), "nvfp4": (None, 0.1625, 0.98681, 1.0006)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", GATE)
def test_operator_gate_of_the_report(name, seed):
    rotation, *want = GATE[name]
    a, b = (randn(512, 512, seed=2 * seed + i, scale=512**-0.25) for i in range(2))
    got = fp4core.matmul(*(fp4core.quantize(t, name, hadamard=rotation) for t in (a, b)))
    assert metrics(got, a.double() @ b.double().T) == pytest.approx(want, rel=0.02)


def test_grid_values_multiply_exactly():
    # OCP scales of blocks with amax 6 are 1, so these values survive and every partial sum is exact
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    g = torch.Generator().manual_seed(0)
    a, b = (values[torch.randint(0, 8, (n, 96), generator=g)] for n in (5, 7))
    a[:, ::32] = b[:, ::32] = 6.0
    got = fp4core.matmul(fp4core.quantize(a, "mxfp4_ocp"), fp4core.quantize(b, "mxfp4_ocp"))
    assert torch.equal(got, a @ b.T)


@pytest.mark.parametrize("name", formats.names())
def test_equals_fp64_product_of_the_decoded_operands(name):
    a = randn(300, 150, seed=1) * torch.logspace(-3, 3, 300)[:, None]
    b = randn(270, 150, seed=2) * torch.logspace(2, -2, 270)[:, None]
    qa, qb = fp4core.quantize(a, name), fp4core.quantize(b, name)
    got = fp4core.matmul(qa, qb).double()
    da, db = qa.dequantize(torch.float64), qb.dequantize(torch.float64)
    # FP32 accumulation over K, plus one rounding each for two outer scales, their product and the epilogue
    bound = (150 + 4) * 2**-24 * (da.abs() @ db.abs().T)
    assert ((got - da @ db.T).abs() <= bound).all()


def test_stripes_have_their_own_outer_scales():
    a = torch.cat((randn(256, 64, seed=3) * 1e3, randn(100, 64, seed=4) * 1e-3))
    b = torch.cat((randn(256, 64, seed=5), randn(10, 64, seed=6) * 1e-4))
    qa, qb = fp4core.quantize(a, "nvfp4_cta"), fp4core.quantize(b, "nvfp4_cta")
    assert qa.outer_scale.shape == qb.outer_scale.shape == (2,)
    got = fp4core.matmul(qa, qb)
    for rows in (slice(0, 256), slice(256, None)):
        for cols in (slice(0, 256), slice(256, None)):
            alone = fp4core.matmul(
                fp4core.quantize(a[rows], "nvfp4_cta"), fp4core.quantize(b[cols], "nvfp4_cta")
            )
            # the same codes and scales; only the order of the FP32 sums may differ between GEMM shapes
            torch.testing.assert_close(got[rows, cols], alone, rtol=0, atol=64 * 2**-24 * alone.abs().max())


def test_mxfp4_multiplies_once_by_one_36th():
    # one product of 1 x 1: codes 6, scales 1, accumulator exactly 36
    one = fp4core.quantize(torch.tensor([[1.0]]), "mxfp4")
    assert one.unpack().item() == 7 and one.block_scale.item() == 127
    assert fp4core.matmul(one, one).item() == (torch.tensor(36.0) * torch.tensor(1 / 36)).item() == 1.0


def test_leading_axes_and_dtype():
    a, b = randn(2, 3, 64, seed=7), randn(5, 64, seed=8)
    qa, qb = fp4core.quantize(a, "nvfp4"), fp4core.quantize(b, "nvfp4_w2d")
    full = fp4core.matmul(qa, qb)
    assert full.shape == (2, 3, 5) and full.dtype == torch.float32
    assert torch.equal(fp4core.matmul(qa, qb, dtype=torch.bfloat16), full.bfloat16())


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 32), (3, 0, 32), (3, 4, 0)])
def test_empty(m, n, k):
    a, b = (fp4core.quantize(torch.zeros(r, k), "nvfp4_cta") for r in (m, n))
    assert torch.equal(fp4core.matmul(a, b), torch.zeros(m, n))


def test_nan_reaches_exactly_the_rows_it_must():
    a, b = randn(4, 64, seed=9), randn(3, 64, seed=10)
    a[2, 5] = float("nan")
    got = fp4core.matmul(fp4core.quantize(a, "mxfp4"), fp4core.quantize(b, "mxfp4"))
    assert got.isnan().all(1).tolist() == [False, False, True, False]
    assert not got[[0, 1, 3]].isnan().any()


def test_bad_operands():
    q = fp4core.quantize(torch.ones(4, 32), "mxfp4")
    with pytest.raises(ValueError, match=r"matmul: got shapes \(4, 32\) and \(4, 64\)"):
        fp4core.matmul(q, fp4core.quantize(torch.ones(4, 64), "mxfp4"))
    with pytest.raises(ValueError, match="rotated differently"):
        fp4core.matmul(q, fp4core.quantize(torch.ones(4, 32), "mxfp4", hadamard="fixed16"))
    with pytest.raises(ValueError, match=r"needed .* \[N, K\]"):
        fp4core.matmul(q, fp4core.quantize(torch.ones(2, 4, 32), "mxfp4"))
