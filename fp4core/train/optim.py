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
from torch import nn


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


def set_progress(optimizer: torch.optim.Optimizer, *, step: int) -> None:
    """Put the number of updates made so far in place, after a checkpoint was read."""
    for state in optimizer.state.values():
        state["step"].fill_(step)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Learning rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr
