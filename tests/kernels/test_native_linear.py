"""The native backend of Linear against the reference's, over its own kernels' sources.

Interpreted here. On a GPU without FP4 Tensor Cores the backend refuses itself; told otherwise, it runs the
routes whose products are MXFP4, which Triton emulates there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch

import fp4core
from fp4core.kernels._launch import interpreted
from fp4core.kernels.native.producers import has_fp4_instructions
from fp4core.ops import backends, linear
from fp4core.ops.linear import linear_group
from fp4core.recipe import load_recipe

DEVICE = "cpu" if interpreted() else "cuda"
EMULATED = not interpreted() and not has_fp4_instructions(torch.device("cuda"))
MODULE = "fp4core.ops.native_linear"


@pytest.fixture(autouse=True, scope="module")
def _emulated() -> Iterator[None]:
    if not EMULATED:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        allowed = backends.Backend("native", True, "emulated", "")
        patch.setattr(backends, "backends", lambda: {"native": allowed})
        importlib.import_module(MODULE)
    yield
    linear._BACKENDS.pop("native")
    sys.modules.pop(MODULE)


def step(backend: str, route: str, block: int = 0, **needs: bool) -> list[torch.Tensor | None]:
    """Outputs, dX and dW of two linears of one input; 96 tokens, 80 features, 48 and 36 outputs."""
    g = torch.Generator().manual_seed(1)
    x = torch.randint(-4, 5, (96, 80), generator=g).float().to(DEVICE).requires_grad_(needs.get("x", True))
    recipe = load_recipe(route).for_block(block, 32)
    layers = []
    for index, n in enumerate((48, 36)):
        layer = fp4core.Linear(80, n, recipe, block=2, index=index, backend=backend, device=DEVICE)
        layer.weight.data.copy_(torch.randint(-4, 5, (n, 80), generator=g) / 4)
        layer.weight.requires_grad_(needs.get("w", True))
        layer.sr_state = torch.tensor([11, 3, 64], device=DEVICE)
        layers.append(layer)
    outputs = linear_group(layers, x)
    sum((y * torch.randint(-3, 4, y.shape, generator=g).to(DEVICE)).sum() for y in outputs).backward()
    return [*(y.detach() for y in outputs), x.grad, *(layer.weight.grad for layer in layers)]


@pytest.mark.parametrize("route", ["bf16", "te_nvfp4", "mxfp4_sr_h32", "operand_hybrid_h16"])
def test_linears_agree_with_the_reference_to_rounding(route: str) -> None:
    if EMULATED and route not in ("bf16", "mxfp4_sr_h32"):
        pytest.skip("E4M3 block scales need FP4 Tensor Cores (sm_100, sm_103)")
    got, want = step("native", route), step("reference", route)
    for name, a, b in zip(("y0", "y1", "dx", "dw0", "dw1"), got, want):
        a, b = a.cpu().double(), b.cpu().double()
        # FP32 sums of at most 96 terms, scaled before (reference) or after the sum: 96 roundings of 2^-24.
        # Y and dX are then rounded to BF16, perhaps to either side of a midpoint: one step, at most 2^-7
        allowed = 96 * 2**-24 * b.abs().max()
        if not name.startswith("dw"):
            allowed = allowed + 2**-7 * b.abs()
        assert ((a - b).abs() <= allowed).all(), name


def test_gradients_nobody_asked_for_are_not_computed() -> None:
    assert step("native", "mxfp4_sr", x=False)[2] is None
    only_x = step("native", "mxfp4_sr", w=False)
    assert only_x[2] is not None and only_x[3] is None


def test_unlike_operands_are_refused_with_a_way_out() -> None:
    recipe = load_recipe("mxfp4_sr").for_block(0, 32)
    mixed = type(recipe)(recipe.fprop, load_recipe("nvfp4_cta").for_block(0, 32).dgrad, recipe.wgrad)
    fp4core.Linear(32, 32, mixed, backend="native", device=DEVICE)(torch.zeros(32, 32, device=DEVICE))
    unlike = type(recipe)(type(recipe.fprop)(recipe.fprop.x, mixed.dgrad.w), recipe.dgrad, recipe.wgrad)
    layer = fp4core.Linear(32, 32, unlike, backend="native", device=DEVICE)
    with pytest.raises(ValueError, match=r"mxfp4 x nvfp4_cta_w2d in fprop.*backend='carrier'"):
        layer(torch.zeros(32, 32, device=DEVICE))


def test_whole_layer_traces_without_a_break() -> None:
    recipe = load_recipe("mxfp4_sr" if EMULATED else "nvfp4_cta").for_block(0, 32)
    layer = fp4core.Linear(64, 32, recipe, backend="native", device=DEVICE)
    x = torch.ones(32, 64, device=DEVICE)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), layer(x))
