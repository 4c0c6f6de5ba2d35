"""Gradients that cross in BF16, as they were computed, and are summed in FP32 by the rank that owns a shard.

    shard_r = (1/W) · Σ_s FP32(gradient_s)[part r]        s = 0 .. W-1: the ranks

The numbers are those of FSDP2's own reduction, which widens every gradient to FP32 first (BF16 values are
exact there) and reduce-scatters: on two ranks the bits too, on more the terms are added in another order.
What differs is what moves. Between ranks half the bytes do, so that collectives hold the multiprocessors
for half the time while the backward pass needs them; and the copy into the send buffer, which is not hidden
behind anything, moves 4 instead of 6 bytes per weight.

It is a direct exchange: right where every pair of ranks has a link of its own (NVLink in one node). Between
nodes a ring or tree sends each byte over the network once per node and not once per rank, so `shard` takes
this reduction only where a shard's ranks share a node; HSDP then reduces between nodes in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


class Exchange:
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`, one per module."""

    def __init__(self) -> None:
        self._input_is_next = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The send buffer, BF16, and then the FP32 shard: FSDP2 asks for both, in this order, as FP32."""
        if dtype != torch.float32:
            raise ValueError(f"gradients are summed in torch.float32, but FSDP asks for {dtype}")
        kind = torch.bfloat16 if self._input_is_next else torch.float32
        buffer = torch.empty(size, dtype=kind, device=device)
        self._input_is_next = not self._input_is_next
        return buffer

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Rank r's `output_tensor` (FP32 [n]): mean of part r of every rank's `input_tensor` (BF16 [W · n]).

        ValueError for buffers that are not `allocate`'s, for another reduction than the mean, and when asked
        to return before the work is queued.
        """
        size = dist.get_world_size(group)
        kinds = (input_tensor.dtype, output_tensor.dtype)
        if kinds != (torch.bfloat16, torch.float32) or input_tensor.numel() != size * output_tensor.numel():
            raise ValueError(
                f"got {input_tensor.numel()} values of {kinds[0]} for a shard of {output_tensor.numel()} of "
                f"{kinds[1]}; needed {size} x shard in BF16 and the shard in FP32"
            )
        if op != dist.ReduceOp.AVG or async_op:
            raise ValueError(f"only the mean over ranks, in stream order; got {op}, async_op {async_op}")
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        _mean(parts.view(size, -1), output_tensor)


def _mean(parts: torch.Tensor, out: torch.Tensor) -> None:
    if parts.device.type == "cuda":
        from fp4core.kernels.mean import mean_of_parts

        mean_of_parts(parts, out)
    else:
        torch.mean(parts, dim=0, dtype=torch.float32, out=out)


def exchange_gradients(model: FSDPModule) -> None:
    """Let every sharded module of `model` reduce its BF16 gradients by an `Exchange`."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(Exchange())
