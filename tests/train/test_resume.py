"""A run that was interrupted, however and wherever, ends bit-equal to one that was not."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pyarrow.parquet as pq
import pytest
from conftest import Lab

from fp4core.recipe import list_routes
from fp4core.records import read_json
from fp4core.train.engine import Engine


@pytest.mark.parametrize("route", list_routes())
def test_segments_equal_one_run(route: str, lab: Lab, second_lab: Lab) -> None:
    """Every route, stochastic rounding included: model, moments, schedule, data and random bits go on."""
    assert lab.train(route) == 0
    assert second_lab.train(route, "--until", "2") == 0
    assert second_lab.train(route, "--until", "3") == 0
    assert second_lab.train(route) == 0
    assert lab.tensors(route, 3) == second_lab.tensors(route, 3)
    assert lab.tensors(route, 6) == second_lab.tensors(route, 6)
    assert lab.metrics(route) == second_lab.metrics(route)
    assert [row[0] for row in lab.metrics(route)] == [1, 2, 3, 4, 5, 6]
    starts = read_json(second_lab.run_path(route) / "manifest.json")["starts"]
    assert [start["first_step"] for start in starts] == [1, 3, 4]


def test_routes_differ(lab: Lab) -> None:
    """The comparison above means something: two routes do not give the same bits."""
    for route in ("bf16", "mxfp4_sr", "mxfp4_sr_h32"):
        assert lab.train(route, "--until", "3") == 0
    tensors = [lab.tensors(route, 3) for route in ("bf16", "mxfp4_sr", "mxfp4_sr_h32")]
    assert tensors[0] != tensors[1] != tensors[2]


def test_killed_at_random_points(lab: Lab, second_lab: Lab) -> None:
    """SIGKILL during steps, checkpoint writes and start-up; ten points, then to the end."""
    settings = {"steps": 60, "cuts": [30, 60], "endpoint_step": 60, "checkpoint_every": 2}
    lab.write_study(**settings)
    second_lab.write_study(**settings)
    assert second_lab.train("mxfp4_sr") == 0
    rng = random.Random(7)
    kills = 0
    for _ in range(10):
        process = lab.start("mxfp4_sr")
        process.join(rng.uniform(0.2, 1.0))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
    assert kills >= 3
    assert lab.train("mxfp4_sr") == 0
    assert lab.tensors("mxfp4_sr", 60) == second_lab.tensors("mxfp4_sr", 60)
    assert lab.tensors("mxfp4_sr", 30) == second_lab.tensors("mxfp4_sr", 30)
    assert lab.metrics("mxfp4_sr") == second_lab.metrics("mxfp4_sr")
    names = {path.name for path in (lab.run_path("mxfp4_sr") / "checkpoints").iterdir()}
    assert names == {"step-00000030", "step-00000060"}


def _wait_for_steps(lab: Lab, route: str, process) -> None:
    """Wait until the child has written its first checkpoint, so that it is training."""
    deadline = time.monotonic() + 60
    while not any(lab.run_path(route).glob("checkpoints/step-*")):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)


def test_sigterm_checkpoints_and_exits_75(lab: Lab) -> None:
    lab.write_study(steps=4000, cuts=[4000], endpoint_step=4000, checkpoint_every=2, log_every=1)
    process = lab.start("bf16")
    _wait_for_steps(lab, "bf16", process)
    os.kill(process.pid, signal.SIGTERM)
    process.join(30)
    assert process.exitcode == 75
    assert "got SIGTERM; checkpoint written" in lab.output.read_text()
    last = max(int(p.name[5:]) for p in (lab.run_path("bf16") / "checkpoints").glob("step-*"))
    assert [row[0] for row in lab.metrics("bf16")] == list(range(1, last + 1))
    assert not (lab.run_path("bf16") / "summary.json").exists()


def test_time_budget_exits_75_and_goes_on(make_lab: Callable[[], Lab]) -> None:
    lab, unbroken = make_lab(), make_lab()
    settings = {"steps": 100, "cuts": [100], "endpoint_step": 100, "checkpoint_every": 1000}
    lab.write_study(**settings)
    unbroken.write_study(**settings)
    process = lab.start("bf16", "--max-seconds", "0.5")
    process.join(60)
    assert process.exitcode == 75
    assert "time budget of 0.5 s" in (lab.run_path("bf16") / "run.log").read_text()
    assert lab.train("bf16") == 0
    assert unbroken.train("bf16") == 0
    assert lab.tensors("bf16", 100) == unbroken.tensors("bf16", 100)
    assert lab.metrics("bf16") == unbroken.metrics("bf16")


def test_metrics_are_readable_while_the_run_goes_on(lab: Lab) -> None:
    lab.write_study(steps=4000, cuts=[4000], endpoint_step=4000, checkpoint_every=2, log_every=1)
    process = lab.start("bf16")
    try:
        _wait_for_steps(lab, "bf16", process)
        table = pq.read_table(lab.run_path("bf16") / "metrics.parquet")
        assert table["step"].to_pylist() == list(range(1, len(table) + 1))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()


def test_finished_run_is_left_alone(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    assert lab.train("bf16", "--done", str(lab.results / "done.json")) == 0
    summary = lab.run_path("bf16") / "summary.json"
    before = summary.read_bytes(), summary.stat().st_mtime_ns
    capfd.readouterr()
    assert lab.train("bf16", "--done", str(lab.results / "done.json")) == 0
    assert "nothing to do" in capfd.readouterr().out
    assert (summary.read_bytes(), summary.stat().st_mtime_ns) == before
    marker = read_json(lab.results / "done.json")
    assert lab.results / marker["record"] == summary
    assert marker["recipe_hash"] == read_json(summary)["recipe_hash"]


def test_replayed_steps_are_counted(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was made again has one row; the count goes on after a restart."""
    real = Engine.exact_gradients

    def replayed(self: Engine, step: int, **options: bool) -> tuple[float, float, bool]:
        return *real(self, step, **options)[:2], step in (2, 5)

    monkeypatch.setattr(Engine, "exact_gradients", replayed)
    assert lab.train("bf16", "--until", "4") == 0
    assert lab.train("bf16") == 0
    table = pq.read_table(lab.run_path("bf16") / "metrics.parquet")
    assert table["step"].to_pylist() == [1, 2, 3, 4, 5, 6]
    assert table["replays"].to_pylist() == [0, 1, 1, 1, 2, 2]


def test_metrics_of_before_the_count_go_on(lab: Lab) -> None:
    assert lab.train("bf16", "--until", "3") == 0
    path = lab.run_path("bf16") / "metrics.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["replays"]), path)
    assert lab.train("bf16") == 0
    assert pq.read_table(path)["replays"].to_pylist() == [None, None, None, 0, 0, 0]
