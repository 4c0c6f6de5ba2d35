"""The native kernels compiled on a GPU, at sizes of many tiles, against the reference.

On one without FP4 Tensor Cores the producers round in software and MXFP4 products are emulated; the linears
whose products are all of that kind run too. Nothing here runs in the interpreter, where the same statements
hold at smaller sizes (``test_native``, ``test_native_linear``).
"""

from __future__ import annotations

import pytest
import torch

from fp4core import formats
from fp4core.kernels import native
from fp4core.kernels._launch import interpreted
from fp4core.kernels.native import aot
from fp4core.kernels.producers import View
from fp4core.ops.quantize import SRKey
from fp4core.reference import casts
from fp4core.reference import quantize as reference

pytestmark = pytest.mark.skipif(interpreted(), reason="needs a CUDA GPU (sm_90 or later)")

ROWS, COLS = 400, 656  # four by six tiles, both ragged; rows end inside a Hadamard group of 32
SEED, STEP, FIRST = 7, 3, 640 * 656


def data(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """BF16 values over many binades, with zero and huge rows, zero columns and negative zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=g) * torch.exp(3 * torch.randn(rows, 1, generator=g))
    x[5], x[9], x[200, :256] = 0.0, 3e38, -0.0
    x[:, 17] = 0.0
    x[300] *= 1e-38
    return x.bfloat16()


def check(packed: native.Packed, view: View, x: torch.Tensor, axis: int, key: SRKey | None) -> None:
    fmt = formats.get(view.format)
    rotation = None if view.hadamard == "none" else view.hadamard
    q = reference.quantize_2d(x.float(), fmt, axis=axis, key=key, hadamard=rotation)
    codes, scale = casts.e2m1_codes(q.values), q.scales.byte
    if axis == 0:
        codes, scale = codes.mT, scale.mT
    k = packed.shape[1]
    got = packed.codes.cpu()
    wrong = (got[:, : k // 2] != reference.pack(codes.contiguous())).sum()
    assert wrong == 0, f"{int(wrong)} code bytes differ"
    assert not got[:, k // 2 :].any(), "codes beyond K"
    # rows beyond the matrix but inside a 2D block carry that block's scale; the rest of the padding is 0
    want = native.swizzle(scale.contiguous(), fmt.block_rows)
    assert torch.equal(packed.scales.cpu(), want), "scales or their padding"
    outer = (t.reshape(-1).float().cpu() for t in (packed.outer, q.scales.outer))
    # every NaN the same one: a GPU's differ from a CPU's
    outer = [torch.where(t.isnan(), torch.full_like(t, float("nan")), t).view(torch.int32) for t in outer]
    assert torch.equal(*outer), "outer scales"


@pytest.mark.parametrize("name", list(aot.PAIRS))
def test_every_tensor_of_every_route_equals_the_reference(name: str) -> None:
    x = data(ROWS, COLS)
    views = aot.PAIRS[name]
    words = torch.tensor([SEED, STEP, FIRST], device="cuda")
    drawn = [v is not None and v.rounding == "stochastic" for v in views]
    streams = [native.Stream(words, 40 + i) if wanted else None for i, wanted in enumerate(drawn)]
    made = native.produce(x.cuda(), *views, row_stream=streams[0], col_stream=streams[1])
    for i, (packed, view) in enumerate(zip(made, views)):
        if view is not None:
            check(packed, view, x, 1 - i, SRKey(SEED, STEP, 40 + i, FIRST) if drawn[i] else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_mxfp4_products_of_many_tiles(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    m, n, k = 520, 392, 2080
    x, w = (torch.randn(r, k, generator=g).bfloat16() for r in (m, n))
    (a, _), (b, _) = native.produce(x.cuda(), View("mxfp4")), native.produce(w.cuda(), View("mxfp4_w2d"))
    left, right = (
        reference.fake_quant_2d(t.float(), formats.get(f), axis=1).double()
        for t, f in ((x, "mxfp4"), (w, "mxfp4_w2d"))
    )
    want, size = left @ right.T, left.abs() @ right.abs().T
    got = native.native_gemm(a, b, dtype).cpu().double()
    # k FP32 additions of exact products, each within 2^-23 of the largest partial sum (tensor cores truncate)
    allowed = k * 2.0**-23 * size + (2.0**-8 * want.abs() if dtype == torch.bfloat16 else 0.0)
    assert ((got - want).abs() <= allowed).all(), float(((got - want).abs() / size).max())
