"""Optimizer, schedule and clipping of the shared training configuration.

AdamW on FP32 master weights (fused kernel, betas (0.9, 0.95), eps 1e-8). Weight decay applies to every
parameter, norm gains and the embedding included: the report states one decay without exception and its
metric columns are those of a trainer that makes none, so an exception here would be an invention.

Schedule: lr(step) = lr · min(1, step / warmup) for step = 1, 2, ...; then constant (WSD without a decay:
the report's runs end in the stable phase). The first update uses lr / warmup, as the published history does
(step 1: 3e-4 / 2000 = 1.5e-7).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw


def learning_rate(step: int, *, peak: float, warmup: int) -> float:
    """Learning rate of update `step` (1-based)."""
    return peak * min(1.0, step / warmup) if warmup > 0 else peak


def make_optimizer(
    model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW with its state allocated at once, so that a checkpoint can be read into it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, fused=True
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


@torch.no_grad()
def update(optimizer: torch.optim.AdamW, skip: Tensor | None = None) -> None:
    """`optimizer.step()` of `make_optimizer`'s, on each rank's shards; queued, the host waits for nothing.

    The same fused kernel; over some 300 sharded parameters DTensor's bookkeeping keeps the GPU waiting for
    7 ms in every step.

    Args:
        skip: 0-dim FP32 on the parameters' device. 1 leaves weights, moments and step counts as they are, to
            the bit and whatever the gradients hold; 0 changes nothing about the update.
    """
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [optimizer.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [_local(p) for p in parameters],
            [_local(p.grad) for p in parameters],
            [_local(s["exp_avg"]) for s in states],
            [_local(s["exp_avg_sq"]) for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            found_inf=skip,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def set_progress(optimizer: torch.optim.Optimizer, *, step: int) -> None:
    """Put the number of updates made so far in place, after a checkpoint was read."""
    for state in optimizer.state.values():
        state["step"].fill_(step)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Learning rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def gradient_norm(model: nn.Module) -> Tensor:
    """Global norm of the gradients: 0-dim FP32 on their device; queued, the host waits for nothing.

    `nn.utils.get_total_norm` in one collective: with sharded parameters that one asks DTensor, parameter by
    parameter, some 300 times in a row while the GPU waits. Sums are formed in the same order.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not grads or not isinstance(grads[0], DTensor):
        return nn.utils.get_total_norm(grads, foreach=True)
    mesh = grads[0].device_mesh
    norms = torch.stack(torch._foreach_norm([g.to_local() for g in grads], 2.0))
    squares = norms**2
    # replicas hold the same gradients: only the ranks that share one copy add up
    dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
    return torch.linalg.vector_norm(squares**0.5, 2.0)


@torch.no_grad()
def clip_gradients(model: nn.Module, largest: float, norm: Tensor | None = None) -> Tensor:
    """Scale the gradients so that their global norm is at most `largest`; returns the norm before.

    `norm`: what `gradient_norm` gave, where it is known. Queued, the host waits for nothing.
    """
    norm = gradient_norm(model) if norm is None else norm
    grads = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    if grads:
        # by 1 where there is no norm: what is wrong is then still where it was, for `first_bad_tensor`
        scale = (largest / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, torch.where(norm.isfinite(), scale, 1.0))
    return norm


def _local(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return x.to_local() if isinstance(x, DTensor) else x
