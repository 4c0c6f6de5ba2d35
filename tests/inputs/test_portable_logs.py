"""A results directory copied to another machine: what must be in it, and what is said of unfinished runs."""

from __future__ import annotations

import shutil

import pytest

from fp4core import recipe


@pytest.fixture
def logs(tmp_path):
    """Every log that the smoke study is drawn from, empty, with checkpoints beside them."""
    folder = tmp_path / "copied" / "here"
    for name in recipe.make_plan({})[1].log_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}", encoding="utf-8")
    for step in ("step-00000020", "step-00000040", "step-00000060"):
        (folder / "runs" / "bf16" / "s0" / "checkpoints" / step).mkdir(parents=True)
    return folder


def refused(logs) -> str:
    with pytest.raises(recipe.ConfigError) as caught:
        recipe.make_plan({"from_logs": str(logs)})
    return str(caught.value)


def test_checkpoints_markers_and_shards_need_not_be_copied(logs):
    shutil.rmtree(logs / "runs" / "bf16" / "s0" / "checkpoints")
    wanted = recipe.make_plan({"from_logs": str(logs)})[1].log_files(logs)
    assert not [
        name for name in wanted if "checkpoints" in name or "done/" in name or name.endswith(".arrow")
    ]


def test_unfinished_runs_are_named_with_how_far_they_got(logs):
    (logs / "runs" / "bf16" / "s0" / "summary.json").unlink()
    (logs / "runs" / "bf16" / "s0" / "checkpoints" / "step-00000060").rmdir()
    (logs / "runs" / "mxfp4_sr" / "s0" / "summary.json").unlink()
    said = refused(logs)
    assert "2 logs are missing and nothing is run in their place" in said
    assert "\n  incomplete run: runs/bf16/s0, last checkpoint 40\n" in said
    assert "\n  incomplete run: runs/mxfp4_sr/s0\n" in said
    assert "\n  runs/bf16/s0/summary.json" in said


def test_run_that_never_began_is_missing_and_not_incomplete(logs):
    shutil.rmtree(logs / "runs" / "bf16")
    said = refused(logs)
    assert "3 logs are missing" in said and "incomplete" not in said
    assert "\n  runs/bf16/s0/manifest.json" in said
