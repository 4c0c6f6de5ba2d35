"""The carrier backend: exactness with and without FP8, encodings, the fused block.

On the CPU kernels are interpreted and products taken in FP64; on a GPU the same tests run the real ones. The
expected product is computed here from the reference quantiser: FP64 sums, outer scales, one rounding.
"""

from __future__ import annotations

import gc

import pytest
import torch

from fp4core import formats
from fp4core.kernels import producers as p
from fp4core.kernels._launch import interpreted
from fp4core.model.rope import rope_tables
from fp4core.ops import carrier, carrier_boundary, carrier_encode, carrier_groups, carrier_linear, held
from fp4core.ops import spec as specs
from fp4core.ops.carrier_linear import linears
from fp4core.ops.carrier_plan import (
    DY_COL,
    DY_ROW,
    RANGE,
    W_COL,
    W_ROW,
    X_COL,
)
from fp4core.ops.quantize import SRKey, quantize
from fp4core.recipe import load_recipe
from fp4core.reference import quantize as reference_quantise
from tests.kernels.carriers import (
    DEVICE,
    STATE,
    block_inputs,
    draw,
    model,
    one_linear,
    results,
    run,
    state,
)

pytestmark = pytest.mark.usefixtures("fresh_groups")
PREFERRED = ("e5m2", "e4m3")


def recipe(route: str):
    return load_recipe(route).for_block(0, 32)


class Case:
    """Inputs of a group of linears, its results, and what they must be."""

    def __init__(self, route: str, tokens: int, k: int, outs: list[int], *, x=None, grads=None) -> None:
        self.recipe = recipe(route)
        self.spec = specs.encode(self.recipe)
        self.x = (draw(tokens, k) if x is None else x).requires_grad_()
        self.weights = [
            draw(n, k, scale=0.05, seed=i + 1).float().requires_grad_() for i, n in enumerate(outs)
        ]
        self.grads = (
            [draw(tokens, n, scale=1e-3, seed=9 + i) for i, n in enumerate(outs)] if grads is None else grads
        )
        self.producers = [specs.producer_id(3, i) for i in range(len(outs))]

    def run(self) -> dict[str, torch.Tensor]:
        outputs = linears(self.x, self.weights, state(), self.spec, self.producers)
        got = torch.autograd.grad(outputs, [self.x, *self.weights], self.grads)
        names = [*(f"y{i}" for i in range(len(outputs))), "dx", *(f"dw{i}" for i in range(len(self.weights)))]
        return dict(zip(names, [*outputs, *got]))

    def group(self) -> carrier_groups.Group:
        return carrier_groups.group(self.producers, self.spec, self.x.device)

    def operand(self, x, op, producer=0, transposed=False):
        """(FP64 block values, FP32 outer scales per row) of the reference quantiser."""
        key = None
        if op.rounding == "stochastic":
            key = SRKey(STATE[0], STATE[1], producer, STATE[2] * x.shape[1])
        rotation = None if op.hadamard == "none" else op.hadamard
        q = quantize(
            x.detach(), op.format, rounding=op.rounding, hadamard=rotation, key=key, transposed=transposed,
            backend="reference",
        )  # fmt: skip
        outer = q.outer_scale.reshape(-1)
        if outer.numel() > 1:
            outer = outer.repeat_interleave(256)[: q.shape[0]]
        if formats.get(op.format).outer == "constant":
            outer = torch.full((1,), formats.get(op.format).outer_constant, dtype=torch.float64)
        return q.decode_blocks().double(), outer.double().to(x.device)

    def expected(self, product=None) -> dict[str, torch.Tensor]:
        """FP64 products with outer scales, unrounded; ``product`` takes the place of the exact one."""
        product = product or exact_product
        f, d, w = self.recipe.fprop, self.recipe.dgrad, self.recipe.wgrad
        out: dict[str, torch.Tensor] = {}
        x_row, x_col = self.operand(self.x, f.x), self.operand(self.x, w.x, transposed=True)
        dx = 0.0
        for i, (weight, dy, name) in enumerate(zip(self.weights, self.grads, self.producers)):
            out[f"y{i}"] = product(x_row, self.operand(weight, f.w))
            out[f"dw{i}"] = product(self.operand(dy, w.dy, name + DY_COL, transposed=True), x_col)
            dx = dx + product(
                self.operand(dy, d.dy, name + DY_ROW), self.operand(weight, d.w, transposed=True)
            )
        return out | {"dx": dx}


