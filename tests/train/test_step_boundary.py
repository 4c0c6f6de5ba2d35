"""The end of a step: an update that is queued before anybody knows whether it may be made."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fp4core.bench.scale_job import Job, Pairs, fill
from fp4core.recipe import load_recipe
from fp4core.train import distributed, engine
from fp4core.train.distributed import World
from fp4core.train.engine import Engine
from fp4core.train.errors import RunError
from fp4core.train.optim import clip_gradients, gradient_norm, make_optimizer, update

WORLD = World(0, 1, torch.device("cpu"))


def _engine(world: World = WORLD) -> Engine:
    job = Job(
        "bf16",
        gpus=2,
        blocks=1,
        accumulation=1 if world.size == 2 else 2,
        deterministic=True,
        device="cpu",
        compile=False,
        size="tiny",
        sequence=32,
        exchange=False,
    )
    study = job.study()
    small = dataclasses.replace(study.model, hidden=32, ffn=32, heads=1, vocab=64)
    train = dataclasses.replace(study.train, global_batch=4, clip=1e-3)
    study = dataclasses.replace(study, model=small, train=train)
    return Engine(study, load_recipe("bf16"), 0, world=world, stream=Pairs(32, 64), initialise=fill)


class Guard:
    """Does not fit in the attempts that `bad` names; notes what it was asked, in order."""

    attempts = 3

    def __init__(self, bad: Callable[[int, int], bool], calls: list[str] | None = None) -> None:
        self.bad, self.calls = bad, [] if calls is None else calls
        self.now = (0, 0)

    def begin(self, step: int, attempt: int) -> None:
        self.now = (step, attempt)
        self.calls.append(f"begin {step} {attempt}")

    def flag(self) -> torch.Tensor:
        self.calls.append("flag")
        return torch.tensor(self.bad(*self.now))

    def exact(self) -> bool:
        self.calls.append("exact")
        return not self.bad(*self.now)


def _everything(made: Engine) -> list[torch.Tensor]:
    """Weights, moments and step counts, copied, as bits."""
    parameters = list(made.model.parameters())
    states = [made.optimizer.state[p][key] for p in parameters for key in ("step", "exp_avg", "exp_avg_sq")]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in [*parameters, *states]]
    return [t.detach().clone().view(torch.int32) for t in local]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _layer() -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(33, 17)
    optimizer = make_optimizer(layer, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for state in optimizer.state.values():
        state["step"].fill_(7)
        state["exp_avg"].normal_()
        state["exp_avg_sq"].uniform_()
    for p in layer.parameters():
        p.grad = torch.randn_like(p)
    return layer, optimizer


def _bits(layer: torch.nn.Module, optimizer: torch.optim.AdamW) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [t.detach().clone().view(torch.int32) for t in [*layer.parameters(), *states]]


@pytest.mark.parametrize("poison", [None, float("nan"), float("inf")])
def test_a_skipped_update_changes_no_bit(poison: float | None) -> None:
    layer, optimizer = _layer()
    if poison is not None:
        layer.weight.grad[3, 5] = poison
    before = _bits(layer, optimizer)
    clip_gradients(layer, 1.0)
    update(optimizer, skip=torch.ones(()))
    assert _same(before, _bits(layer, optimizer))


def test_an_update_that_may_pass_is_the_optimizers_own() -> None:
    found = []
    for make in (
        lambda optimizer: optimizer.step(),
        update,
        lambda optimizer: update(optimizer, skip=torch.zeros(())),
    ):
        layer, optimizer = _layer()
        make(optimizer)
        found.append(_bits(layer, optimizer))
    assert _same(found[0], found[1]) and _same(found[0], found[2])
    assert not _same(found[0], _bits(*_layer()))


@pytest.mark.parametrize("largest", [0.5, 1e6])
def test_clipping_is_torchs_own(largest: float) -> None:
    ours, theirs = _layer()[0], _layer()[0]
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), largest, foreach=True)
    assert torch.equal(clip_gradients(ours, largest, gradient_norm(ours)), norm)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_clipping_by_no_norm_spoils_no_other_gradient(poison: float) -> None:
    layer = _layer()[0]
    layer.weight.grad[3, 5] = poison
    before = [p.grad.clone() for p in layer.parameters()]
    assert not clip_gradients(layer, 1.0).isfinite()
    for p, was in zip(layer.parameters(), before, strict=True):
        assert torch.equal(p.grad.view(torch.int32), was.view(torch.int32))


def test_the_update_is_queued_before_the_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the host's part of the check comes once per attempt."""
    made, calls = _engine(), []
    made.guard = Guard(lambda step, attempt: (step, attempt) == (1, 0), calls)
    real_update, real_wait = engine.update, engine.HostCopy.wait

    def watched(optimizer: torch.optim.AdamW, skip: torch.Tensor) -> None:
        calls.append(f"update {'skipped' if skip else 'made'}")
        real_update(optimizer, skip)

    def wait(copy: engine.HostCopy) -> list[torch.Tensor]:
        calls.append("wait")
        return real_wait(copy)

    monkeypatch.setattr(engine, "update", watched)
    monkeypatch.setattr(engine.HostCopy, "wait", wait)
    made.step(1)
    made.step(2)
    again = ["begin 1 0", "flag", "update skipped", "wait", "exact"]
    for begin in ("begin 1 1", "begin 2 0"):
        again += [begin, "flag", "update made", "wait", "exact"]
    assert calls == again


