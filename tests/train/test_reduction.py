"""Gradients that cross in BF16: the sums of FSDP2's own reduction of widened ones, and clear refusals."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import Lab

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


def test_two_replicas_of_two_shards_sum_the_same_bits(lab: Lab, second_lab: Lab) -> None:
    """HSDP: pairs exchange, replicas then reduce FP32 shards as before."""
    for each, exchange in ((lab, True), (second_lab, False)):
        each.write_study(**SHORT, replicas=2, exchange=exchange)
        each.finish_ranks(4, ["mxfp4_sr"])
    assert lab.metrics("mxfp4_sr") == second_lab.metrics("mxfp4_sr")
    assert lab.tensors("mxfp4_sr", 3) == second_lab.tensors("mxfp4_sr", 3)


def _values(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(3 * 40, generator=generator) * 2.0 ** (10 * rank)).bfloat16()


def _average(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    exchange, cpu = Exchange(), torch.device("cpu")
    for _ in range(2):
        sent = exchange.allocate((120,), dtype=torch.float32, device=cpu)
        sent.copy_(_values(rank))
        got = exchange.allocate((40,), dtype=torch.float32, device=cpu)
        assert (sent.dtype, got.dtype) == (torch.bfloat16, torch.float32)
        exchange(got, sent, dist.group.WORLD, dist.ReduceOp.AVG)
        parts = torch.stack([_values(s)[40 * rank : 40 * rank + 40] for s in range(3)])
        exact = parts.double().sum(0) / 3
        # three terms and a division, each rounded once: at most 3 half-ulps of the largest partial sum
        bound = 3 * 2.0**-24 * parts.double().abs().sum(0)
        assert ((got.double() - exact).abs() <= bound).all()
        with pytest.raises(ValueError, match="only the mean"):
            exchange(got, sent, dist.group.WORLD, dist.ReduceOp.SUM)
        with pytest.raises(ValueError, match="needed 3 x shard in BF16"):
            exchange(got, sent[:80], dist.group.WORLD, dist.ReduceOp.AVG)
        with pytest.raises(ValueError, match="needed 3 x shard in BF16"):
            exchange(got, sent.float(), dist.group.WORLD, dist.ReduceOp.AVG)
    dist.destroy_process_group()
    os._exit(0)


def test_three_ranks_against_the_exact_mean(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_average, args=(rank, str(tmp_path / "meet"))) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert [p.exitcode for p in processes] == [0, 0, 0]


def test_another_sum_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"summed in torch.float32, but FSDP asks for torch.bfloat16"):
        Exchange().allocate((8,), dtype=torch.bfloat16, device=torch.device("cpu"))


def test_ranks_of_several_nodes_keep_the_reduce_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks on nodes of four: shards over all eight go through the network, two replicas' do not."""
    from fp4core.train import distributed

    world = distributed.World(0, 8, torch.device("cpu"))
    assert distributed.shards_share_a_node(world, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert not distributed.shards_share_a_node(world, 1)
    assert distributed.shards_share_a_node(world, 2)