def exact_product(a, b) -> torch.Tensor:
    (x, alpha), (y, beta) = a, b
    return (x @ y.t()) * alpha[:, None] * beta[None, :]


def dropped(a, b) -> torch.Tensor:
    """Upper bound [M, N] of what a Hopper tensor core drops from a product of FP8 operands.

    Probed on an H200: an instruction adds 32 products and the running sum after aligning them to the largest,
    and keeps 13 bits below its leading one, the rest cut off; sums leave the tensor core every 128 of K, in
    FP32.
    The unit is taken twice as large, because a product's exponent may be that of its operands' sum.
    """
    (x, alpha), (y, beta) = a, b
    terms = (x[:, None, :] * y[None, :, :]).abs()
    lost, groups = torch.zeros_like(terms[..., 0]), 0
    for at in range(0, terms.shape[-1], 128):
        running, groups = torch.zeros_like(lost), groups + 1
        for chunk in terms[..., at : at + 128].split(32, dim=-1):
            largest = torch.maximum(chunk.amax(-1), running)
            unit = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-900))) - 12)
            lost += (chunk - torch.floor(chunk / unit[..., None]) * unit[..., None]).sum(-1)
            lost += torch.where(running > 0, unit, 0.0)
            running = running + chunk.sum(-1)
    lost += groups * 2.0**-23 * terms.sum(-1)
    return lost * alpha[:, None] * beta[None, :]


def check(case: Case, least: float = 0.999) -> dict[str, torch.Tensor]:
    """BF16 results are the exact product rounded once in ``least`` of all places, near it elsewhere."""
    got = case.run()
    for name, exact in case.expected().items():
        assert got[name].shape == exact.shape, name
        if got[name].dtype == torch.bfloat16:
            same = (got[name] == exact.to(torch.bfloat16)) | (
                (got[name].double() - exact).abs() <= 2**-20 * exact.abs().max()
            )
            assert same.float().mean() >= least, (name, same.float().mean())
        torch.testing.assert_close(
            got[name].double(), exact, rtol=2**-8, atol=2**-20 * exact.abs().max().item()
        )
    return got


# -- linears ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "route",
    ["mxfp4_sr", "mxfp4_sr_h32", "nvfp4_global", "nvfp4_cta", "operand_hybrid_h16", "te_nvfp4", "ue5m3"],
)
def test_every_route_gives_the_exact_products(route):
    check(Case(route, 128, 128, [96, 32]))


@pytest.mark.parametrize("route", ["mxfp4_sr", "nvfp4_global"])
def test_shapes_that_are_no_multiple_of_a_block(route):
    check(Case(route, 75, 80, [48, 16]))


def test_saved_activations_are_one_byte_per_value():
    case = Case("mxfp4_sr", 64, 128, [32])
    y = linears(case.x, case.weights, state(), case.spec, case.producers)[0]
    saved = [t for t in y.grad_fn.saved_tensors if t.numel() >= case.x.numel()]
    assert [(t.dtype, tuple(t.shape)) for t in saved] == [(torch.uint8, (128, 64))]


@pytest.mark.parametrize("route", ["mxfp4_sr", "nvfp4_global", "nvfp4_cta", "bf16"])
def test_an_ops_outputs_are_allocations_of_their_own(route):
    """Compiled code counts on it: a slice starts at an address that its kernels may not read."""
    case = Case(route, 64, 512, [32, 32])
    outputs = carrier_linear._forward(case.x, case.weights, state(), case.spec, case.producers)
    assert all(t.storage_offset() == 0 for t in outputs)
    assert len({t.untyped_storage().data_ptr() for t in outputs if t.numel()}) == sum(
        t.numel() > 0 for t in outputs
    )


