"""Products of carriers against FP64: every path, layouts, stripes, odd shapes.

Tolerance. Products are exact and sums are FP32. A sum of K terms in any order differs from the exact one by
at most (K - 1) eps sum |a b| with eps = 2^-24 (FP32 accumulation, twice that where the tensor core
truncates), then one rounding to the output type. BF16 outputs must equal the exact value rounded once in
99.9% of places.
"""

from __future__ import annotations

import pytest
import torch

from fp4core.kernels import gemm
from fp4core.kernels import producers as p
from fp4core.kernels._launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
SHAPES = [(64, 96, 64)] if interpreted() else [(512, 768, 1024), (300, 520, 4096), (1024, 256, 8192)]
GPU = pytest.mark.skipif(interpreted(), reason="needs a CUDA GPU with FP8 tensor cores (sm_89+)")


def operand(rows: int, k: int, view: p.View, seed: int, skew: float = 0.3) -> p.Produced:
    """Quantised data with a mean and uneven rows."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, k, generator=g) + 0.2) * torch.exp(skew * torch.randn(rows, 1, generator=g))
    x = x.to(DEVICE, torch.bfloat16)
    state = None
    if p.is_mx(view.format):
        top = int(torch.frexp(x.abs().amax().float()).exponent)
        ref = {"e5m2": top - 8, "e4m3": top - 6, "bf16": 0}[view.carrier]
        state = p.new_state(1, DEVICE, ref)[0]
    made = p.produce(x, view, row_state=state)[0]
    assert state is None or int(state[3]) == 0
    return made


def outer_rows(made: p.Produced, rows: int) -> torch.Tensor:
    """FP64 factor per row of a produced operand."""
    if made.outer is None:
        return torch.ones(rows, dtype=torch.float64)
    outer = made.outer.double().cpu()
    return outer.expand(rows) if outer.numel() == 1 else outer.repeat_interleave(256)[:rows]


def compare(c: torch.Tensor, a: p.Produced, b: p.Produced, alpha: float, eps: float = 2.0**-23) -> None:
    """Assert the module's tolerance."""
    m, n = c.shape
    wa, wb = a.data[:m].double().cpu(), b.data[:n].double().cpu()
    scale = alpha * outer_rows(a, m)[:, None] * outer_rows(b, n)[None, :]
    exact = (wa @ wb.T) * scale
    bound = a.data.shape[1] * eps * (wa.abs() @ wb.abs().T) * scale.abs() + 2.0**-22 * exact.abs()
    if c.dtype == torch.bfloat16:
        bound = bound + (2.0**-7 if interpreted() else 2.0**-8) * exact.abs()  # the interpreter truncates
    assert ((c.double().cpu() - exact).abs() <= bound).all()
    if c.dtype == torch.bfloat16 and not interpreted():
        assert (c.cpu() == exact.to(torch.bfloat16)).double().mean() >= 0.999


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("formats", ["nvfp4", "nvfp4_cta", "mxfp4", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_bf16_carriers(shape: tuple[int, int, int], formats: str, dtype: torch.dtype) -> None:
    m, n, k = shape
    first, second = ("nvfp4_cta", "nvfp4_cta_w2d") if formats == "mixed" else (formats, formats)
    a, b = operand(m, k, p.View(first), 1), operand(n, k, p.View(second), 2)
    c = gemm.bf16_gemm(a.data[:m], b.data[:n], 0.25, a.outer, b.outer, dtype)
    assert c.dtype == dtype
    compare(c, a, b, 0.25)


@pytest.mark.parametrize("layout", ["tn", "nt", "tt"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_cta"])
def test_operands_may_be_stored_transposed(layout: str, name: str) -> None:
    m, n, k = SHAPES[0]
    a, b = operand(m, k, p.View(name), 3), operand(n, k, p.View(name), 4)
    data_a = a.data.t().contiguous().t() if layout[0] == "t" else a.data
    data_b = b.data.t().contiguous().t() if layout[1] == "t" else b.data
    compare(gemm.bf16_gemm(data_a, data_b, 1.0, a.outer, b.outer, torch.float32), a, b, 1.0)


def test_output_may_be_a_slice() -> None:
    m, n, k = SHAPES[0]
    a, b = operand(m, k, p.View("nvfp4_cta"), 5), operand(n, k, p.View("nvfp4_cta"), 6)
    whole = torch.full((m, n + 64), 7.0, device=DEVICE)
    gemm.bf16_gemm(a.data, b.data, 1.0, a.outer, b.outer, torch.float32, out=whole[:, 32 : n + 32])
    compare(whole[:, 32 : n + 32], a, b, 1.0)
    assert (whole[:, :32] == 7).all() and (whole[:, n + 32 :] == 7).all()


CARRIERS = [("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e4m3", "e4m3"), ("e5m2", "e5m2")]


@pytest.mark.parametrize("carriers", CARRIERS, ids="x".join)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_fp8_carriers(carriers: tuple[str, str], dtype: torch.dtype) -> None:
    for m, n, k in [(64, 96, 128)] if interpreted() else [(512, 768, 1024), (1024, 256, 8192)]:
        a, b = operand(m, k, p.View("mxfp4", carriers[0]), 7), operand(n, k, p.View("mxfp4", carriers[1]), 8)
        factor = torch.full((1,), 2.0, device=DEVICE), torch.full((1,), 1 / 36, device=DEVICE)
        c = gemm.fp8_gemm(a.data, b.data, *factor, dtype)
        alpha = float(factor[1]) * 2.0
        # FP8 tensor cores align the products of one instruction and drop what lies 2^-13 below the largest;
        # sums leave them every 128 of K
        compare(c, a, b, alpha, eps=2.0**-13 / k * 32)


@GPU
def test_full_accumulation_is_exact_where_fast_accumulation_is_not() -> None:
    """Data of mean one, long K: the fast path of the tensor core loses whole percents."""
    k = 8192
    a = operand(256, k, p.View("mxfp4", "e5m2"), 9, skew=0.0)
    b = operand(256, k, p.View("mxfp4", "e4m3"), 10, skew=0.0)
    one = torch.ones(1, device=DEVICE)
    exact = (a.data.double() @ b.data.double().t()).to(torch.bfloat16)
    full = gemm.fp8_gemm(a.data, b.data, one, one)
    assert (full == exact).double().mean() >= 0.999


def test_shapes_that_do_not_fit_are_refused() -> None:
    a = torch.zeros(32, 64, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match=r"needed \[M, K\] and \[N, K\]"):
        gemm.bf16_gemm(a, a[:, :32])
    with pytest.raises(ValueError, match="output"):
        gemm.bf16_gemm(a, a, out=a)
