"""fp4core.Linear against its three formulas, spelled out here from the public quantiser in FP64.

    Y = Qr(X) Qr(W)^T      dX = Qr(dY) Qc(W)      dW = Qc(dY)^T Qc(X)

Bounds: an FP32 sum of n products is off by at most n 2^-24 times the sum of their magnitudes, rounding to
BF16 by 2^-8 of the value. 288 tokens, 160 and 272 features: more than one CTA chunk and stripe, and none a
multiple of 128.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fp4core
from fp4core.ops import spec as specs
from fp4core.ops.linear import linear_group, register_backend, resolve_backend
from fp4core.recipe import Dgrad, Fprop, LinearRecipe, Operand, Wgrad, list_routes, load_recipe

T, K, N = 288, 160, 272
SEED, STEP, TOKEN, BLOCK, INDEX = 11, 7, 4096, 3, 4
FP32_UNIT, BF16_UNIT = 2.0**-24, 2.0**-8

GROUPS = [
    pytest.param(group.linear, id=f"{route}-{group.layers[0]}to{group.layers[1]}")
    for route in list_routes()
    for group in load_recipe(route).groups
]


def bf16_recipe(hadamard: str = "none") -> LinearRecipe:
    plain, rotated = Operand("bf16"), Operand("bf16", hadamard=hadamard)
    return LinearRecipe(Fprop(plain, plain), Dgrad(plain, plain), Wgrad(rotated, rotated))


def tensors(tokens: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """X, W, dY with rows of very different size, so that every scale domain matters."""
    g = torch.Generator().manual_seed(0)
    spread = torch.logspace(-2, 1, tokens)[:, None]
    x = torch.randn(tokens, K, generator=g) * spread
    return (
        x,
        torch.randn(N, K, generator=g) * 0.05,
        torch.randn(tokens, N, generator=g) * spread.flip(0) * 1e-3,
    )


def run(layer: fp4core.Linear, x: torch.Tensor, dy: torch.Tensor, *, step: int = STEP, token: int = TOKEN):
    """Y, dX, dW of one forward and backward pass."""
    fp4core.set_sr_state(layer, SEED, step, token)
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    y = layer(x)
    y.backward(dy.to(y.dtype))
    return y.detach(), x.grad, layer.weight.grad


def make(recipe: LinearRecipe, w: torch.Tensor, block: int = BLOCK, index: int = INDEX) -> fp4core.Linear:
    layer = fp4core.Linear(w.shape[1], w.shape[0], recipe, block, index)
    with torch.no_grad():
        layer.weight.copy_(w)
    return layer


def decoded(
    x: torch.Tensor, op: Operand, *, column: bool = False, view: int = 0, step: int = STEP
) -> torch.Tensor:
    """FP64 values of an operand, always in the layout of x."""
    if op.format == "bf16":
        assert op.hadamard == "none"
        return x.to(torch.bfloat16).double()
    key = None
    if op.rounding == "stochastic":
        producer = (BLOCK * 8 + INDEX) * 4 + view
        key = fp4core.SRKey(SEED, step, producer, TOKEN * x.shape[1])
    q = fp4core.quantize(
        x,
        op.format,
        rounding=op.rounding,
        hadamard=op.hadamard,
        key=key,
        transposed=column,
        backend="reference",
    )
    values = q.dequantize().double()
    return values.mT if column else values


def assert_product(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, rounded: bool) -> None:
    """got is a @ b summed in FP32, and rounded to BF16 when ``rounded``."""
    exact, terms = a @ b, a.shape[1]
    bound = terms * FP32_UNIT * (a.abs() @ b.abs())
    if rounded:
        bound = bound * (1 + BF16_UNIT) + BF16_UNIT * exact.abs()
    worst = ((got.double() - exact).abs() - bound).max().item()
    assert worst <= 0, f"off by {worst:.3e} more than the bound"


@pytest.mark.parametrize("recipe", GROUPS)
def test_three_formulas(recipe):
    x, w, dy = tensors()
    y, dx, dw = run(make(recipe, w), x, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.float32,) * 3
    assert torch.equal(y, y.bfloat16().float()) and torch.equal(dx, dx.bfloat16().float())
    dy = dy.bfloat16().float()
    assert_product(y, decoded(x, recipe.fprop.x), decoded(w, recipe.fprop.w).mT, rounded=True)
    assert_product(dx, decoded(dy, recipe.dgrad.dy), decoded(w, recipe.dgrad.w, column=True), rounded=True)
    left = decoded(dy, recipe.wgrad.dy, column=True, view=1)
    assert_product(dw, left.mT, decoded(x, recipe.wgrad.x, column=True), rounded=False)


def test_formula_check_can_fail():
    """The bound above is tight enough to tell one step's random bits from the next one's."""
    recipe = load_recipe("mxfp4_sr").for_block(0, 32)
    x, w, dy = tensors()
    _, dx, _ = run(make(recipe, w), x, dy)
    wrong = decoded(dy.bfloat16().float(), recipe.dgrad.dy, step=STEP + 1)
    with pytest.raises(AssertionError, match="more than the bound"):
        assert_product(dx, wrong, decoded(w, recipe.dgrad.w, column=True), rounded=True)


@pytest.mark.parametrize("hadamard", ["plain16", "fixed16"])
def test_paired_hadamard_cancels_exactly(hadamard):
    """Small integers stay exact through H16, BF16 and the FP32 sum, so dW must not change a bit."""
    g = torch.Generator().manual_seed(1)
    x, dy = (torch.randint(-2, 3, (64, width), generator=g).float() * 4 for width in (K, N))
    w = torch.randn(N, K, generator=g)
    *_, rotated = run(make(bf16_recipe(hadamard), w), x, dy)
    *_, plain = run(make(bf16_recipe(), w), x, dy)
    assert torch.equal(rotated, plain)


@pytest.mark.parametrize("hadamard", ["plain16", "fixed16", "fixed32"])
@pytest.mark.parametrize("tokens", [T, T - 5])
def test_paired_hadamard_cancels_to_rounding(hadamard, tokens):
    """dW differs only by the BF16 rounding of both rotated operands (a rotation keeps a column's norm)."""
    x, w, dy = tensors(tokens)
    y, dx, rotated = run(make(bf16_recipe(hadamard), w), x, dy)
    y0, dx0, plain = run(make(bf16_recipe(), w), x, dy)
    assert torch.equal(y, y0) and torch.equal(dx, dx0)
    norms = dy.bfloat16().float().norm(dim=0)[:, None] * x.bfloat16().float().norm(dim=0)
    bound = 2 * BF16_UNIT * (1 + BF16_UNIT) * norms + 2 * tokens * FP32_UNIT * norms
    assert ((rotated - plain).abs() <= bound).all()
    assert not torch.equal(rotated, plain)


@pytest.mark.parametrize("recipe", GROUPS)
def test_weight_is_never_transformed(recipe):
    x, w, dy = tensors(32)
    layer = make(recipe, w)
    run(layer, x, dy)
    assert torch.equal(layer.weight.detach(), w)
    assert recipe.fprop.w.hadamard == recipe.dgrad.w.hadamard == "none"


@pytest.mark.parametrize("recipe", GROUPS)
def test_forward_and_backward_weight_agree(recipe):
    """One encoding in both layouts, but for the operand hybrids' two formats (report section 2.4)."""
    _, w, _ = tensors()
    forward = decoded(w, recipe.fprop.w)
    backward = decoded(w, recipe.dgrad.w, column=True)
    hybrid = recipe.fprop.w.format != recipe.dgrad.w.format
    assert torch.equal(forward, backward) is not hybrid


@pytest.mark.parametrize("route", ["mxfp4_sr_h32", "nvfp4_cta", "operand_hybrid_h32"])
def test_micro_batches_draw_the_global_batch(route):
    """Two halves of 512 tokens, cut at a stripe, give the rows of the whole batch bit for bit."""
    recipe = load_recipe(route).for_block(0, 32)
    x, w, dy = tensors(512)
    y, dx, _ = run(make(recipe, w), x, dy)
    halves = [
        run(make(recipe, w), x[cut], dy[cut], token=TOKEN + cut.start)
        for cut in (slice(0, 256), slice(256, 512))
    ]
    assert torch.equal(torch.cat([h[0] for h in halves]), y)
    assert torch.equal(torch.cat([h[1] for h in halves]), dx)


def test_each_step_block_linear_and_view_draws_its_own_bits():
    recipe = load_recipe("te_nvfp4").for_block(0, 32)
    x, w, dy = tensors(64)
    base = run(make(recipe, w), x, dy)
    again = run(make(recipe, w), x, dy)
    others = [
        run(make(recipe, w), x, dy, step=STEP + 1),
        run(make(recipe, w), x, dy, token=TOKEN + 64),
        run(make(recipe, w, block=BLOCK + 1), x, dy),
        run(make(recipe, w, index=INDEX + 1), x, dy),
    ]
    for other in [again, *others]:
        assert torch.equal(base[0], other[0])
    for got in (1, 2):
        assert torch.equal(base[got], again[got])
        assert not any(torch.equal(base[got], other[got]) for other in others)


def test_backward_keeps_the_state_of_its_forward():
    recipe = load_recipe("mxfp4_sr").for_block(0, 32)
    x, w, dy = tensors(64)
    layer = make(recipe, w)
    expected = run(layer, x, dy)[1]
    fp4core.set_sr_state(layer, SEED, STEP, TOKEN)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    fp4core.set_sr_state(layer, SEED + 1, STEP + 1, 0)
    y.backward(dy)
    assert torch.equal(leaf.grad, expected)


def test_group_quantises_x_once_and_rounds_dx_once():
    recipe = load_recipe("mxfp4_sr_h32").for_block(0, 32)
    x, w, dy = tensors()
    layers = [make(recipe, w * (i + 1), index=i) for i in range(3)]
    leaf = x.clone().requires_grad_()
    state = torch.tensor([SEED, STEP, TOKEN])
    torch.autograd.backward(linear_group(layers, leaf, state), [dy] * 3)
    products = []
    for i, layer in enumerate(layers):
        *_, dw = run(make(recipe, w * (i + 1), index=i), x, dy)
        assert torch.equal(layer.weight.grad, dw)
        key = fp4core.SRKey(SEED, STEP, specs.producer_id(BLOCK, i), TOKEN * N)
        rows = fp4core.quantize(dy.bfloat16(), "mxfp4", rounding="stochastic", key=key).dequantize()
        products.append((rows.double(), decoded(layer.weight.detach(), recipe.dgrad.w, column=True)))
    a, b = torch.cat([p[0] for p in products], 1), torch.cat([p[1] for p in products], 0)
    assert_product(leaf.grad, a, b, rounded=True)


def test_group_calls_hooked_layers_one_by_one():
    recipe = load_recipe("mxfp4_sr").for_block(0, 32)
    x, w, _ = tensors(32)
    layers = [make(recipe, w, index=i) for i in range(2)]
    plain = linear_group(layers, x)
    seen = []
    handle = layers[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    hooked = linear_group(layers, x)
    handle.remove()
    assert len(seen) == 1
    assert all(torch.equal(a, b) for a, b in zip(plain, hooked))


@pytest.mark.parametrize("route", ["bf16", "mxfp4_sr"])
def test_shapes_dtypes_and_bias(route):
    recipe = load_recipe(route).for_block(0, 32)
    layer = fp4core.Linear(K, N, recipe, bias=True)
    x = torch.randn(2, 5, K)
    flat = layer(x.reshape(10, K))
    assert layer(x).shape == (2, 5, N)
    assert torch.equal(layer(x).reshape(10, N), flat)
    low = layer(x.bfloat16())
    assert low.dtype == torch.bfloat16 and torch.equal(low.float(), layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), low), "an autocast region must not turn FP32 GEMMs into BF16 ones"
    assert layer(x[:0]).shape == (0, 5, N)
    with torch.no_grad():
        bare = fp4core.Linear(K, N, recipe)
        bare.weight.copy_(layer.weight)
        assert torch.equal(low, (bare(x.bfloat16()).float() + layer.bias).bfloat16())
    low.float().sum().backward()
    # dY = 1 everywhere and ten tokens: an exact sum
    assert torch.equal(layer.bias.grad, torch.full((N,), 10.0))


def test_bf16_weights_give_the_same_values():
    recipe = load_recipe("mxfp4_sr_h32").for_block(0, 32)
    x, w, dy = tensors(64)
    layer = fp4core.Linear(K, N, recipe, BLOCK, INDEX, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(w)
    y, dx, dw = run(layer, x, dy)
    y0, dx0, dw0 = run(make(recipe, w), x, dy)
    assert torch.equal(y, y0) and torch.equal(dx, dx0)
    assert dw.dtype == torch.bfloat16 and torch.equal(dw, dw0.bfloat16())


def test_frozen_operands_get_no_gradient():
    recipe = load_recipe("mxfp4_sr").for_block(0, 32)
    x, w, dy = tensors(32)
    _, dx, dw = run(make(recipe, w), x, dy)
    frozen = make(recipe, w)
    frozen.weight.requires_grad_(False)
    assert torch.equal(run(frozen, x, dy)[1], dx) and frozen.weight.grad is None
    layer = make(recipe, w)
    fp4core.set_sr_state(layer, SEED, STEP, TOKEN)
    layer(x).backward(dy)
    assert torch.equal(layer.weight.grad, dw)


def test_saves_nothing_but_its_inputs():
    """BF16 x, the parameter itself and 24 bytes of state: no FP32 operand outlives the forward pass."""
    recipe = load_recipe("mxfp4_sr_h32").for_block(0, 32)
    x, w, _ = tensors(32)
    layer, saved = make(recipe, w), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x.bfloat16().requires_grad_())
    expected = [(torch.bfloat16, (32, K)), (torch.float32, (N, K)), (torch.int64, (3,))]
    assert sorted(((t.dtype, tuple(t.shape)) for t in saved), key=str) == sorted(expected, key=str)
    assert any(t.data_ptr() == layer.weight.data_ptr() for t in saved)


@pytest.mark.parametrize("route", ["bf16", "mxfp4_sr_h32", "operand_hybrid_h16"])
def test_compiles_without_graph_break_or_recompilation(route):
    recipe = load_recipe(route).for_block(0, 32)
    x, w, dy = tensors(64)
    layer, counter = make(recipe, w), CompileCounterWithBackend("aot_eager")
    expected = [run(layer, x, dy, step=step) for step in (1, 2)]
    torch._dynamo.reset()
    compiled = make(recipe, w)
    compiled.forward = torch.compile(compiled.forward, backend=counter, fullgraph=True)
    for step, want in zip((1, 2), expected):
        assert all(torch.equal(a, b) for a, b in zip(run(compiled, x, dy, step=step), want))
    assert counter.frame_count == 1


def test_spec_text_round_trips():
    for group in (p.values[0] for p in GROUPS):
        assert specs.decode(specs.encode(group)) == group
    with pytest.raises(ValueError, match="needed the text of"):
        specs.decode("fprop x=mxfp4")
    ids = {specs.producer_id(b, i, v) for b in range(4) for i in range(8) for v in range(4)}
    assert ids == set(range(4 * 8 * 4))


def test_backends_are_named_and_chosen():
    assert resolve_backend("auto", "cpu") == "reference"
    with pytest.raises(ValueError, match="got 'tpu', needed one of"):
        fp4core.Linear(K, N, bf16_recipe(), backend="tpu")
    seen = []

    def double(x, weights, state, spec, producers):
        seen.append((x.dtype, spec, producers))
        return [x @ w.t().bfloat16() for w in weights]

    register_backend("test", double)
    recipe = load_recipe("mxfp4_sr").for_block(0, 32)
    layer = fp4core.Linear(K, N, recipe, 1, 2, backend="test")
    layer(torch.randn(4, K))
    assert seen == [(torch.bfloat16, specs.encode(recipe), [40])]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp4core.Linear(K, N, load_recipe("bf16")), "got a recipe of type Recipe, needed"),
        (lambda: fp4core.Linear(K, N, bf16_recipe(), block=-1), "got block -1"),
        (lambda: fp4core.Linear(K, N, bf16_recipe(), index=8), "index 8"),
        (
            lambda: fp4core.Linear(K, N, bf16_recipe())(torch.ones(2, K + 1)),
            r"got input \[..., 161\], needed",
        ),
        (lambda: fp4core.Linear(K, N, bf16_recipe())(torch.ones(2, K).half()), "needed float32 or bfloat16"),
    ],
    ids=["route-for-linear", "block", "index", "width", "dtype"],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
