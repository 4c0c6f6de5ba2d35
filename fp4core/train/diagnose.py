"""Where a non-finite number first appeared, for the message of a run that stops."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fp4core

from .engine import Engine


def first_bad_tensor(engine: Engine, step: int) -> str:
    """Name of the first non-finite tensor of `step`, in the order of computation, on any rank.

    Looks at the weights, then at every module's output in a repeated forward pass of each micro-step, then
    at the gradients from the last layer back. The weights are those before the update of `step`.
    """
    for look in (_bad_weight, _bad_output, _bad_gradient):
        # every rank looks through the same stage: the forward pass is a collective one when it is sharded
        found = [record["found"] for record in engine.world.gather({"found": look(engine, step)})]
        for rank, name in enumerate(found):
            if name:
                return name if engine.world.size == 1 else f"{name} (rank {rank})"
    return "none found in a repeated step (the gradient norm or the loss sum overflowed)"


def _bad_weight(engine: Engine, step: int) -> str | None:
    return next((f"weight {name}" for name, p in engine.model.named_parameters() if _bad(p)), None)


def _bad_output(engine: Engine, step: int) -> str | None:
    found = None
    for number, (inputs, targets, offset) in enumerate(engine.micro_batches(step)):
        fp4core.set_sr_state(engine.model, engine.seed, step, offset)
        name = _first_bad_output(engine.model, inputs, targets)
        if name and not found:
            found = f"output of {name} (micro-step {number + 1} of {engine.split.micro_steps})"
    return found


def _bad_gradient(engine: Engine, step: int) -> str | None:
    named = reversed(list(engine.model.named_parameters()))
    return next((f"gradient of {name}" for name, p in named if p.grad is not None and _bad(p.grad)), None)


def _first_bad_output(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> str | None:
    found: list[str] = []

    def watch(name: str):
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            tensors = output if isinstance(output, (tuple, list)) else [output]
            if not found and any(isinstance(t, torch.Tensor) and _bad(t) for t in tensors):
                found.append(name or "the loss")

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            model(inputs, targets)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _bad(tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.is_floating_point() and not bool(torch.isfinite(local.detach()).all())
