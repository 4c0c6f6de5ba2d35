"""The reference on a GPU gives the CPU's bits: divisions, subnormals, Philox and Hadamard order included."""

import pytest
import torch

import fp4core
from fp4core import SRKey, formats
from fp4core.ops import fake_quant
from fp4core.recipe import Operand

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(600, 330, generator=g)
    exponents = torch.randint(-30, 30, x.shape, generator=g).float()
    odd = torch.where(torch.rand(x.shape, generator=g) < 0.3, -0.0, x * exponents.exp2())
    odd[:, 32:96] = 0.0
    bad = x.clone()
    bad[17, 100], bad[300, 40] = float("nan"), float("inf")
    return {"normal": x, "exponents": odd, "tiny": x * 2.0**-127, "huge": x.clamp(-2, 2) * 1.6e38, "bad": bad}


@pytest.mark.parametrize("family", inputs())
@pytest.mark.parametrize("name", formats.names())
def test_same_bits_as_the_cpu(name, family):
    x = inputs()[family].bfloat16()
    key = SRKey(3, 4, 5, offset=330 * 11 + 5)
    for rounding in ("nearest", "stochastic"):
        for hadamard in (None, "fixed16", "fixed32"):
            for transposed in (False, True):
                options = {"rounding": rounding, "hadamard": hadamard, "key": key, "transposed": transposed}
                want = fp4core.quantize(x, name, **options)
                got = fp4core.quantize(x.cuda(), name, **options, backend="reference")
                for field in ("codes", "block_scale"):
                    assert torch.equal(getattr(got, field).cpu(), getattr(want, field)), (field, options)
                torch.testing.assert_close(
                    got.outer_scale.cpu(), want.outer_scale, rtol=0, atol=0, equal_nan=True
                )
                decoded = want.dequantize()
                torch.testing.assert_close(got.dequantize().cpu(), decoded, rtol=0, atol=0, equal_nan=True)
                operand = Operand(name, rounding, hadamard or "none")
                fake = fake_quant(x.cuda(), operand, key=key, transposed=transposed).cpu()
                torch.testing.assert_close(fake, decoded, rtol=0, atol=0, equal_nan=True)
