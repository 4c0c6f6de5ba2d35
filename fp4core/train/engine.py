"""One optimizer step of one route on this rank: model, optimizer and data, and nothing that is left on disk.

    loss = sum over the global batch of the per-token cross entropy (FP32) / (G · S)

Rank r of W takes the r-th of W equal parts of the global batch and walks through it in micro-steps of
`local_batch` sequences, so the order of tokens and the stochastic bits (`token_offset` is the place in the
global batch) depend neither on W nor on the accumulation. Gradients are accumulated in FP32; their sum is
formed in another order when the split changes, and a format with a tensor-wide or stripe-wide scale sees
other tensors: equal splits agree to the bit, different ones to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fp4core
from fp4core.model.build import build_model, materialise
from fp4core.ops.held import held_amax
from fp4core.recipe import Recipe, Study

from .distributed import World, shard
from .errors import RunError
from .guard import step_guard
from .optim import learning_rate, make_optimizer, set_learning_rate, set_progress
from .shards import TokenStream


@dataclass(frozen=True)
class StepResult:
    """What a step leaves: mean loss of the global batch (nats per token), gradient norm before clipping."""

    loss: float
    grad_norm: float
    lr: float
    replayed: bool

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Split:
    """How this rank takes its part of the global batch."""

    first: int
    local_batch: int
    micro_steps: int

    @classmethod
    def of(cls, *, global_batch: int, local_batch: int, world: World) -> Split:
        """ValueError when the parts do not come out even."""
        if global_batch % (local_batch * world.size):
            raise ValueError(
                f"global batch {global_batch} is no multiple of local batch {local_batch} "
                f"x {world.size} ranks; choose a local batch that divides it"
            )
        share = global_batch // world.size
        return cls(world.rank * share, local_batch, share // local_batch)


class Engine:
    """Model, optimizer and data cursor of (study, recipe, seed) on this rank."""

    def __init__(
        self,
        study: Study,
        recipe: Recipe,
        seed: int,
        *,
        world: World,
        stream: TokenStream,
        local_batch: int | None = None,
        activation_checkpoint: str | None = None,
    ) -> None:
        train = study.train
        self.study, self.recipe, self.seed, self.world, self.stream = study, recipe, seed, world, stream
        self.split = Split.of(
            global_batch=train.global_batch, local_batch=local_batch or train.local_batch, world=world
        )
        set_determinism(train.threads)
        policy = activation_checkpoint or train.activation_checkpoint
        model = build_model(study.model, recipe, "meta", backend=study.backend, activation_checkpoint=policy)
        if train.compile:
            for block in model.blocks:
                # the function and not the module: parameter names and FSDP hooks stay outside the graph
                block.forward = torch.compile(block.forward)
        self.model = materialise(shard(model, world), world.device, seed)
        self.optimizer = make_optimizer(
            self.model, lr=train.lr, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay
        )
        self.guard = step_guard(self.model, study.backend, world.device.type)
        self.amax = held_amax(self.model)

    def resume(self, step: int, record: dict[str, Any]) -> None:
        """Go on after `step` updates, once weights and moments are in place.

        `record` is the checkpoint's manifest; ValueError when the route holds maxima and it has none.
        """
        set_progress(self.optimizer, step=step)
        if self.amax is not None:
            self.amax.load(record.get("held_amax") or {})

    def extra_state(self) -> dict[str, Any]:
        """State beside weights and moments, as JSON: the held maxima of routes that have them."""
        return {} if self.amax is None else {"held_amax": self.amax.state()}

    @property
    def tokens_per_step(self) -> int:
        return self.study.train.global_batch * self.study.train.sequence

    def micro_batches(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """(inputs, targets, global token of the first row) of this rank's micro-steps of `step` (1-based)."""
        train = self.study.train
        for number in range(self.split.micro_steps):
            row = self.split.first + number * self.split.local_batch
            place = (step - 1) * train.global_batch + row
            seed = order_seed(self.study.data.seed, self.seed)
            rows = torch.from_numpy(self.stream.batch(place, self.split.local_batch, seed=seed))
            rows = rows.to(self.world.device, non_blocking=True)
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), row * train.sequence

    def step(self, step: int) -> StepResult:
        """Make update `step`. The weights are left alone when loss or gradient norm is not finite."""
        train = self.study.train
        lr = learning_rate(step, peak=train.lr, warmup=train.warmup)
        total, replayed = self._exact_gradients(step)
        loss = self.world.reduce(total)[0] / self.tokens_per_step
        norm = _whole(nn.utils.clip_grad_norm_(self.model.parameters(), train.clip, foreach=True))
        result = StepResult(loss, norm, lr, replayed)
        if result.finite:
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
        return result

    def _exact_gradients(self, step: int) -> tuple[float, bool]:
        """Gradients of `step`, made again while the backend finds that a tensor did not fit its carrier.

        The only place between backward and the optimizer: a guard that fails on any rank repeats on all.
        """
        if self.guard is None:
            return self.gradients(step), False
        for attempt in range(self.guard.attempts):
            self.guard.begin()
            total = self.gradients(step)
            if not self.world.reduce(float(not self.guard.exact()), op="max")[0]:
                return total, attempt > 0
        raise RunError(
            f"step {step} was not exact after {self.guard.attempts} attempts; train with backend: reference "
            "and report the route and the checkpoint"
        )

    def gradients(self, step: int) -> float:
        """Fill every .grad with the gradient of `step`; returns this rank's summed per-token loss."""
        self.optimizer.zero_grad(set_to_none=True)
        # FSDP2 averages over ranks, so each rank's share is scaled up by their number
        scale = self.world.size / self.tokens_per_step
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if self.amax is not None:
            self.amax.begin(step)
        for inputs, targets, offset in self.micro_batches(step):
            fp4core.set_sr_state(self.model, self.seed, step, offset)
            losses = self.model(inputs, targets).float()
            (losses.sum() * scale).backward()
            total += losses.detach().double().sum()
        if self.amax is not None:
            self.amax.finish(lambda values: self.world.reduce(*values, op="max"))
        return float(total)


def order_seed(data_seed: int, run_seed: int) -> int:
    """Seed of the data order: both the study's shuffle and the run choose it."""
    return ((data_seed & 0xFFFFFFFF) << 32) | (run_seed & 0xFFFFFFFF)


def set_determinism(threads: int) -> None:
    """Fixed thread count and deterministic kernels: the same step gives the same bits."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def _whole(norm: torch.Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
