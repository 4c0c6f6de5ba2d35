"""Checkpoints written beside the steps: the same files, no step that waits for the disk, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from child import slow_disk
from conftest import Lab
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from fp4core.train import checkpoint, engine, shard_files
from fp4core.train.checkpoint import Checkpoints, verify

ASYNC = {"async_checkpoint": True}


def test_files_are_those_of_torchs_writer(tmp_path: Path) -> None:
    """But for the order of the header's free-form part, which torch's writer leaves to chance."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.b": (5, 7), "model.a": (64,), "optim.exp_avg.a": (3, 1, 2), "model.none": (0, 4)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    indices = {name: 1 if name.startswith("model.") else 2 for name in tensors}
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for path in (theirs, ours):
        path.mkdir()
    other = HuggingFaceStorageWriter(str(theirs), fqn_to_index_mapping=indices, save_distributed=True)
    writer = shard_files.ShardWriter(ours, indices=indices, staging=None)
    with checkpoint._quiet():
        dcp.save(dict(tensors), storage_writer=other, no_dist=True)
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    listed = writer.write()
    assert (
        sorted(listed) == sorted(p.name for p in theirs.iterdir()) == sorted(p.name for p in ours.iterdir())
    )
    for name, entry in listed.items():
        mine, its = (_split(path / name) for path in (ours, theirs))
        assert mine == its
        assert entry["bytes"] == (theirs / name).stat().st_size
        with safe_open(ours / name, "pt") as file:
            assert all(torch.equal(file.get_tensor(key), tensors[key]) for key in file.keys())  # noqa: SIM118


