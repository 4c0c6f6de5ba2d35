"""The processes of one run and the few things they say to each other.

One process is the ordinary case and needs no process group. Under `torchrun` every process runs the same
code: rank r of W takes the r-th of W equal parts of each global batch, parameters and optimizer state are
sharded with FSDP2, and decisions (stop, replay) are taken together.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp4core.ops import carrier

from .errors import StopEarly

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .reduction import Exchange

TIMEOUT = datetime.timedelta(minutes=10)
# Between threads that write a checkpoint: on a shared disk one rank's files may take far longer than
# another's. A rank that is gone closes its connections and is noticed at once.
WRITE_TIMEOUT = datetime.timedelta(hours=2)


@dataclass(frozen=True)
class World:
    """This process among those of the run. `group` None: the default process group."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def aside(self) -> World:
        """The same ranks with a gloo group of their own, for a thread that talks beside training."""
        if self.size == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        return World(self.rank, self.size, torch.device("cpu"), group)

    def add(self, tensor: Tensor) -> Tensor:
        """Sum of a tensor of the device over the ranks, in place; queued, the host waits for nothing."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def _crossing(self) -> torch.device:
        """Where numbers of the host cross: beside the device's queue, where the group has a backend for it.

        On the device they would wait for all that is queued there.
        """
        beside = "cpu:" in dist.get_backend_config(self.group)
        return torch.device("cpu") if beside else self.device

    def reduce(self, *values: float, op: str = "sum") -> list[float]:
        """Sum or maximum of each of the host's values over the ranks, in FP64."""
        if self.size == 1:
            return list(values)
        kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
        tensor = torch.tensor(values, dtype=torch.float64, device=self._crossing())
        dist.all_reduce(tensor, kinds[op], group=self.group)
        return tensor.tolist()

    def gather(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON record of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [record]
        device = self._crossing()
        payload = torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8, device=device)
        length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self.group)
        longest = max(int(n) for n in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: len(payload)] = payload
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        texts = [bytes(p[: int(n)].tolist()) for p, n in zip(parts, lengths, strict=True)]
        return [json.loads(text) for text in texts]

    def broadcast(self, record: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's record on every rank."""
        return self.gather(record)[0]


def pick_device(wanted: str) -> torch.device:
    """Device of this process for a study that says "auto", "cpu" or "cuda"."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("study asks for device cuda, but torch sees no CUDA device; use device: auto or cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextlib.contextmanager
def joined(wanted_device: str) -> Iterator[World]:
    """The world of this process, left again at the end.

    After an error nobody is asked to agree on leaving: a peer may be gone, and the process ends anyway.
    """
    world = _start(wanted_device)
    try:
        yield world
    except (ValueError, StopEarly):
        _stop(world)
        raise
    _stop(world)


def _start(wanted_device: str) -> World:
    """Join the process group that torchrun describes; a plain start is a world of one."""
    device = pick_device(wanted_device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(0, 1, device)
    if not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    return World(dist.get_rank(), dist.get_world_size(), device)


def _stop(world: World) -> None:
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def is_out_of_memory(error: RuntimeError) -> bool:
    """True when the device's memory was too small, also where a library found out."""
    return isinstance(error, torch.OutOfMemoryError) or memory_line(error) is not None


def memory_line(error: BaseException) -> str | None:
    """The line of an error that says that memory was too small."""
    signs = ("out of memory", "out_of_memory", "alloc_failed")  # CUDA and NCCL; CUDA's name; cuBLAS, cuDNN
    lines = str(error).splitlines()
    return next((line for line in lines if any(sign in line.lower() for sign in signs)), None)


def is_lost_rank(error: RuntimeError) -> bool:
    """True when a collective failed because a peer closed its connection or did not answer in time."""
    text = str(error).lower()
    signs = ("connection closed", "connection reset", "timed out", "timeout", "nccl", "gloo", "store")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)