def wide(steps: int, tokens: int = 128, k: int = 128) -> torch.Tensor:
    """Values whose blocks span ``steps`` scale steps along rows and along columns."""
    x = draw(tokens, k).float()
    x[: tokens // 2, : k // 2] *= 2.0**-steps
    return x.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("steps", "saved", "contractions"),
    [
        (8, "e4m3", {"fprop": PREFERRED, "wgrad": PREFERRED}),
        (20, "e5m2", {"fprop": PREFERRED, "wgrad": ("e4m3", "e5m2")}),
        (50, "packed", {"fprop": ("bf16", "bf16"), "wgrad": ("bf16", "bf16")}),
    ],
)
def test_wide_scales_fall_back_and_stay_exact(steps, saved, contractions):
    case = Case("mxfp4_sr", 128, 128, [32], x=wide(steps))
    if interpreted():
        check(case)
    else:
        # operands are exact; sums of values 2^8 apart are what the tensor core keeps of them
        got, lost = case.run(), case.expected(dropped)
        for name, exact in case.expected().items():
            bound = lost[name] + 2.0**-8 * (exact.abs() + lost[name])  # half a unit of BF16
            assert ((got[name].double() - exact).abs() <= bound).all(), name
    kinds = case.group().plan.contraction_kinds()
    assert {name: kinds[name] for name in contractions} == contractions
    y = linears(case.x, case.weights, state(), case.spec, case.producers)[0]
    meta = next(t for t in y.grad_fn.saved_tensors if t.device.type == "cpu" and t.shape == (2,))
    assert ("e4m3", "e5m2", "packed")[int(meta[0])] == saved


def test_a_later_tensor_that_does_not_fit_is_made_again_at_once():
    check(Case("mxfp4_sr", 64, 64, [32]))
    check(Case("mxfp4_sr", 64, 64, [32], x=draw(64, 64, scale=2.0**-20)))
    check(Case("mxfp4_sr", 64, 64, [32], grads=[draw(64, 32, scale=2.0**-60)]))
    group = Case("mxfp4_sr", 64, 64, [32]).group()
    assert sum(group.misfits) >= 3 and group.plan.kinds.count("bf16") == 0


def test_zero_tensors_are_exact():
    check(Case("mxfp4_sr", 64, 64, [32], x=torch.zeros(64, 64, dtype=torch.bfloat16, device=DEVICE)))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", RANGE)
def test_every_scale_in_a_carriers_range_is_exact(kind, rounding):
    low, high, _, _ = RANGE[kind]
    fmt, key = formats.get("mxfp4"), SRKey(1, 2, 5) if rounding == "stochastic" else None
    x = draw(32, 64).float().clamp(-1, 1)
    x[:, 0], x[:, 32] = 1.0, -0.75
    for k in (low, low + 1, -1, high) if interpreted() else range(low, high + 1):
        xk = (x * 2.0**k).to(torch.bfloat16)
        state_ = p.new_state(1, DEVICE, 0)[0]
        sr = p.SR(torch.tensor([1, 2, 0], device=DEVICE), 5)
        made, _ = p.produce(xk, p.View("mxfp4", kind, rounding), row_state=state_, sr=sr)
        q = reference_quantise.quantize_2d(xk, fmt, axis=1, key=key)
        exact = reference_quantise.decode_blocks_(q.values, q.scales.value, fmt, 1)
        assert torch.equal(made.data.float(), exact) and int(state_[3]) == 0, k


# -- encodings -------------------------------------------------------------------------------------