def _split(path: Path) -> tuple[Any, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@pytest.mark.parametrize("route", ["mxfp4_sr", "ue5m3"])
def test_the_same_run_as_with_waiting(route: str, lab: Lab, second_lab: Lab) -> None:
    """Weights, moments, held maxima: copied at the step, whatever changes while they are written."""
    assert lab.train(route) == 0
    second_lab.write_study(**ASYNC)
    assert second_lab.train(route, "--until", "4") == 0
    assert second_lab.train(route) == 0
    for step in (3, 6):
        assert lab.tensors(route, step) == second_lab.tensors(route, step)
    assert lab.metrics(route) == second_lab.metrics(route)
    names = [p.name for p in (second_lab.run_path(route) / "checkpoints").iterdir()]
    assert sorted(names) == ["step-00000003", "step-00000006"]


@pytest.fixture
def steps_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps whose work is done, as they come."""
    made, real = [], engine.Engine.step

    def step(self: engine.Engine, number: int) -> engine.StepResult:
        result = real(self, number)
        made.append(number)
        return result

    monkeypatch.setattr(engine.Engine, "step", step)
    return made


def test_steps_go_on_while_a_checkpoint_is_written(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, steps_made: list[int]
) -> None:
    """The disk does not answer until two more steps are made: a step that waited for it would never come."""
    lab.write_study(**ASYNC, cuts=[6], checkpoint_every=3)
    at: list[list[int]] = []

    def disk(path: Path) -> IO[bytes]:
        deadline = time.monotonic() + 60
        while "step-00000003" in str(path) and 5 not in steps_made:
            assert time.monotonic() < deadline, "the steps wait for the disk"
            time.sleep(0.005)
        at.append(list(steps_made))
        return open(path, "wb", buffering=0)

    monkeypatch.setattr(shard_files, "open_file", disk)
    assert lab.train("bf16") == 0
    assert [steps[-1] for steps in at] == [5, 5, 6, 6] or [steps[-1] for steps in at] == [5, 6, 6, 6]


def test_a_slow_disk_costs_the_steps_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: time that `save` keeps the loop, against the time until the checkpoint is on disk."""
    lab.write_study(**ASYNC, steps=60, cuts=[60], endpoint_step=60, checkpoint_every=30)
    stalls, writes = [], []
    save, complete = Checkpoints.save, Checkpoints._complete

    def timed(real: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = real(*arguments)
            into.append(time.perf_counter() - began)
            return result

        return call

    monkeypatch.setattr(Checkpoints, "save", timed(save, stalls))
    monkeypatch.setattr(Checkpoints, "_complete", timed(complete, writes))
    monkeypatch.setattr(shard_files, "open_file", slow_disk)
    assert lab.train("bf16") == 0
    assert min(writes) > 0.4
    # the second one may wait for the first, at most
    assert stalls[0] < writes[0] / 2
    print(f"save kept the loop {1e3 * stalls[0]:.1f} ms, the write took {1e3 * writes[0]:.1f} ms")


def test_one_checkpoint_at_a_time(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.write_study(**ASYNC, checkpoint_every=1)
    real, inside, most = Checkpoints._complete, [], []
    lock = threading.Lock()

    def complete(self: Checkpoints, *arguments: Any) -> None:
        with lock:
            inside.append(1)
            most.append(len(inside))
        time.sleep(0.05)
        real(self, *arguments)
        with lock:
            inside.pop()

    monkeypatch.setattr(Checkpoints, "_complete", complete)
    assert lab.train("bf16") == 0
    assert most == [1] * 6


def test_an_error_of_the_writing_ends_the_run(
    lab: Lab, second_lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one line, with the checkpoint before it in place; the same command then goes on."""
    lab.write_study(**ASYNC, steps=20, cuts=[20], endpoint_step=20)
    second_lab.write_study(steps=20, cuts=[20], endpoint_step=20)

    def full(path: Path) -> IO[bytes]:
        if "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", "somewhere")
        return open(path, "wb", buffering=0)

    with monkeypatch.context() as patch:
        patch.setattr(shard_files, "open_file", full)
        assert lab.train("mxfp4_sr") == 1
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "disk is full (somewhere)" in errors[0]
    names = {p.name for p in (lab.run_path("mxfp4_sr") / "checkpoints").glob("step-*")}
    assert names == {"step-00000002"}
    assert lab.train("mxfp4_sr") == second_lab.train("mxfp4_sr") == 0
    assert lab.tensors("mxfp4_sr", 20) == second_lab.tensors("mxfp4_sr", 20)
    assert lab.metrics("mxfp4_sr") == second_lab.metrics("mxfp4_sr")


def test_one_ranks_error_is_said_once(lab: Lab) -> None:
    lab.write_study(**ASYNC, steps=2000, cuts=[2000], endpoint_step=2000, local_batch=2)
    processes = lab.start_ranks(2, ["bf16"], disks={1: "full"})
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes] == [1, 1]
    errors = [line for line in lab.output.read_text().splitlines() if "error: " in line]
    assert len(errors) == 1 and errors[0].startswith("rank 1: error: disk is full")
    assert verify(lab.run_path("bf16") / "checkpoints" / "step-00000002") is None


def test_sharded_runs_are_the_same_too(make_lab: Callable[[], Lab]) -> None:
    """Two ranks, whose threads agree over a group of their own."""
    waiting, beside = make_lab(), make_lab()
    waiting.write_study(local_batch=2)
    beside.write_study(local_batch=2, **ASYNC)
    waiting.finish_ranks(2, ["mxfp4_sr"])
    beside.finish_ranks(2, ["mxfp4_sr"])
    for step in (3, 6):
        assert waiting.tensors("mxfp4_sr", step) == beside.tensors("mxfp4_sr", step)
    assert waiting.metrics("mxfp4_sr") == beside.metrics("mxfp4_sr")


def _writing(lab: Lab, process: Any, step: int) -> Iterator[Path]:
    """Half-written checkpoints after `step`, as they appear."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.is_alive():
        for path in (lab.run_path("mxfp4_sr") / "checkpoints").glob(".step-????????"):
            if int(path.name[6:]) > step and any(path.iterdir()):
                yield path
        time.sleep(0.005)
    raise AssertionError(f"no checkpoint was being written: {lab.output.read_text()}")


@pytest.mark.parametrize("beside", [True, False], ids=["asynchronous", "waiting"])
def test_killed_during_a_checkpoint_write(beside: bool, lab: Lab, second_lab: Lab) -> None:
    settings = {"steps": 12, "cuts": [12], "endpoint_step": 12, "checkpoint_every": 2}
    lab.write_study(**settings, async_checkpoint=beside)
    second_lab.write_study(**settings)
    assert second_lab.train("mxfp4_sr") == 0
    for step in (2, 4):
        process = lab.start("mxfp4_sr", disk="slow")
        half = next(_writing(lab, process, step))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert half.is_dir() and not half.with_name(half.name[1:]).exists()
        whole = sorted((lab.run_path("mxfp4_sr") / "checkpoints").glob("step-*"))
        assert [verify(path) for path in whole] == [None] * len(whole) and whole
    assert lab.train("mxfp4_sr") == 0
    assert not list((lab.run_path("mxfp4_sr") / "checkpoints").glob(".step-*"))
    assert lab.tensors("mxfp4_sr", 12) == second_lab.tensors("mxfp4_sr", 12)
    assert lab.metrics("mxfp4_sr") == second_lab.metrics("mxfp4_sr")


def test_sigterm_waits_for_the_write(lab: Lab) -> None:
    lab.write_study(**ASYNC, steps=4000, cuts=[4000], endpoint_step=4000, checkpoint_every=2)
    process = lab.start("mxfp4_sr", disk="slow")
    next(_writing(lab, process, 0))
    os.kill(process.pid, signal.SIGTERM)
    process.join(30)
    assert process.exitcode == 75
    checkpoints = lab.run_path("mxfp4_sr") / "checkpoints"
    assert not list(checkpoints.glob(".step-*"))
    newest = max(checkpoints.glob("step-*"))
    assert verify(newest) is None
    assert [row[0] for row in lab.metrics("mxfp4_sr")] == list(range(1, int(newest.name[5:]) + 1))
