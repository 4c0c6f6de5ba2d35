"""Weights whose encodings stand in for them: what is freed, and that no bit depends on it."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fp4core.train.engine as engines
from fp4core.model.build import build_model
from fp4core.ops import carrier, carrier_groups
from fp4core.ops.carrier_groups import linears
from fp4core.recipe import load_recipe
from tests.kernels.carriers import CONFIG, DEVICE, block_inputs, engine, model, one_linear, results, run


def _empty(m: torch.nn.Module) -> list[bool]:
    return [layer.weight.untyped_storage().nbytes() == 0 for layer in linears(m)]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.usefixtures("attention_that_repeats")
@pytest.mark.parametrize(("route", "policy"), [("mxfp4_sr", "full"), ("nvfp4_cta", "none")])
def test_a_block_whose_weights_are_gone_computes_the_same(route, policy):
    m = build_model(CONFIG, load_recipe(route), DEVICE, 0, backend="carrier", activation_checkpoint=policy)
    h, grad = block_inputs()
    first = m.model.layers[:1]
    expected = results(m, first, h, grad)
    held = carrier.memory(m)
    freed = carrier.release_weights(first[0])
    assert freed == sum(layer.weight.nbytes for layer in linears(first[0]))
    assert _empty(m) == [True] * 7 + [False] * 7
    assert _same(expected, results(m, first, h, grad))
    assert carrier.release_weights(first[0]) == 0
    assert carrier.memory(m) == held


def test_another_models_end_takes_no_encodings_along():
    """Layers of the same recipe and place share what is remembered about them."""
    first, x = one_linear(model("mxfp4_sr"))
    run(first, x)
    second, _ = one_linear(model("mxfp4_sr"))
    expected = run(second, x)
    carrier.release_weights(second)
    (group,) = carrier_groups.groups(second)
    parameters = [weakref.ref(layer.weight) for layer in (first, second)]
    del first
    gc.collect()
    assert parameters[0]() is None and _same(expected, run(second, x))
    del second, expected
    gc.collect()
    assert parameters[1]() is None
    assert not group.weights.key


def test_weights_that_were_filled_again_are_encoded_again():
    layer, x = one_linear(model("mxfp4_sr"))
    expected = run(layer, x)
    kept = layer.weight.detach().clone()
    carrier.release_weights(layer)
    carrier.encode_weights(layer)
    with pytest.raises(RuntimeError, match=r"without storage .*no encoding of this epoch"):
        run(layer, x)
    layer.weight.untyped_storage().resize_(kept.nbytes)
    with torch.no_grad():
        layer.weight.copy_(2 * kept)
    assert torch.equal(run(layer, x)[0], 2 * expected[0])


def test_only_weights_that_an_encoding_stands_in_for_are_freed():
    layer, x = one_linear(model("mxfp4_sr"))
    assert carrier.release_weights(layer) == 0  # not encoded yet
    run(layer, x)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert carrier.release_weights(layer) == 0  # changed since
    run(layer, x)
    (group,) = carrier_groups.groups(layer)
    # a BF16 operand is the parameter itself
    group.weights.rows[0] = dataclasses.replace(group.weights.rows[0], data=layer.weight.detach()[:64])
    assert carrier.release_weights(layer) == 0 and _empty(layer) == [False]


@pytest.mark.parametrize("kind", ["bf16", "e5m2"])
def test_a_plan_that_changes_meanwhile_finds_its_type(kind):
    """A repeated step may move a contraction to BF16 in its second micro-step."""
    layer, x = one_linear(model("mxfp4_sr"))
    other = copy.deepcopy(layer)
    got = []
    for each in (layer, other):
        carrier_groups.forget()
        run(each, x)
        if each is other:
            carrier.release_weights(each)
        (group,) = carrier_groups.groups(each)
        group.plan.kinds[carrier_groups.W_ROW] = group.plan.kinds[carrier_groups.W_COL] = kind
        got.append(run(each, x))
        types = {c.data.dtype for c in group.weights.carriers()}
        # of two FP8 types both operands may now be E5M2, which nothing multiplies
        assert types == {torch.bfloat16} if each is other else types
    assert _same(*got)


@pytest.fixture
def one_rank(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("attention_that_repeats", "one_rank")
def test_training_releases_what_it_gathered_and_nothing_changes(monkeypatch):
    """Over micro-steps, after a pass that was given up; evaluation reads whole weights."""
    found = []
    for released in (False, True):
        carrier_groups.forget()
        with monkeypatch.context() as patch:
            if not released:
                patch.setattr(engines, "release_encoded", lambda model: None)
            made = engine(accumulation=2)
        seen: list[list[bool]] = []
        made.model.lm_head.register_forward_hook(partial(_note, made.model, seen))
        made.guard.begin(1, 0)
        inputs, targets, _ = next(made.micro_batches(1))
        made.model(inputs, targets)  # and no backward pass
        seen.clear()
        record = made.step(1)
        found.append((record.loss, record.grad_norm, [p.to_local().clone() for p in made.model.parameters()]))
        with torch.no_grad():
            inputs, targets, _ = next(made.micro_batches(2))
            made.model(inputs, targets)
        assert seen == [[released] * 7] * 2 + [[False] * 7]  # two micro-steps and one evaluation
    assert found[0][:2] == found[1][:2]
    assert _same(found[0][2], found[1][2])


def _note(m: torch.nn.Module, seen: list[list[bool]], *_) -> None:
    seen.append(_empty(m))
