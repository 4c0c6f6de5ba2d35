"""convert and set_sr_state on our Llama and on transformers' LlamaForCausalLM."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import fp4core
from fp4core.model import build_model, hf_config_dict, init_weights
from fp4core.model.llama import Llama
from fp4core.ops.convert import BODY_LINEARS
from fp4core.ops.linear import Linear
from fp4core.recipe import list_routes, load_recipe, load_study

CONFIG = dataclasses.replace(load_study("smoke").model, hidden=64, ffn=96, head_dim=16, vocab=97)
SHALLOW = dataclasses.replace(CONFIG, blocks=2)
TOKENS = torch.randint(0, CONFIG.vocab, (2, 33), generator=torch.Generator().manual_seed(0))


def hugging_face(config=CONFIG) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(hf_config_dict(config)))


def ours(config=CONFIG) -> Llama:
    model = Llama(config)
    init_weights(model, 0)
    return model


BUILDERS = {"fp4core": ours, "transformers": hugging_face}


def hf_loss(model: nn.Module) -> torch.Tensor:
    logits = model(TOKENS[:, :-1], use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_keeps_state_dict_and_parameters(build):
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    assert fp4core.convert(model, "mxfp4_sr_h32") is model
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(value is parameters[name] for name, value in model.named_parameters())
    model.load_state_dict(before)


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_replaces_the_body_and_nothing_else(build):
    model = fp4core.convert(build(), "bf16")
    kinds = {name: type(module) for name, module in model.named_modules() if hasattr(module, "weight")}
    body = {name for name, kind in kinds.items() if kind is Linear}
    assert len(body) == 7 * CONFIG.blocks
    assert all(name.rpartition(".")[2] in BODY_LINEARS for name in body)
    assert {n for n in kinds if n.endswith("_proj")} == body
    assert kinds["lm_head"] is not Linear


@pytest.mark.parametrize("route", list_routes())
@pytest.mark.parametrize("depth", [2, 4])
def test_every_block_gets_its_recipe_and_name(route, depth):
    config = dataclasses.replace(CONFIG, blocks=depth)
    with torch.device("meta"):
        model = fp4core.convert(Llama(config), route)
    recipe = load_recipe(route)
    found = set()
    for number, block in enumerate(model.blocks):
        for index, name in enumerate(BODY_LINEARS):
            layer = getattr(block.self_attn, name, None) or getattr(block.mlp, name)
            assert (layer.block, layer.index) == (number, index)
            assert layer.recipe == recipe.for_block(number, depth, name.removesuffix("_proj"))
            found.add(layer.producer)
    assert len(found) == 7 * depth


def test_depth_hybrid_keeps_its_last_block():
    model = fp4core.convert(ours(), "depth_hybrid_27_5")
    formats = [block.mlp.up_proj.recipe.fprop.x.format for block in model.blocks]
    assert formats == ["nvfp4_cta", "nvfp4_cta", "nvfp4_cta", "mxfp4"]


@pytest.mark.parametrize("route", ["mxfp4_sr_h32", "operand_hybrid_h32"])
def test_stock_hugging_face_llama_trains(route):
    model = fp4core.convert(hugging_face(SHALLOW), route)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(3):
        fp4core.set_sr_state(model, 0, step)
        optimizer.zero_grad()
        loss = hf_loss(model)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_hugging_face_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for recompute in (False, True):
        model = fp4core.convert(hugging_face(SHALLOW), "te_nvfp4").train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            assert model.model.layers[0].gradient_checkpointing
        fp4core.set_sr_state(model, 5, 3)
        hf_loss(model).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_hugging_face_and_our_model_agree_in_one_route():
    """Same weights, same route, same bits: FP32 compute around the linears leaves only its own rounding.

    One flip of an FP4 code changes a logit by far less than the logits' own spread; a wrong operand, view or
    transposition anywhere does not.
    """
    theirs = hugging_face()
    mine = Llama(CONFIG, compute_dtype=torch.float32)
    mine.load_state_dict(theirs.state_dict())
    for model in (mine, theirs):
        fp4core.convert(model, "mxfp4_sr")
    with torch.no_grad():
        a, b = mine(TOKENS), theirs(TOKENS, use_cache=False).logits
    assert (a - b).norm() < 0.02 * b.norm()


def test_converting_again_changes_the_route():
    model = fp4core.convert(fp4core.convert(ours(), "mxfp4_sr"), "bf16")
    assert all(m.plain_bf16 for m in model.modules() if isinstance(m, Linear))


def test_state_is_shared_survives_moves_and_stays_out_of_the_state_dict():
    model = build_model(CONFIG, "mxfp4_sr", "cpu", 0)
    layers = [m for m in model.modules() if isinstance(m, Linear)]
    fp4core.set_sr_state(model, 2**40 + 1, 9, 1234)
    assert len({id(m.sr_state) for m in layers}) == 1
    assert layers[0].sr_state.tolist() == [2**40 + 1, 9, 1234]
    assert not any("sr_state" in name for name in model.state_dict())
    assert len(model._ddp_params_and_buffers_to_ignore) == len(layers)
    moved = copy.deepcopy(model).to(torch.bfloat16)
    assert all(m.sr_state.dtype == torch.int64 for m in moved.modules() if isinstance(m, Linear))
    fp4core.set_sr_state(moved, 1, 1)
    assert layers[0].sr_state.tolist() == [2**40 + 1, 9, 1234]


def without(model: nn.Module, block: int, name: str) -> nn.Module:
    setattr(model.blocks[block].mlp, name, nn.Identity())
    return model


def shortened(model: nn.Module) -> nn.Module:
    del model.model.layers[-1]
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fp4core.convert(nn.Sequential(nn.Linear(4, 4)), "bf16"),
            "without any torch.nn.Linear named",
        ),
        (
            lambda: fp4core.convert(without(ours(), 2, "up_proj"), "bf16"),
            "block 2 of 'model.layers' lacks up_proj",
        ),
        (lambda: fp4core.convert(shortened(ours()), "bf16"), "got 3 blocks .* says blocks = 4"),
        (lambda: fp4core.convert(shortened(hugging_face()), "bf16"), "num_hidden_layers = 4"),
        (lambda: fp4core.convert(nn.ModuleList([ours(), ours()]), "bf16"), "twice in block 0"),
        (lambda: fp4core.convert(nn.ModuleDict({"a": ours(), "b": ours()}), "bf16"), "several stacks"),
        (lambda: fp4core.convert(ours(), "mxfp4_srr"), "mxfp4_srr"),
        (lambda: fp4core.set_sr_state(ours(), 0, 0), "needed fp4core.convert first"),
        (lambda: fp4core.set_sr_state(build_model(CONFIG, "bf16"), -1, 0), "got seed -1"),
        (lambda: fp4core.set_sr_state(build_model(CONFIG, "bf16"), 0, 2**32), "got step 4294967296"),
    ],
    ids=[
        "no-body",
        "missing",
        "depth",
        "depth-hf",
        "nested",
        "two-stacks",
        "route",
        "unconverted",
        "seed",
        "step",
    ],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_failed_conversion_leaves_the_model_alone():
    model = without(ours(), 3, "gate_proj")
    with pytest.raises(ValueError, match="lacks gate_proj"):
        fp4core.convert(model, "mxfp4_sr")
    assert not any(isinstance(m, Linear) for m in model.modules())
