"""The held maxima of a ue5m3 run: resumed to the bit between samples, and missed when they are gone."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from conftest import Lab

from fp4core.records import read_json


def with_interval(lab: Lab, interval: int) -> None:
    path = lab.recipes / "routes" / "ue5m3.yaml"
    path.write_text(path.read_text().replace("amax_interval: 50", f"amax_interval: {interval}"))


def checkpoint(lab: Lab, step: int) -> dict:
    return read_json(lab.run_path("ue5m3") / "checkpoints" / f"step-{step:08d}" / "checkpoint.json")


def test_resume_between_samples_is_bit_equal(lab: Lab, second_lab: Lab) -> None:
    """Samples at steps 1 and 5; stops after 2, 3 (between them), 5 (on one)."""
    with_interval(lab, 4)
    with_interval(second_lab, 4)
    assert lab.train("ue5m3") == 0
    for until in ("2", "3", "5"):
        assert second_lab.train("ue5m3", "--until", until) == 0
    assert second_lab.train("ue5m3") == 0
    assert lab.tensors("ue5m3", 6) == second_lab.tensors("ue5m3", 6)
    assert lab.metrics("ue5m3") == second_lab.metrics("ue5m3")
    assert checkpoint(lab, 6)["held_amax"] == checkpoint(second_lab, 6)["held_amax"]
    assert checkpoint(lab, 3)["held_amax"] != checkpoint(lab, 6)["held_amax"]
    held = checkpoint(lab, 6)["held_amax"]
    assert held["interval"] == 4 and len(held["held"]) == 2 * 8


def ranks(lab: Lab, *more: str) -> None:
    processes = lab.start_ranks(2, ["ue5m3"], *more)
    for process in processes:
        process.join(120)
        process.kill()
    assert [p.exitcode for p in processes] == [0, 0], lab.output.read_text()


def test_resume_is_bit_equal_on_two_ranks_that_recompute(make_lab: Callable[[], Lab]) -> None:
    """Weights sharded, maxima of each rank, blocks recomputed; samples at steps 1 and 4, stops after 2 and 5.

    The maxima that are kept are the largest over the ranks: those of one process with the same micro-batches,
    which a resume in another world size goes on with.
    """
    unbroken, stopped, alone = make_lab(), make_lab(), make_lab()
    for each in (unbroken, stopped, alone):
        with_interval(each, 3)
        each.write_study(local_batch=2, activation_checkpoint="full", clip=100.0)
    ranks(unbroken)
    ranks(stopped, "--until", "2")
    largest = checkpoint(stopped, 2)["held_amax"]
    ranks(stopped, "--until", "5")
    ranks(stopped)
    assert stopped.tensors("ue5m3", 6) == unbroken.tensors("ue5m3", 6)
    assert stopped.metrics("ue5m3") == unbroken.metrics("ue5m3")
    assert checkpoint(stopped, 6)["held_amax"] == checkpoint(unbroken, 6)["held_amax"]
    assert alone.train("ue5m3", "--until", "2") == 0
    assert checkpoint(alone, 2)["held_amax"] == largest
    ranks(alone)
    assert [row[1] for row in alone.metrics("ue5m3")] == pytest.approx(
        [row[1] for row in unbroken.metrics("ue5m3")], rel=1e-5
    )


def test_holding_changes_the_numbers(lab: Lab, second_lab: Lab) -> None:
    """The comparison above means something: sampling at every step is another trajectory."""
    with_interval(second_lab, 1)
    assert lab.train("ue5m3", "--until", "3") == second_lab.train("ue5m3", "--until", "3") == 0
    losses = [[row[1] for row in each.metrics("ue5m3")] for each in (lab, second_lab)]
    assert losses[0][0] == losses[1][0] and losses[0] != losses[1]


def test_a_checkpoint_without_its_maxima_is_refused(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.train("ue5m3", "--until", "3") == 0
    path = lab.run_path("ue5m3") / "checkpoints" / "step-00000003" / "checkpoint.json"
    record = read_json(path)
    del record["held_amax"]
    path.write_text(json.dumps(record))
    assert lab.train("ue5m3") == 2
    assert (
        "held amax: got no rows sampled every None steps, needed 16 rows every 50" in capsys.readouterr().err
    )
