"""Native producers, packing and products at shapes and values nobody chose, against the reference.

Packing goes both ways: what a producer writes is what ``pack`` makes of the public quantiser's result, and
decodes to its values again. Interpreted here, compiled on a GPU (there without products of E4M3 scales where
it has no FP4 Tensor Cores).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fp4core
from fp4core import formats
from fp4core.kernels import native
from fp4core.kernels._launch import interpreted
from fp4core.kernels.native.producers import has_fp4_instructions
from fp4core.kernels.producers import View
from fp4core.ops.quantize import quantize
from fp4core.reference import quantize as reference

DEVICE = "cpu" if interpreted() else "cuda"
EMULATED = not interpreted() and not has_fp4_instructions(torch.device("cuda"))
NAMES = [n for n in formats.names() if formats.get(n).block_scale != "ue5m3"]
SIZES = st.integers(1, 140)
slow = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """BF16 matrices: a spread of binades, some zeros and negative zeros, now and then NaN or infinity."""
    rows, cols = draw(SIZES), draw(SIZES)
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.0, 1.0, 8.0]))
    x = torch.randn(rows, cols, generator=g) * torch.exp2(spread * torch.randn(rows, cols, generator=g))
    x = x * 2.0 ** draw(st.integers(-120, 100))
    for value in draw(
        st.lists(st.sampled_from([0.0, -0.0, 3e38, -1e-40, float("nan"), float("inf")]), max_size=3)
    ):
        share = draw(st.sampled_from([0.001, 0.3]))
        x[torch.rand(rows, cols, generator=g) < share] = value
    return x.bfloat16()


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal as numbers, every NaN the same one."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def decoded(p: native.Packed) -> torch.Tensor:
    """FP32 values of a packed view, through the public tensor."""
    fmt = formats.get(p.format)
    (rows, k), codes = p.shape, p.codes.cpu()
    scales = native.unswizzle(p.scales.cpu(), rows, -(-k // fmt.block_cols), fmt.block_rows)
    outer = p.outer.cpu() if fmt.outer == "stripe" else p.outer.cpu().reshape(-1)[0]
    return fp4core.QuantizedTensor(codes[:, : (k + 1) // 2], scales, outer, p.format, p.shape).dequantize()


@slow
@given(matrices(), st.sampled_from(NAMES), st.booleans())
def test_producers_and_packing_agree_both_ways(x: torch.Tensor, name: str, column: bool) -> None:
    view, fmt = View(name), formats.get(name)
    row, col = native.produce(x.to(DEVICE), *((None, view) if column else (view, None)))
    made = col if column else row
    q = quantize(x, name, transposed=column, backend="reference")
    packed = native.pack(q)
    rows, k = packed.shape
    assert made.shape == packed.shape
    assert torch.equal(made.codes.cpu(), packed.codes)
    blocks = -(-k // fmt.block_cols)
    scales = [native.unswizzle(p.scales.cpu(), rows, blocks, fmt.block_rows) for p in (made, packed)]
    assert torch.equal(*scales) and torch.equal(scales[0], q.block_scale)
    assert same_values(made.outer.cpu(), packed.outer)
    assert same_values(decoded(made), q.dequantize()) and same_values(decoded(packed), q.dequantize())
    # padding along the contraction decodes to zero, unless everything under the outer scale is NaN anyway
    assert not made.codes.cpu()[:, (k + 1) // 2 :].any()
    full = native.unswizzle(made.scales.cpu(), rows, made.scales.shape[1] * 4)
    assert made.outer.isnan().any() or not full[:, blocks:].any()


@slow
@given(st.data())
def test_products_of_any_shape_equal_the_reference(data: st.DataObject) -> None:
    kinds = [["mxfp4", "mxfp4_w2d", "mxfp4_ocp"], ["nvfp4", "nvfp4_te", "nvfp4_cta", "nvfp4_w2d"]]
    names = data.draw(st.sampled_from(kinds[:1] if EMULATED else kinds))
    m, n, k = (data.draw(SIZES) for _ in range(3))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    # small integers: every sum is exact in FP32, so its order is free
    a, b = (
        quantize(torch.randint(-4, 5, (r, k), generator=g).float(), data.draw(st.sampled_from(names)))
        for r in (m, n)
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    parts = [native.pack(q) for q in (a, b)]
    parts = [
        native.Packed(p.codes.to(DEVICE), p.scales.to(DEVICE), p.outer.to(DEVICE), p.format, p.shape)
        for p in parts
    ]
    got = native.native_gemm(*parts, dtype)
    assert torch.equal(got.cpu(), fp4core.matmul(a, b, dtype=dtype, backend="reference"))


@given(st.integers(0, 5), st.integers(0, 70), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_codes_survive_packing(rows: int, k: int, seed: int) -> None:
    codes = torch.randint(0, 16, (rows, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = reference.pack(codes)
    assert packed.shape == (rows, (k + 1) // 2)
    assert torch.equal(reference.unpack(packed, k), codes)
    if k % 2:
        assert not (packed[:, -1:] >> 4).any()


@pytest.mark.parametrize("bad", [(130, 4, 1), (128, 5, 1), (128, 4, 2)])
def test_unswizzle_of_a_wrong_size_is_refused(bad: tuple[int, int, int]) -> None:
    rows, columns, atoms = bad
    with pytest.raises(ValueError, match="unswizzle: got"):
        native.unswizzle(torch.zeros(1, atoms, 512, dtype=torch.uint8), rows, columns)
