"""Gradients that cross in BF16, as they were computed, and are summed in FP32 by the rank that owns a shard.

    shard_r = Σ_m (1/W) · Σ_s FP32(gradient_{m,s})[rows of r]     s = 0 .. W-1: ranks, m: micro-steps

The numbers are those of FSDP2's own reduction, which widens every gradient to FP32 first (BF16 values are
exact there) and reduce-scatters: with two ranks and no replicas the bits too, otherwise to FP32 rounding, as
terms are added in another order.

What differs is what moves. FSDP2 copies the gradients of a module into one send buffer, receives a mean and
adds it to what earlier micro-steps left, parameter by parameter. Here each rank's rows of a gradient are
sent from where the backward pass wrote them, half the bytes of FP32, and one pass reads the parts and writes
the sum. All of it runs beside the backward pass, which waits only for an exchange slower than the next two
modules' work, and the last exchanges of a micro-step beside the next one's forward pass.

It is a direct exchange: right where every pair of ranks has a link of its own (NVLink in one node). Between
nodes a ring or tree sends each byte over the network once per node and not once per rank, so an engine takes
this reduction only where a shard's ranks share a node; HSDP then sums over replicas in FP32, once per step.

Only public pieces of FSDP2 are used: its own reduction is switched off as for accumulation without
communication, and a hook takes each gradient when autograd has finished it.
"""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# Received parts begin at multiples of as many values, so that wide loads of them are aligned.
_ALIGN = 64
# Exchanges whose gradients may be waiting: one moves while the next is being made.
_IN_FLIGHT = 2
# Exchanges that the host queues before it waits for the oldest. What NCCL sends point to point goes back to
# the allocator when the host sees that it was sent, so a host far ahead holds the gradients of a whole pass
# (14 GiB in 32 blocks); this many keep the device busy all the same.
_AHEAD = 4
# Modules of a forward pass after which the exchanges of the pass before are long done.
_PASSED = 4


class Exchange:
    """The gradients of a model that `fully_shard` has sharded and whose shards are in place.

    Before each forward and backward pass `begin`, after the last one `finish`, which fills every `.grad`.
    """

    def __init__(self, model: FSDPModule) -> None:
        """ValueError when parameters are not sharded by rows."""
        model.set_requires_gradient_sync(False)
        self._bundles = [
            _Bundle(module, own, self)
            for module in model.modules()
            if isinstance(module, FSDPModule) and (own := _own_parameters(module))
        ]
        device = self._bundles[0].device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.first = self.last = True
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._queued: deque[Any] = deque()
        self._passes = self._entered = 0

    def begin(self, *, first: bool, last: bool) -> None:
        """A pass begins: the `first` of a step forgets earlier sums, the `last` one completes them."""
        self.first, self.last, self._entered = first, last, 0
        self._passes = 1 if first else self._passes + 1
        if first:
            for bundle in self._bundles:
                bundle.forget()

    def finish(self) -> None:
        """Every parameter's `.grad` is the FP32 sum, until the next pass begins, which overwrites it.

        RuntimeError when a pass left a parameter out.
        """
        for bundle in self._bundles:
            bundle.give(self._passes)
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        self._waiting.clear()

    def keep(self, gradients: list[Tensor]) -> None:
        """Keep what the side stream reads from now on, and let go of what it has read."""
        event = self.stream.record_event()
        self._waiting.append((event, gradients))
        self._release(_IN_FLIGHT)
        self._queued.append(event)
        if len(self._queued) > _AHEAD:
            self._queued.popleft().synchronize()

    def entered(self) -> None:
        """A module's forward pass begins."""
        self._entered += 1
        if self._entered == _PASSED:
            self._release(0)

    def _release(self, most: int) -> None:
        while len(self._waiting) > most:
            done, _ = self._waiting.popleft()
            torch.cuda.current_stream().wait_event(done)


