"""Two gloo processes against one: the same global batch, the same random bits, a checkpoint for any world."""

from __future__ import annotations

import os
import signal
import time

import pytest
from conftest import Lab

from fp4core.recipe import list_routes
from fp4core.records import read_json
from fp4core.train.checkpoint import verify

SHORT = {"steps": 2, "cuts": [2], "endpoint_step": 2, "local_batch": 2, "clip": 100.0}


def _two(lab: Lab, routes: list[str], *more: str) -> None:
    lab.finish_ranks(2, routes, *more)


def test_two_ranks_are_one_process_with_two_micro_steps(lab: Lab, second_lab: Lab) -> None:
    """Every route. A rank's share of the batch is the other's micro-step, so losses agree to the bit.

    Gradients are then sums of the same two FP32 terms, exact under either order (the average over ranks
    undoes a factor of two), and without clipping so is the update: the second loss shows it. The norm alone
    is summed in another order.
    """
    routes = list_routes()
    for each in (lab, second_lab):
        each.write_study(**SHORT)
    _two(second_lab, routes)
    for route in routes:
        assert lab.train(route) == 0
        one, two = lab.metrics(route), second_lab.metrics(route)
        assert [row[:2] for row in one] == [row[:2] for row in two], route
        assert [row[2] for row in one] == pytest.approx([row[2] for row in two], rel=1e-6)


@pytest.mark.parametrize("first_world", [1, 2])
def test_another_world_size_resumes(first_world: int, lab: Lab, second_lab: Lab) -> None:
    """The order of tokens and the random bits go on; only sums over ranks are formed in another order."""
    settings = {"steps": 4, "cuts": [2, 4], "endpoint_step": 4, "local_batch": 2}
    for each in (lab, second_lab):
        each.write_study(**settings)
    assert second_lab.train("mxfp4_sr") == 0
    if first_world == 1:
        assert lab.train("mxfp4_sr", "--until", "2") == 0
        _two(lab, ["mxfp4_sr"])
    else:
        _two(lab, ["mxfp4_sr"], "--until", "2")
        assert lab.train("mxfp4_sr") == 0
    starts = read_json(lab.run_path("mxfp4_sr") / "manifest.json")["starts"]
    assert [start["world_size"] for start in starts] == [first_world, 3 - first_world]
    mine, unbroken = lab.metrics("mxfp4_sr"), second_lab.metrics("mxfp4_sr")
    assert [row[0] for row in mine] == [1, 2, 3, 4]
    assert [row[1] for row in mine] == pytest.approx([row[1] for row in unbroken], rel=1e-5)


def test_two_replicas_are_one_process_with_two_micro_steps(lab: Lab, second_lab: Lab) -> None:
    """HSDP 2 x 1: each rank holds a whole copy, whose gradients are averaged; to the bit as above."""
    lab.write_study(**SHORT)
    second_lab.write_study(**SHORT, replicas=2)
    _two(second_lab, ["mxfp4_sr"])
    assert lab.train("mxfp4_sr") == 0
    one, two = lab.metrics("mxfp4_sr"), second_lab.metrics("mxfp4_sr")
    assert [row[:2] for row in one] == [row[:2] for row in two]
    assert [row[2] for row in one] == pytest.approx([row[2] for row in two], rel=1e-6)


def test_two_replicas_of_two_shards(lab: Lab, second_lab: Lab) -> None:
    """HSDP 2 x 2 against one process with four micro-steps; its checkpoint goes on in one process.

    The first loss is equal to the bit. Gradients are (a + b) + (c + d) here and ((a + b) + c) + d there: FP32
    sums of four terms differ by 3 eps of their magnitudes, 2e-7, and after that a BF16 rounding flips now and
    then: losses agree to 1e-5. A weight is written once, by whichever replica DCP picks.
    """
    settings = {"steps": 4, "cuts": [2, 4], "endpoint_step": 4, "local_batch": 1}
    lab.write_study(**settings)
    second_lab.write_study(**settings, replicas=2, async_checkpoint=True)
    second_lab.finish_ranks(4, ["mxfp4_sr"], "--until", "2")
    written = second_lab.tensors("mxfp4_sr", 2)
    assert lab.train("mxfp4_sr") == 0
    whole = lab.tensors("mxfp4_sr", 2)
    assert 0.99 < sum(f["bytes"] for f in written.values()) / sum(f["bytes"] for f in whole.values()) < 1.1
    second_lab.write_study(**settings)
    assert second_lab.train("mxfp4_sr") == 0
    one, four = lab.metrics("mxfp4_sr"), second_lab.metrics("mxfp4_sr")
    assert one[0][1] == four[0][1]
    assert [row[1] for row in one] == pytest.approx([row[1] for row in four], rel=1e-5)
    assert [row[2] for row in one] == pytest.approx([row[2] for row in four], rel=1e-4)


def test_uneven_replicas_are_refused(lab: Lab) -> None:
    lab.write_study(**SHORT, replicas=3)
    processes = lab.start_ranks(2, ["bf16"])
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes] == [2, 2]
    errors = [line for line in lab.output.read_text().splitlines() if "error: " in line]
    assert all("train.replicas 3 does not divide 2 ranks" in line for line in errors)
    assert len(errors) == 1


def test_sharded_checkpoints_have_a_file_per_rank(lab: Lab) -> None:
    lab.write_study(**SHORT)
    _two(lab, ["bf16"])
    assert sorted(lab.tensors("bf16", 2)) == [
        "shard-00001-model-00001-of-00002.safetensors",
        "shard-00001-model-00002-of-00002.safetensors",
        "shard-00002-model-00001-of-00002.safetensors",
        "shard-00002-model-00002-of-00002.safetensors",
    ]


@pytest.mark.parametrize("beside", [False, True], ids=["waiting", "asynchronous"])
def test_a_vanished_rank_ends_the_run(beside: bool, lab: Lab) -> None:
    """No hang: the rank that is left says so in one line, and its last checkpoint is whole."""
    settings = {"steps": 4000, "cuts": [4000], "endpoint_step": 4000, "checkpoint_every": 2}
    lab.write_study(**settings, local_batch=2, async_checkpoint=beside)
    processes = lab.start_ranks(2, ["bf16"])
    deadline = time.monotonic() + 60
    while not any(lab.run_path("bf16").glob("checkpoints/step-*")):
        assert all(p.is_alive() for p in processes) and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(processes[1].pid, signal.SIGKILL)
    for process in processes:
        process.join(60)
    assert processes[0].exitcode == 1
    errors = [line for line in lab.output.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "another process of the run is gone" in errors[0]
    newest = max((lab.run_path("bf16") / "checkpoints").glob("step-*"))
    assert verify(newest) is None


def test_a_checkpoint_folder_that_cannot_be_readied_is_said_once(lab: Lab) -> None:
    """The first rank alone makes folders; the others must not wait for it in vain, nor guess what it met."""
    lab.write_study(**SHORT)
    (lab.run_path("bf16") / "checkpoints").mkdir(parents=True)
    (lab.run_path("bf16") / "checkpoints" / ".step-00000001").write_text("no directory")
    processes = lab.start_ranks(2, ["bf16"])
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes] == [1, 1]
    errors = [line for line in lab.output.read_text().splitlines() if "error: " in line]
    assert len(errors) == 1 and "Not a directory" in errors[0]


def test_an_error_of_the_first_rank_is_everyones(lab: Lab) -> None:
    lab.write_study(local_batch=4)
    processes = lab.start_ranks(2, ["bf16"])
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes] == [2, 2]
    errors = [line for line in lab.output.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "no multiple of local batch 4 x 2 ranks" in errors[0]