def test_a_deferred_step_never_waits_for_the_device(monkeypatch):
    m = model("mxfp4_sr")
    layer, x = one_linear(m)
    carrier.defer(m)
    run(layer, x)
    monkeypatch.setattr(
        carrier_groups.Group, "settle", lambda *_: pytest.fail("a deferred, calibrated view was checked")
    )
    run(layer, x)


def test_counters_tell_what_fell_back():
    m = model("mxfp4_sr")
    layer, _ = one_linear(m)
    run(layer, wide(50, 64))
    counted = carrier.counters(m)
    assert counted["misfits"] > 0 and counted["bf16"] == 2 and counted["fp8"] == 1


def test_weights_are_encoded_once_per_update(monkeypatch):
    m = model("mxfp4_sr")
    layer, x = one_linear(m)
    run(layer, x)
    made = []
    original = carrier_encode._encode_weight
    monkeypatch.setattr(carrier_encode, "_encode_weight", lambda *a: made.append(1) or original(*a))
    first = run(layer, x)[0]
    run(layer, x)
    assert not made
    with torch.no_grad():
        layer.weight.mul_(1.5)
    assert not torch.equal(run(layer, x)[0], first) and len(made) == 1
    layer.weight.data = layer.weight.data / 1.5  # no version counter shows this
    carrier.encode_weights(m)
    assert torch.equal(run(layer, x)[0], first) and len(made) == 2
    assert carrier.memory(m) == 2 * layer.weight.numel()
    group = carrier_groups.group((layer.producer,), layer.spec, layer.weight.device)
    del m, layer, first
    gc.collect()
    assert group.weights.bytes() == 0


def test_held_maxima_reach_the_carriers():
    m = model("ue5m3")
    m.held_amax = table = held.HeldAmax(16, 50)
    layer, x = one_linear(m)
    layer.spec = specs.with_table(layer.spec, table.number)
    table.begin(1)
    run(layer, x, 4.0)
    table.finish()
    table.begin(2)
    reference_layer_y = run(layer, x)[0]
    layer.backend = "reference"
    expected = layer(x, state())
    close = (reference_layer_y == expected) | ((reference_layer_y - expected).abs() < 1e-4)
    assert close.float().mean() > 0.99


# -- the fused block -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "route", ["mxfp4_sr"] if interpreted() else ["mxfp4_sr", "operand_hybrid_h16", "nvfp4_cta"]
)
def test_the_fused_block_is_the_block_layer_by_layer(route, monkeypatch):
    m = model(route)
    h, grad = block_inputs()
    fused = results(m, m.model.layers[:1], h, grad)
    monkeypatch.setattr("fp4core.model.llama.fused_block", lambda block, h: None)
    layers = results(m, m.model.layers[:1], h, grad)
    names = ["y", "dh", *(n for n, _ in m.model.layers[:1].named_parameters())]
    for name, a, b in zip(names, fused, layers):
        if "layernorm" in name or DEVICE == "cuda":
            # norms' weight gradients are summed in another order; on a GPU compiled arithmetic and
            # FlashAttention differ in last places, which then move single codes
            assert (a - b).float().norm() <= (1e-3 if "layernorm" in name else 0.05) * b.float().norm(), name
        elif name == "dh":  # at position 0 the fused block's dQ is exactly zero, autograd's is rounding noise
            assert torch.equal(a[:, 1:], b[:, 1:])
            torch.testing.assert_close(a[:, :1], b[:, :1], rtol=2**-7, atol=1e-6)
        else:
            assert torch.equal(a, b), name


