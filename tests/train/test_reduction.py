"""Gradients that cross in BF16: the sums of FSDP2's own reduction of widened ones, and clear refusals."""

from __future__ import annotations

import gc
import multiprocessing
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from conftest import Lab

from fp4core.train import distributed
from fp4core.train.optim import clip_gradients, make_optimizer, update
from fp4core.train.reduction import Exchange

SHORT = {"steps": 3, "cuts": [3], "endpoint_step": 3, "local_batch": 1, "gather": "bf16"}


@pytest.mark.parametrize("route", ["bf16", "mxfp4_sr"])
@pytest.mark.parametrize("kept", [False, True], ids=["gathered anew", "kept"])
def test_two_ranks_sum_the_same_bits(route: str, kept: bool, lab: Lab, second_lab: Lab) -> None:
    """BF16 values are exact in FP32 and a + b = b + a: weights, moments and metrics are equal to the bit."""
    lab.write_study(**SHORT, keep_gathered=kept, exchange=True)
    second_lab.write_study(**SHORT, keep_gathered=kept, exchange=False)
    for each in (lab, second_lab):
        each.finish_ranks(2, [route])
    assert lab.metrics(route) == second_lab.metrics(route)
    assert lab.tensors(route, 3) == second_lab.tensors(route, 3)


def test_two_replicas_of_two_shards_sum_the_same_bits_in_one_micro_step(lab: Lab, second_lab: Lab) -> None:
    """HSDP: pairs exchange, replicas then reduce FP32 shards; FSDP2 does that in every micro-step."""
    for each, exchange in ((lab, True), (second_lab, False)):
        each.write_study(**SHORT, replicas=2, exchange=exchange)
        each.finish_ranks(4, ["mxfp4_sr"])
    assert lab.metrics("mxfp4_sr") == second_lab.metrics("mxfp4_sr")
    assert lab.tensors("mxfp4_sr", 3) == second_lab.tensors("mxfp4_sr", 3)


class Uneven(torch.nn.Module):
    """BF16 parameters whose rows three ranks cannot share evenly, one has fewer rows than ranks."""

    SHAPES: ClassVar = {"wide": (7, 24), "few": (2, 5), "gain": (13,)}

    def __init__(self) -> None:
        super().__init__()
        for name, shape in self.SHAPES.items():
            setattr(self, name, torch.nn.Parameter(torch.ones(shape)))

    def forward(self, weights: dict[str, torch.Tensor], leave_out: str = "") -> torch.Tensor:
        """Its gradient by each parameter is `weights` of that name."""
        return sum(
            (getattr(self, name) * w).float().sum() for name, w in weights.items() if name != leave_out
        )


def _weights(rank: int, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + number)
    return {
        name: (torch.randn(shape, generator=generator) * 2.0 ** (5 * rank)).bfloat16()
        for name, shape in Uneven.SHAPES.items()
    }


def _reduce(rank: int, size: int, replicas: int, rendezvous: str) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    mesh = distributed._mesh(distributed.World(rank, size, torch.device("cpu")), replicas)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = torch.nn.Sequential(Uneven())
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    exchange = Exchange(model)
    for step in range(2):  # the sums of the first step are forgotten
        for number in range(2):
            exchange.begin(first=number == 0, last=number == 1)
            model(_weights(rank, 2 * step + number)).backward()
        exchange.finish()
        for name, parameter in model.named_parameters():
            name = name.split(".")[-1]
            terms = torch.stack([_weights(r, 2 * step + m)[name] for r in range(size) for m in range(2)])
            exact = terms.double().sum(0) / size
            # at most 2 x size additions and divisions, each rounded once
            bound = 2 * 2 * size * 2.0**-24 * terms.double().abs().sum(0) / size
            got = parameter.grad.full_tensor()
            assert got.dtype == torch.float32
            assert ((got.double() - exact).abs() <= bound).all(), name
    exchange.begin(first=True, last=True)
    model[0](_weights(rank, 0), leave_out="few").backward()
    with pytest.raises(RuntimeError, match="gradients of wide, few, gain: got 0 exchanges in 1 passes"):
        exchange.finish()
    dist.destroy_process_group()
    os._exit(0)


def _in_processes(work: Callable[..., None], size: int, *arguments: Any) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, size, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert [p.exitcode for p in processes] == [0] * size


@pytest.mark.parametrize("size, replicas", [(1, 1), (3, 1), (4, 2)])
def test_against_the_exact_mean(size: int, replicas: int, tmp_path: Path) -> None:
    """Also where rows do not come out even and over replicas."""
    _in_processes(_reduce, size, replicas, str(tmp_path / "meet"))


def _dropped(rank: int, size: int, rendezvous: str) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    model = torch.nn.Sequential(Uneven())
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    exchange = Exchange(model)
    exchange.begin(first=True, last=True)
    model(_weights(rank, 0)).backward()
    exchange.finish()
    seen = [weakref.ref(thing) for thing in (model, exchange, model[0].wide, model[0].wide.grad)]
    del model, exchange
    gc.collect()
    assert [ref() for ref in seen] == [None] * 4
    dist.destroy_process_group()
    os._exit(0)


def test_a_model_that_is_dropped_is_gone(tmp_path: Path) -> None:
    """A probe makes one engine after the other; a hook that held its bundle would keep all of them."""
    _in_processes(_dropped, 1, str(tmp_path / "meet"))


def test_ranks_of_several_nodes_keep_the_reduce_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks on nodes of four: shards over all eight go through the network, two replicas' do not."""
    world = distributed.World(0, 8, torch.device("cpu"))
    assert distributed.shards_share_a_node(world, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert not distributed.shards_share_a_node(world, 1)
    assert distributed.shards_share_a_node(world, 2)


def _layer(width: int, device: torch.device) -> torch.nn.Module:
    up = torch.nn.Linear(2048, width, device=device)
    return torch.nn.Sequential(up, torch.nn.Linear(width, 2048, device=device))


def _beside_fsdp(rank: int, size: int, rendezvous: str) -> None:
    """Gradients of layers wide enough that exchanges run beside the backward pass, both ways."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    weights = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(_layer(2048 + i % 2, device) for i in range(8)))
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        exchange = Exchange(model) if ours else None
        for step in range(4):  # none waits for the update of the one before
            optimizer.zero_grad(set_to_none=True)
            for number in range(4):
                if exchange is not None:
                    exchange.begin(first=number == 0, last=number == 3)
                torch.manual_seed(100 * step + 10 * number + rank)
                x = torch.randn(4096, 2048, device=device, dtype=torch.bfloat16)
                model(x).float().square().mean().backward()
            if exchange is not None:
                exchange.finish()
            clip_gradients(model, 1.0)
            update(optimizer)
        weights.append([p.full_tensor().cpu() for p in model.parameters()])
    for fsdp, exchanged in zip(*weights, strict=True):
        assert fsdp.dtype == torch.float32 and torch.equal(fsdp, exchanged)
    dist.destroy_process_group()
    os._exit(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_gpus_beside_the_backward_pass(tmp_path: Path) -> None:
    """One rank sends nothing; two, where there are as many GPUs, add a + b = b + a: equal to the bit."""
    size = min(2, torch.cuda.device_count())
    _in_processes(_beside_fsdp, size, str(tmp_path / "meet"))
    if size == 1:
        pytest.skip("needs two CUDA GPUs to send gradients; with one the sums were checked")