def test_a_repeated_step_is_the_step() -> None:
    plain, guarded = _engine(), _engine()
    guarded.guard = Guard(lambda step, attempt: step == 2 and attempt < 2)
    for step in (1, 2, 3):
        result = guarded.step(step)
        assert result.replayed == (step == 2)
        assert dataclasses.replace(result, replayed=False) == plain.step(step)
        assert _same(_everything(plain), _everything(guarded))


def test_a_step_that_never_fits_leaves_everything() -> None:
    made = _engine()
    made.step(1)
    before = _everything(made)
    made.guard = Guard(lambda step, attempt: True)
    with pytest.raises(RunError, match="step 2 was not exact after 3 attempts"):
        made.step(2)
    assert _same(before, _everything(made))


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_everything(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = _engine(), Engine.gradients
    made.step(1)
    before = _everything(made)

    def poisoned(self: Engine, step: int) -> torch.Tensor:
        total = real(self, step)
        if where == "loss":
            return total * float("nan")
        next(self.model.parameters()).grad.view(-1)[0] = float("inf")
        return total

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "gradients", poisoned)
        result = made.step(2)
    assert not result.finite and not result.replayed
    assert _same(before, _everything(made))
    plain = _engine()
    plain.step(1)
    assert made.step(2) == plain.step(2)
    assert _same(_everything(plain), _everything(made))


def test_a_guard_whose_flag_let_an_update_pass_is_an_error() -> None:
    made = _engine()
    made.guard = Guard(lambda step, attempt: True)
    made.guard.flag = lambda: None
    with pytest.raises(RuntimeError, match="step 1: not exact, but"):
        made.step(1)


def _one_rank_of_two(rank: int, meet: str) -> None:
    """A misfit of rank 1 is a misfit of both, and a repeated step the same as one that fitted."""
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    world = World(rank, 2, torch.device("cpu"))
    plain, guarded = _engine(world), _engine(world)
    guarded.guard = Guard(lambda step, attempt: rank == 1 and step == 2 and attempt == 0)
    for step in (1, 2):
        result = guarded.step(step)
        assert result.replayed == (step == 2)
        assert dataclasses.replace(result, replayed=False) == plain.step(step)
        assert _same(_everything(plain), _everything(guarded))
    before = _everything(guarded)
    guarded.guard = Guard(lambda step, attempt: rank == 1)
    with pytest.raises(RunError, match="not exact after 3"):
        guarded.step(3)
    assert _same(before, _everything(guarded))
    assert world.reduce(float(rank), 2.0 * rank) == [1.0, 2.0]
    assert world.reduce(float(rank), 0.5, op="max") == [1.0, 0.5]
    assert world.gather({"rank": rank, "text": "x" * rank}) == [{"rank": r, "text": "x" * r} for r in (0, 1)]
    assert world.add(torch.tensor([rank + 1.0])).tolist() == [3.0]
    dist.destroy_process_group()
    os._exit(0)


def test_two_ranks_decide_together(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    meet = str(tmp_path / "meet")
    ranks = [context.Process(target=_one_rank_of_two, args=(rank, meet)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        process.kill()
    assert [p.exitcode for p in ranks] == [0, 0]


@pytest.mark.parametrize(
    ("config", "device"), [("cuda:nccl", "cuda:3"), ("cuda:nccl,cpu:gloo", "cpu"), ("cpu:gloo", "cpu")]
)
def test_the_hosts_numbers_stay_out_of_the_devices_queue(
    config: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the ranks have nothing else to talk through."""
    monkeypatch.setattr(distributed.dist, "get_backend_config", lambda group: config)
    assert World(0, 2, torch.device("cuda", 3))._crossing() == torch.device(device)
