"""Build, initialise and convert a model for one route."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from fp4core.model.llama import Llama
from fp4core.ops.convert import convert
from fp4core.recipe import ModelConfig, Recipe

_STD = 0.02


def build_model(
    config: ModelConfig,
    recipe: Recipe | str | None,
    device: torch.device | str = "cpu",
    seed: int | None = 0,
    *,
    backend: str = "auto",
    **llama: Any,
) -> Llama:
    """A Llama on ``device`` with the recipe's linears and FP32 weights of ``init_weights(model, seed)``.

    On ``device="meta"`` or with ``seed=None`` the weights are left uninitialised (a load or, after sharding,
    ``materialise`` comes next). ``recipe=None`` leaves the linears unconverted. ``llama`` are keyword
    arguments of Llama (activation_checkpoint, head_chunk, compute_dtype).
    """
    with torch.device("meta"):
        model = Llama(config, **llama)
    if recipe is not None:
        convert(model, recipe, backend=backend)
    return model if torch.device(device).type == "meta" else materialise(model, device, seed)


def materialise(model: Llama, device: torch.device | str, seed: int | None) -> Llama:
    """Allocate a meta model (sharded or not) on ``device``, and initialise it unless ``seed`` is None."""
    model.to_empty(device=device)
    for module in model.modules():
        if "sr_state" in module._buffers:
            module.sr_state = torch.zeros(3, dtype=torch.int64, device=device)
    if seed is not None:
        init_weights(model, seed)
    return model


@torch.no_grad()
def init_weights(model: Llama, seed: int) -> None:
    """Fill every parameter from ``seed``: the same values on every device, in every order and sharding.

    Norms are 1. Everything else is N(0, 0.02^2); the two matrices of a block that write to the residual
    stream (o_proj, down_proj) have standard deviation 0.02 / sqrt(2 blocks), so that its variance does not
    grow with depth. Each parameter has a CPU generator keyed by the SHA-256 of (seed, name).
    """
    residual = _STD / math.sqrt(2 * model.config.blocks)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        std = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else _STD
        _fill(parameter, torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


def _fill(parameter: nn.Parameter, values: Tensor) -> None:
    """Copy the whole tensor's values into a parameter or into this rank's shard of it."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = parameter.device_mesh, parameter.placements
        # every rank holds the same values, so no rank needs to send them
        values = distribute_tensor(values.to(mesh.device_type), mesh, placements, src_data_rank=None)
    parameter.copy_(values)