def shard(
    model: nn.Module,
    world: World,
    *,
    gather: str = "fp32",
    keep_gathered: bool = False,
    replicas: int = 1,
) -> nn.Module:
    """FSDP2 over all ranks; FP32 master weights and an FP32 sum of gradients.

    One unit for the embedding, one per block, one for final norm and head, so that only the first gather
    and the last reduction of a micro-step are not hidden by work.

    Args:
        gather: "fp32": the linears round to BF16 themselves, and dW leaves them in FP32. "bf16" moves half
            the bytes; every weight is rounded as it would be anyway, but so is each micro-step's gradient
            before the FP32 sum.
        keep_gathered: keep a unit's weights from forward to backward (see also the function of that name).
        replicas: HSDP; each replica is sharded over size / replicas ranks. ValueError when that is uneven.
    """
    if world.size == 1 and not dist.is_initialized():
        return model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = torch.bfloat16 if gather == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    shared = {"mesh": _mesh(world, replicas), "mp_policy": policy}
    tied = model.config.tie_embeddings
    if not tied:
        # kept: backward does not read the table, but FSDP would gather it again
        fully_shard(model.model.embed_tokens, reshard_after_forward=False, **shared)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=not keep_gathered, **shared)
    if not tied:
        # needed again at once when backward begins
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **shared)
    return fully_shard(model, **shared)


def exchange_gradients(model: nn.Module, world: World, *, gather: str, replicas: int) -> Exchange | None:
    """The direct reduction of BF16 gradients, for a sharded model in place whose shards' ranks share a node.

    None, and FSDP2 reduces, where they do not, where gradients are FP32, and for one process.
    """
    from torch.distributed.fsdp import FSDPModule

    from .reduction import Exchange

    if gather != "bf16" or not isinstance(model, FSDPModule):
        return None
    # nodes of unequal size may see it differently, and every rank of a shard must do the same
    apart = world.reduce(float(not shards_share_a_node(world, replicas)), op="max")[0]
    return None if apart else Exchange(model)


def shards_share_a_node(world: World, replicas: int) -> bool:
    """Whether a replica lies within one node, as torchrun tells; other ranks count as one node's."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) % (world.size // replicas) == 0


def keep_gathered(model: nn.Module, keep: bool) -> None:
    """Whether the next backward pass leaves the gathered weights in place for the micro-step after it.

    The last one of a step must not: the optimizer is about to change the shards.
    """
    if hasattr(model, "set_reshard_after_backward"):
        model.set_reshard_after_backward(not keep)


def reshard(model: nn.Module) -> None:
    """Let go of what is gathered, also after a forward pass that no backward pass followed.

    Blocks may have emptied it (`release_encoded`), which FSDP2 does not see.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def release_encoded(model: nn.Module) -> None:
    """Have blocks let go of the gathered weights that their encodings stand in for, until the step ends.

    Kept gathered weights are read once, by the first micro-step, which encodes them: two bytes per weight
    less, on every rank. Not for blocks that are gathered for a forward pass alone.
    """
    from torch.distributed.fsdp import FSDPModule

    for block in model.blocks:
        if isinstance(block, FSDPModule):
            block.register_forward_hook(_release_encoded)


def _release_encoded(block: nn.Module, _arguments: Any, _output: Any) -> None:
    if torch.is_grad_enabled():
        carrier.release_weights(block)


def check_replicas(world: World, replicas: int) -> None:
    """ValueError when the ranks cannot be split into that many replicas."""
    if world.size % replicas:
        raise ValueError(
            f"train.replicas {replicas} does not divide {world.size} ranks; choose one that does "
            "(1: sharded over all of them)"
        )


def _mesh(world: World, replicas: int) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    check_replicas(world, replicas)
    if replicas == 1:
        return init_device_mesh(world.device.type, (world.size,))
    shape = (replicas, world.size // replicas)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def device_record(device: torch.device) -> dict[str, str]:
    """Name and kind of the device for a record."""
    if device.type == "cuda":
        return {"name": torch.cuda.get_device_name(device), "kind": "cuda"}
    return {"name": cpu_name(), "kind": "cpu"}


def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not say."""
    import platform

    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def peak_memory_gib(device: torch.device) -> float:
    """Peak allocated device memory since the start; on a CPU the process's peak resident set. GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
