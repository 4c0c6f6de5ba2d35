"""Build, initialise and convert a model for one route."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor, nn

from fp4core.model.llama import Llama
from fp4core.ops.convert import convert
from fp4core.recipe import ModelConfig, Recipe

_STD = 0.02
_NOTE_SECONDS = 5.0


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


def materialise(
    model: Llama,
    device: torch.device | str,
    seed: int | None,
    *,
    note: Callable[[str], None] | None = None,
) -> Llama:
    """Allocate a meta model (sharded or not) on ``device``, and initialise it unless ``seed`` is None."""
    model.to_empty(device=device)
    for module in model.modules():
        if "sr_state" in module._buffers:
            module.sr_state = torch.zeros(3, dtype=torch.int64, device=device)
    if seed is not None:
        init_weights(model, seed, note=note)
    return model


@torch.no_grad()
def init_weights(model: Llama, seed: int, *, note: Callable[[str], None] | None = None) -> None:
    """Fill every parameter from ``seed``: the same values on every device, in every order and sharding.

    torchtitan's Llama initialisation. The report's first loss points to it: 12.256 at step 1 (published
    history), where logits of standard deviation s give ln 128256 + s^2 / 2, 12.25 for the s = 0.987 of this
    head and 12.58 for a head of 0.02.

        norms 1 · embedding N(0, 1) (0.02 when tied) · head std hidden^-0.5, truncated at 3 std
        q k v gate std 0.02 · o up down of block l (from 0) std 0.02 / sqrt(2 (l + 1))

    Each parameter has a CPU generator keyed by the SHA-256 of (seed, name), so that they are drawn side by
    side, each whole by one thread, on the cores that this process may use. Every rank draws every tensor and
    keeps its shard; as many tensors as threads exist at once. ``note`` is told how far it has come, every few
    seconds.
    """
    waiting = []
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            waiting.append((name, parameter))
    waiting.sort(key=lambda entry: entry[1].numel())  # the largest first, from the end
    total, drawn, noted = sum(p.numel() for _, p in waiting), 0, time.monotonic()
    threads = _threads()
    with ThreadPoolExecutor(threads, "init") as pool:
        running: dict[Future[Tensor], nn.Parameter] = {}
        while waiting or running:
            while waiting and len(running) < threads:
                name, parameter = waiting.pop()
                std = init_std(model.config, name)
                running[pool.submit(_draw, seed, name, parameter.shape, std)] = parameter
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                parameter = running.pop(done)
                _fill(parameter, done.result())
                drawn += parameter.numel()
            if note is not None and time.monotonic() - noted > _NOTE_SECONDS:
                noted = time.monotonic()
                note(f"drawing initial weights: {drawn / 1e9:.2f} of {total / 1e9:.2f} billion")


def _draw(seed: int, name: str, shape: torch.Size, std: float) -> Tensor:
    """FP32 values of the matrix ``name``, a function of the arguments alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(shape)
    if name == "lm_head.weight":
        return _truncated_normal(values, std, 3 * std, generator)
    return values.normal_(0.0, std, generator=generator)


def _truncated_normal(values: Tensor, std: float, bound: float, generator: torch.Generator) -> Tensor:
    """Fill with N(0, std) inside [-bound, bound]: what falls outside is taken from the next draw of all.

    The numbers of ``nn.init.trunc_normal_`` of torch 2.13, in a third of its time. Earlier versions use
    another method: a model must not begin elsewhere because of them.
    """
    flat, limit = values.normal_(0.0, std, generator=generator).view(-1), values.new_tensor(bound)
    outside = (flat.abs() > limit).nonzero().view(-1)
    spare = torch.empty_like(values) if len(outside) else values
    while len(outside):
        drawn = spare.normal_(0.0, std, generator=generator).view(-1)[outside]
        flat[outside] = drawn
        outside = outside[drawn.abs() > limit]
    return values


def _threads() -> int:
    """Cores of this process: those of the machine that it may use, shared with the other ranks here."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def init_std(config: ModelConfig, name: str) -> float:
    """Standard deviation that the matrix ``name`` of ``Llama(config)`` starts with."""
    if name == "model.embed_tokens.weight":
        return _STD if config.tie_embeddings else 1.0
    if name == "lm_head.weight":
        return config.hidden**-0.5
    if name.endswith(("o_proj.weight", "up_proj.weight", "down_proj.weight")):
        return _STD / math.sqrt(2 * (int(name.split(".")[2]) + 1))
    return _STD


def _fill(parameter: nn.Parameter, values: Tensor) -> None:
    """Copy the whole tensor's values into a parameter or into this rank's shard of it."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = parameter.device_mesh, parameter.placements
        # every rank holds the same values, so no rank needs to send them
        values = distribute_tensor(values.to(mesh.device_type), mesh, placements, src_data_rank=None)
    parameter.copy_(values)
