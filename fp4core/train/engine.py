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
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fp4core
from fp4core.model.build import build_model, materialise
from fp4core.ops.held import held_amax
from fp4core.ops.host_copy import HostCopy, to_device
from fp4core.recipe import Recipe, Study

from .distributed import World, exchange_gradients, keep_gathered, release_encoded, reshard, shard
from .errors import RunError
from .guard import step_guard
from .optim import (
    clip_gradients,
    gradient_norm,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    set_progress,
    update,
)
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
        head_chunk: int | None = None,
        initialise: Callable[[nn.Module], None] | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """See the module. `local_batch` and `activation_checkpoint` replace the study's.

        Args:
            head_chunk: tokens whose logits exist at once (default: the model's own).
            initialise: fills the weights instead of `init_weights`: where they are read afterwards, or for
                measurements that need no particular ones.
            note: told how far the drawing of a large model's weights has come.
        """
        train = study.train
        self.study, self.recipe, self.seed, self.world, self.stream = study, recipe, seed, world, stream
        self.split = Split.of(
            global_batch=train.global_batch, local_batch=local_batch or train.local_batch, world=world
        )
        set_determinism(train.threads, exact=train.deterministic)
        policy = activation_checkpoint or train.activation_checkpoint
        model = build_model(study.model, recipe, "meta", backend=study.backend, activation_checkpoint=policy)
        if head_chunk is not None:
            model.lm_head.chunk = head_chunk
        if train.compile:
            compile_model(model, exact=train.deterministic)
        sharded = shard(
            model,
            world,
            gather=train.gather,
            keep_gathered=train.keep_gathered,
            replicas=train.replicas,
        )
        self.model = materialise(sharded, world.device, seed if initialise is None else None, note=note)
        if initialise is not None:
            initialise(self.model)
        self.exchange = (
            exchange_gradients(self.model, world, gather=train.gather, replicas=train.replicas)
            if train.exchange
            else None
        )
        if train.keep_gathered:
            release_encoded(self.model)
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
        plans = record.get("carrier_plans") or []
        if self.guard is not None and plans:
            # another world size has other ranks' tensors; a plan is only where a step starts from
            self.guard.load(plans[self.world.rank % len(plans)])

    def extra_state(self) -> dict[str, Any]:
        """State beside weights and moments, as JSON; every rank calls it.

        The held maxima of routes that have them, and each rank's carrier plans.
        """
        state: dict[str, Any] = {} if self.amax is None else {"held_amax": self.amax.state()}
        if self.guard is not None:
            ranks = self.world.gather({"plans": self.guard.state()})
            state["carrier_plans"] = [rank["plans"] for rank in ranks]
        return state

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
            rows = to_device(rows, self.world.device)
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), row * train.sequence

    def step(self, step: int) -> StepResult:
        """Make update `step`. The weights are left alone when loss or gradient norm is not finite.

        The host waits for the device once, while that has the update still to make, and goes on to the next
        step then: on return the update may be in the device's queue.
        """
        lr = learning_rate(step, peak=self.study.train.lr, warmup=self.study.train.warmup)
        set_learning_rate(self.optimizer, lr)
        loss, norm, replayed = self.exact_gradients(step, update_weights=True)
        return StepResult(loss, norm, lr, replayed)

    def exact_gradients(self, step: int, *, update_weights: bool = False) -> tuple[float, float, bool]:
        """Gradients of `step`, made again while the backend finds that a tensor did not fit its carrier.

        A guard that fails on any rank repeats on all. With `update_weights` gradients are clipped and every
        attempt's update is queued, for the device to skip where that attempt was not exact or not finite.

        Returns: mean loss, gradient norm before clipping, whether the step was made again.
        """
        guard = self.guard
        for attempt in range(1 if guard is None else guard.attempts):
            if guard is not None:
                guard.begin(step, attempt)
            total = self.gradients(step).double()
            flag = None if guard is None else guard.flag()
            flag = torch.zeros_like(total) if flag is None else flag.to(total)
            told = self.world.add(torch.stack((total, flag)))
            norm = gradient_norm(self.model)
            seen = HostCopy(torch.cat((told, norm.to(told)[None])))
            if update_weights:
                good = told.isfinite().all() & norm.isfinite() & (told[1] == 0)
                clip_gradients(self.model, self.study.train.clip, norm)
                update(self.optimizer, skip=(~good).float())
            loss, misfits, size = seen.wait()[0].tolist()
            fitted = guard is None or guard.exact()
            if not misfits:
                if not fitted:
                    raise RuntimeError(f"step {step}: not exact, but the guard's flag let the update pass")
                return loss / self.tokens_per_step, size, attempt > 0
        raise RunError(
            f"step {step} was not exact after {guard.attempts} attempts; train with backend: reference "
            "and report the route and the checkpoint"
        )

    def gradients(self, step: int) -> torch.Tensor:
        """Fill every .grad with the gradient of `step`.

        Returns this rank's summed per-token loss, 0-dim FP64 on the device: nothing has waited for it.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if self.study.train.keep_gathered:
            reshard(self.model)
        # FSDP2 averages over ranks, so each rank's share is scaled up by their number
        scale = self.world.size / self.tokens_per_step
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if self.amax is not None:
            self.amax.begin(step, gradient_scale=self.world.size)
        for number, (inputs, targets, offset) in enumerate(self.micro_batches(step), start=1):
            if self.study.train.keep_gathered:
                keep_gathered(self.model, number < self.split.micro_steps)
            if self.exchange is not None:
                self.exchange.begin(first=number == 1, last=number == self.split.micro_steps)
            fp4core.set_sr_state(self.model, self.seed, step, offset)
            losses = self.model(inputs, targets).float()
            (losses.sum() * scale).backward()
            total += losses.detach().double().sum()
        if self.exchange is not None:
            self.exchange.finish()
        if self.amax is not None:
            self.amax.finish(lambda values: self.world.reduce(*values, op="max"))
        return total


def order_seed(data_seed: int, run_seed: int) -> int:
    """Seed of the data order: both the study's shuffle and the run choose it."""
    return ((data_seed & 0xFFFFFFFF) << 32) | (run_seed & 0xFFFFFFFF)


def compile_model(model: nn.Module, *, exact: bool = False) -> None:
    """Compile the blocks, the final norm and the loss's element-wise work, each alone.

    `exact` lets no timing choose a kernel: another choice in another process sums in another order.

    Functions and not modules: parameter names and FSDP's hooks stay outside the graphs. Blocks of one recipe
    share a graph; those of another must not get it, so the guards on their attributes stay under FSDP too.
    """
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    if exact and hasattr(inductor, "deterministic"):
        inductor.deterministic = True
    dynamo.skip_fsdp_guards = False
    dynamo.recompile_limit = max(8, 2 * len(model.blocks))
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)
    model.model.norm.forward = torch.compile(model.model.norm.forward, dynamic=False)
    model.lm_head.compile_losses()


def set_determinism(threads: int, *, exact: bool = False) -> None:
    """Fixed thread count and deterministic kernels: the same step gives the same bits.

    On a GPU cuDNN's attention, the fastest, may still sum its gradients in another order each time; `exact`
    keeps it out and makes FlashAttention take its deterministic backward.
    """
    torch.set_num_threads(threads)
    # cuBLAS reads it when its first handle is made; without it products may share a workspace
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=not exact)
    torch.backends.cuda.enable_cudnn_sdp(not exact)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
