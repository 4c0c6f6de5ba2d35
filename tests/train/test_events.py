"""TensorBoard events: one point per logged step whatever happened, and nothing without being asked."""

from __future__ import annotations

import importlib.util
import os
import signal
import time

import pytest
from conftest import Lab

from fp4core.train import events

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs the optional package tensorboard"
)


def _points(lab: Lab, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(lab.run_path("bf16") / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return [(point.step, point.value) for point in found.Scalars(tag)]


def test_without_the_package_one_clear_error(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before anything is written; a study that asks for it is told the same."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        events.importlib.util, "find_spec", lambda name: None if name == "tensorboard" else real(name)
    )
    assert lab.train("bf16", "--tensorboard") == 2
    lab.write_study(tensorboard=True)
    assert lab.train("bf16") == 2
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 2 and all("pip install 'tensorboard>=2.20,<3'" in line for line in errors)
    assert not lab.run_path("bf16").exists()


def test_nothing_without_being_asked(lab: Lab) -> None:
    assert lab.train("bf16", "--until", "2") == 0
    assert not (lab.run_path("bf16") / "tensorboard").exists()


@needs_tensorboard
def test_scalars_are_the_metrics(lab: Lab) -> None:
    """A stop and another start leave one point per step, in the run's own directory."""
    before = {p for p in lab.results.rglob("*") if p.is_file()}
    assert lab.train("bf16", "--tensorboard", "--until", "3") == 0
    lab.write_study(tensorboard=True)
    assert lab.train("bf16") == 0
    for place, tag in enumerate(("train/loss", "train/grad_norm", "train/lr"), start=1):
        assert _points(lab, tag) == [
            (row[0], pytest.approx(row[place], rel=1e-6)) for row in lab.metrics("bf16")
        ]
    for tag in ("speed/tokens_per_s", "speed/memory_gib", "speed/replayed_steps"):
        assert [step for step, _ in _points(lab, tag)] == [1, 2, 3, 4, 5, 6]
    new = {p for p in lab.results.rglob("*") if p.is_file()} - before
    events_of = [p for p in new if "tfevents" in p.name]
    assert len(events_of) == 2 and {p.parent for p in events_of} == {lab.run_path("bf16") / "tensorboard"}


@needs_tensorboard
def test_a_kill_leaves_no_doubled_points(lab: Lab) -> None:
    """Steps after the last checkpoint have points of both starts; the second start's count."""
    lab.write_study(steps=150, cuts=[150], endpoint_step=150, checkpoint_every=50, tensorboard=True)
    process = lab.start("bf16")
    deadline = time.monotonic() + 60
    while not any(lab.run_path("bf16").glob("checkpoints/step-*")):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert lab.train("bf16") == 0
    assert _points(lab, "train/loss") == [
        (row[0], pytest.approx(row[1], rel=1e-6)) for row in lab.metrics("bf16")
    ]
    assert [row[0] for row in lab.metrics("bf16")] == list(range(1, 151))