@pytest.mark.usefixtures("attention_that_repeats")
def test_a_misfit_moves_no_plan_but_its_own():
    m = model("mxfp4_sr")
    h, grad = block_inputs()
    carrier.defer(m)
    results(m, m.model.layers, h, grad)
    assert carrier.misfits(m) == []
    groups = carrier_groups.groups(m)
    kinds = [list(g.plan.kinds) for g in groups]
    # the first norm's output leaves its carrier, and what is computed from that is infinite or NaN
    first = m.model.layers[0]
    with torch.no_grad():
        first.input_layernorm.weight.mul_(2.0**14)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(first.self_attn, name).weight.mul_(2.0**-14)
    broken = results(m, m.model.layers, h, grad)
    report = carrier.misfits(m)
    assert {r.producers for r in report} == {g.producers for g in groups}
    assert carrier.counters(m)["replays"] == 1
    assert [g.plan.kinds for g in groups] == kinds
    again = results(m, m.model.layers, h, grad)
    assert carrier.misfits(m) == [] and not any(g.recheck for g in groups)
    # its column view has outgrown E4M3's references; nothing else has moved
    assert groups[0].plan.kinds[X_COL] == "e5m2" and [g.plan.kinds for g in groups[1:]] == kinds[1:]
    carrier_groups.forget()
    checked = results(m, m.model.layers, h, grad)
    assert all(torch.equal(a, b) for a, b in zip(again, checked))
    assert not torch.equal(broken[0], again[0])


@pytest.mark.parametrize(
    "route", ["mxfp4_sr"] if interpreted() else ["mxfp4_sr", "mxfp4_sr_h32", "nvfp4_cta"]
)
def test_every_schedule_gives_the_same_bits(route):
    m = model(route)
    h, grad = block_inputs()
    expected = results(m, m.model.layers[:1], h, grad)
    for name in ("serial", "single"):
        with carrier_boundary.schedule(name):
            got = results(m, m.model.layers[:1], h, grad)
        names = ["y", "dh", *(n for n, _ in m.model.layers[:1].named_parameters())]
        for what, a, b in zip(names, got, expected):
            if DEVICE == "cpu" or what == "y" or "mlp" in what:
                assert torch.equal(a, b), (name, what)
            else:  # behind attention's backward pass, which cuDNN does not repeat to the bit
                assert (a - b).float().norm() <= 0.05 * b.float().norm(), (name, what)
    unknown = pytest.raises(ValueError, match="got 'paired', needed one of serial, fused, single")
    with unknown, carrier_boundary.schedule("paired"):
        pass


@pytest.mark.usefixtures("attention_that_repeats")
def test_one_graph_serves_every_block_and_step():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    m = model("mxfp4_sr")
    h, grad = block_inputs()
    expected = results(m, m.model.layers, h, grad)
    counter = CompileCounterWithBackend("aot_eager" if interpreted() else "inductor")
    compiled = [torch.compile(b, fullgraph=True, dynamic=False, backend=counter) for b in m.model.layers]
    got = results(m, compiled, h, grad)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    with torch.no_grad():
        m.model.layers[0].mlp.down_proj.weight.mul_(1.01)
    cos, sin = rope_tables(m._inv_freq, h.shape[1], h.device)
    encoded = carrier.memory(m)
    # the new weights are seen, in the same graph
    assert torch.equal(compiled[0](h, cos, sin, state() + 1), m.model.layers[0](h, cos, sin, state()))
    assert counter.frame_count == 1
    # compiled layers keep their encodings between calls as well: two bytes per weight
    matrices = [w for w in m.model.layers.parameters() if w.dim() > 1]
    assert carrier.memory(m) == encoded == 2 * sum(w.numel() for w in matrices)


def test_a_compiled_linear_has_no_graph_break():
    m = model("mxfp4_sr")
    layer, x = one_linear(m)
    expected = run(layer, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y = compiled(x.requires_grad_(), state())
    assert torch.equal(y, expected[0])
    assert torch.equal(torch.autograd.grad(y, layer.weight, torch.ones_like(y))[0], expected[1])


def test_the_two_weight_views_share_one_encoding():
    case = Case("mxfp4_sr", 64, 64, [64])
    case.run()
    weights = case.group().weights
    assert torch.equal(weights.rows[0].data.float(), weights.columns[0].data.float().t())
    plan = case.group().plan
    assert plan.refs[W_ROW] == plan.refs[W_COL] != 0 and plan.spans[W_ROW] == plan.spans[W_COL]