class _Bundle:
    """Parameters of one module that are exchanged together, once all of them have their gradients."""

    def __init__(
        self, module: nn.Module, own: list[tuple[nn.Module, str, DTensor]], exchange: Exchange
    ) -> None:
        self._exchange, self._own = exchange, own
        mesh = own[0][2].device_mesh
        self._replicas = mesh.get_group(0) if mesh.ndim == 2 else None
        self._group = mesh.get_group(mesh.ndim - 1)
        self._ranks, self._rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._factor = 1.0 / mesh.size()
        for _, name, shard in own:
            if not shard.placements[-1].is_shard(0) or shard.dtype != torch.float32:
                raise ValueError(
                    f"exchange of gradients: got {name} as {shard.placements} of {shard.dtype}; needed FP32 "
                    "weights sharded by rows"
                )
        self.device = own[0][2].to_local().device
        # kept for good, like the moments
        self._sums = [torch.empty_like(shard.to_local()) for _, _, shard in own]
        self._sizes = [total.numel() for total in self._sums]
        # places of the parameters' parts among those that a rank sends
        self._starts = [0]
        for size in self._sizes:
            self._starts.append(self._starts[-1] + -(-size // _ALIGN) * _ALIGN)
        self._rows = [_rows(shard.shape[0], self._ranks) for _, _, shard in own]
        self._offsets = [
            sum(rows[: self._rank]) * (shard.numel() // shard.shape[0])
            for rows, (_, _, shard) in zip(self._rows, own, strict=True)
        ]
        self._plan()
        self._scaled_sums = None
        if self.device.type == "cuda":
            from fp4core.kernels.scaled_sum import ScaledSums

            self._scaled_sums = ScaledSums(
                self._sums, self._offsets, self._starts, self._rank, self._ranks, self._factor
            )
        self._hooked: list[nn.Parameter | None] = [None] * len(own)
        self._arrived: list[Tensor | None] = [None] * len(own)
        self._count = 0
        # after FSDP's hook, which puts the gathered parameters in place
        module.register_forward_pre_hook(self._watch)

    def _plan(self) -> None:
        """The operations of every exchange, made once: only their tensors change."""
        self._operations: list[dist.P2POp] = []
        self._sends: list[tuple[dist.P2POp, int, int]] = []  # of which parameter, to which rank
        self._receives: list[tuple[dist.P2POp, int]] = []  # into which of the cuts
        self._cuts: list[int] = []  # of what is received, in values
        for r in range(self._ranks):
            if r == self._rank:
                continue
            peer = dist.get_global_rank(self._group, r)
            for k, size in enumerate(self._sizes):
                if self._rows[k][r]:
                    send = dist.P2POp(dist.isend, self._sums[k], peer, self._group, k)
                    self._operations.append(send)
                    self._sends.append((send, k, r))
                if size:
                    receive = dist.P2POp(dist.irecv, self._sums[k], peer, self._group, k)
                    self._operations.append(receive)
                    self._receives.append((receive, len(self._cuts)))
                    padding = self._starts[k + 1] - self._starts[k] - size
                    self._cuts += [size, padding] if padding else [size]

    def forget(self) -> None:
        self._count, self._arrived = 0, [None] * len(self._own)

    def give(self, passes: int) -> None:
        if self._count != passes:
            raise RuntimeError(
                f"gradients of {', '.join(name for _, name, _ in self._own)}: got {self._count} exchanges in "
                f"{passes} passes; every parameter needs a gradient in each pass, or set train.exchange false"
            )
        for (_, _, shard), total in zip(self._own, self._sums, strict=True):
            shard.grad = DTensor.from_local(
                total,
                shard.device_mesh,
                shard.placements,
                run_check=False,
                shape=shard.shape,
                stride=shard.stride(),
            )

    def _watch(self, module: nn.Module, arguments: Any) -> None:
        """Have a hook on each gathered parameter that the forward pass is about to use."""
        self._exchange.entered()
        for k, (owner, name, _) in enumerate(self._own):
            parameter = getattr(owner, name)
            if self._hooked[k] is not parameter:
                # a parameter and its hooks are nothing that the garbage collector sees through
                parameter.register_post_accumulate_grad_hook(partial(_take, weakref.ref(self), k))
                self._hooked[k] = parameter

    def take(self, k: int, parameter: nn.Parameter) -> None:
        self._arrived[k], parameter.grad = parameter.grad, None
        if all(gradient is not None for gradient in self._arrived):
            gradients, self._arrived = self._arrived, [None] * len(self._own)
            self._count += 1
            self._queue(gradients)

    def _queue(self, gradients: list[Tensor]) -> None:
        """Exchange and sum on the side stream; the gradients are kept until that is done."""
        stream = self._exchange.stream
        if stream is None:
            self._reduce(gradients)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._reduce(gradients)
        self._exchange.keep(gradients)

    @torch.no_grad()
    def _reduce(self, gradients: list[Tensor]) -> None:
        gradients = [gradient.contiguous() for gradient in gradients]
        parts = torch.empty((self._ranks - 1, self._starts[-1]), dtype=gradients[0].dtype, device=self.device)
        if self._operations:
            cut = [
                gradient.split_with_sizes(rows) for gradient, rows in zip(gradients, self._rows, strict=True)
            ]
            for operation, k, r in self._sends:
                operation.tensor = cut[k][r]
            room = parts.view(-1).split_with_sizes(self._cuts)
            for operation, at in self._receives:
                operation.tensor = room[at]
            for work in dist.batch_isend_irecv(self._operations):
                work.wait()
            for operation in self._operations:  # keep no gradient
                operation.tensor = self._sums[0]
        add = not self._exchange.first
        if self._scaled_sums is not None:
            self._scaled_sums(gradients, parts, add=add)
        else:
            self._sum(gradients, parts, add)
        if self._exchange.last and self._replicas is not None:
            for total in self._sums:
                dist.all_reduce(total, group=self._replicas)

    def _sum(self, gradients: list[Tensor], parts: Tensor, add: bool) -> None:
        """What `ScaledSums` does, where there is no GPU."""
        for k, total in enumerate(self._sums):
            begin, size, start = self._offsets[k], self._sizes[k], self._starts[k]
            terms = list(parts[:, start : start + size])
            terms.insert(self._rank, gradients[k].view(-1)[begin : begin + size])
            scaled = terms[0].float()
            for term in terms[1:]:
                scaled = scaled + term.float()
            scaled *= self._factor
            flat = total.view(-1)
            flat.add_(scaled) if add else flat.copy_(scaled)


def _take(bundle: weakref.ref[_Bundle], k: int, parameter: nn.Parameter) -> None:
    found = bundle()
    if found is not None:
        found.take(k, parameter)


def _rows(count: int, ranks: int) -> list[int]:
    """How many of `count` rows each rank has: dim 0 may not divide, the last ranks have fewer, or none."""
    each = -(-count // ranks)
    return [max(0, min(each, count - r * each)) for r in range(ranks)]


def _own_parameters(module: nn.Module) -> list[tuple[nn.Module, str, DTensor]]:
    """(owner, name, shard) of the parameters of `module` that no sharded module inside it has."""
    own = [(module, name, p) for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)]
    for child in module.children():
        if not isinstance(child, FSDPModule):
            own += _own_parameters(child)
    return own
