"""Put a route's recipe into a Llama: replace its body linears, set its random state.

Works on ``fp4core.model.Llama`` and on a stock Hugging Face ``LlamaForCausalLM``: any module that keeps its
blocks under one list and names their linears q_proj k_proj v_proj o_proj gate_proj up_proj down_proj.
Embedding, norms, attention and output head are left as they are.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from fp4core.ops import spec as specs
from fp4core.ops.held import HeldAmax
from fp4core.ops.host_copy import to_device
from fp4core.ops.linear import Linear, preferred_backend, resolve_backend
from fp4core.recipe import Recipe, load_recipe

# Order of the layer index in the random key; changing it changes every stochastic run.
BODY_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# linear name -> (parent module, linear)
_Block = dict[str, tuple[nn.Module, nn.Linear]]


def convert(model: nn.Module, recipe: Recipe | str, *, backend: str = "auto") -> nn.Module:
    """Replace the body linears of ``model``, in place, by ``fp4core.Linear`` of the block's recipe.

    Parameters are taken over, not copied: state_dict keys, optimizers and tied tensors stay valid. A
    converted model may be converted again, to another recipe. ``recipe`` is a Recipe or a route's name or
    path. Returns the model. Raises ValueError, before anything is replaced, when the model has no such
    linears, when a block lacks one of the seven, or when depth and configuration disagree.
    """
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    backend = preferred_backend(recipe, backend)
    blocks = _body(model)
    depth = len(blocks)
    _check_depth(model, depth)
    made = [
        (
            blocks[block][name][0],
            name,
            _replacement(blocks[block][name][1], recipe, block, depth, index, backend),
        )
        for block in range(depth)
        for index, name in enumerate(BODY_LINEARS)
    ]
    model.held_amax = None
    if recipe.amax_interval is not None:
        model.held_amax = HeldAmax(depth * specs.LINEARS, recipe.amax_interval)
        for _, _, layer in made:
            layer.spec = specs.with_table(layer.spec, model.held_amax.number)
    for parent, name, layer in made:
        setattr(parent, name, layer)
    set_sr_state(model, seed=0, step=0)
    # DistributedDataParallel would overwrite every rank's token offset with the first rank's
    states = [name for name, _ in model.named_buffers(remove_duplicate=False) if name.endswith("sr_state")]
    model._ddp_params_and_buffers_to_ignore = states
    return model


def set_sr_state(model: nn.Module, seed: int, step: int, token_offset: int = 0) -> None:
    """Set what stochastic rounding draws from next, in every ``fp4core.Linear`` of ``model``.

    Args:
        seed: of the run, 0 to 2^63 - 1.
        step: optimizer step, 0 to 2^32 - 1.
        token_offset: index in the global batch of the first token of the next forward pass (sequence index x
            tokens per sequence), so that micro-batches and ranks draw what one big batch would.

    A backward pass that is still to come keeps the state of its own forward pass. Raises ValueError when out
    of range or when the model was not converted.
    """
    for name, value, bits in (("seed", seed, 63), ("step", step, 32), ("token_offset", token_offset, 63)):
        if not 0 <= int(value) < 2**bits:
            raise ValueError(f"set_sr_state: got {name} {value}, needed 0 to 2^{bits} - 1")
    layers = [m for m in model.modules() if isinstance(m, Linear)]
    if not layers:
        raise ValueError("set_sr_state: got a model without fp4core.Linear, needed fp4core.convert first")
    shared: dict[torch.device, torch.Tensor] = {}
    for layer in layers:
        device = layer.weight.device
        if device not in shared:
            # a new tensor, never written in place: what a pending backward pass saved stays as it was
            shared[device] = to_device(torch.tensor([int(seed), int(step), int(token_offset)]), device)
        layer.sr_state = shared[device]
    if resolve_backend(layers[0].backend, layers[0].weight.device.type) == "te":
        importlib.import_module("fp4core.ops.te_backend").seed_generator(
            int(seed), int(step), int(token_offset)
        )


def _named_body(model: nn.Module) -> Iterator[tuple[str, int, str, nn.Module, nn.Linear]]:
    """(list path, block, linear name, parent, linear) of every body linear."""
    for path, module in model.named_modules():
        parts = path.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is None or parts[-1] not in BODY_LINEARS or not isinstance(module, nn.Linear):
            continue
        parent = model.get_submodule(".".join(parts[:-1]))
        yield ".".join(parts[:at]), int(parts[at]), parts[-1], parent, module


def _body(model: nn.Module) -> list[dict[str, tuple[nn.Module, nn.Linear]]]:
    """Per block: linear name -> (parent module, linear)."""
    lists: dict[str, dict[int, dict[str, tuple[nn.Module, nn.Linear]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for stack, block, name, parent, linear in _named_body(model):
        if name in lists[stack][block]:
            raise ValueError(f"convert: got {name} twice in block {block} of {stack!r}, needed it once")
        lists[stack][block][name] = (parent, linear)
    if not lists:
        raise ValueError(
            f"convert: got {type(model).__name__} without any torch.nn.Linear named "
            f"{', '.join(BODY_LINEARS)} in numbered blocks; needed a Llama "
            "(fp4core.model.Llama or transformers' LlamaForCausalLM)"
        )
    if len(lists) > 1:
        raise ValueError(f"convert: got several stacks of blocks ({', '.join(lists)}), needed one")
    stack, blocks = next(iter(lists.items()))
    depth = max(blocks) + 1
    for block in range(depth):
        missing = [name for name in BODY_LINEARS if name not in blocks.get(block, {})]
        if missing:
            raise ValueError(
                f"convert: block {block} of {stack!r} lacks {', '.join(missing)} as torch.nn.Linear; every "
                "block needs all seven"
            )
    return [blocks[block] for block in range(depth)]


def _check_depth(model: nn.Module, depth: int) -> None:
    config = getattr(model, "config", None)
    for field in ("num_hidden_layers", "blocks"):
        stated = getattr(config, field, None)
        if isinstance(stated, int) and stated != depth:
            raise ValueError(
                f"convert: got {depth} blocks with body linears, but the model's configuration says "
                f"{field} = {stated}; load or build the whole model first"
            )


def _replacement(old: nn.Linear, recipe: Recipe, block: int, depth: int, index: int, backend: str) -> Linear:
    has_bias, k, n = old.bias is not None, old.in_features, old.out_features
    linear = recipe.for_block(block, depth, BODY_LINEARS[index].removesuffix("_proj"))
    new = Linear(k, n, linear, block, index, has_bias, backend=backend, device="meta")
    new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)
