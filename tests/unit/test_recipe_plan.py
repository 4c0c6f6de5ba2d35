"""The plan that the workflow's rules ask: segments, markers and what is stale."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from fp4core import recipe


def plan_of(study: recipe.Study, **inputs) -> recipe.Plan:
    return recipe.Plan(study, recipe.study_routes(study), f"results/{study.study}", **inputs)


@pytest.fixture(scope="module")
def smoke() -> recipe.Plan:
    return plan_of(recipe.load_study("smoke"))


@pytest.fixture(scope="module")
def report() -> recipe.Plan:
    return plan_of(recipe.load_study("report"))


def test_smoke_trains_in_one_job_and_report_in_one_per_cut(smoke, report):
    assert [s.cuts for s in smoke.segments] == [smoke.study.all_cuts]
    assert [s.end for s in report.segments] == [2000, 10000, 18000, 29000, 38000, 38147]
    assert report.cuts("step-00010000") == "10000" and report.until("step-00010000") == 10000


def test_a_segment_goes_on_from_the_one_before(report):
    assert report.train_before("bf16", 42, "step-00002000") == []
    (before,) = report.train_before("bf16", 42, "step-00010000")
    assert before == report.done("train", "bf16", 42, "step-00002000")


def test_scored_checkpoint_is_waited_for_and_no_longer(report):
    segment = report.train_of("bf16", 42, report.study.downstream.step)
    assert "/step-00038000-" in segment  # not step-00038147, the end of the run


def test_end_of_the_run_is_a_cut_even_where_it_is_not_listed(smoke):
    train = dataclasses.replace(smoke.study.train, cuts=smoke.study.train.cuts[:1])
    shorter = dataclasses.replace(smoke.study, train=train)
    assert shorter.all_cuts == (train.cuts[0], train.steps)


def test_every_marker_is_another_file(smoke):
    markers = smoke.all_done()
    assert len(markers) == len(set(markers)) == len(smoke.recipes) * 4 + 5


def test_marker_names_one_job_and_its_stale_pattern_only_that_job(smoke, tmp_path):
    path = smoke.done("train", "bf16", 0, smoke.segments[0].name)
    pattern = smoke.stale(None, [path])
    assert pattern == path[: -len("0123456789ab.json")] + "*.json"
    spaced = smoke.stale(None, [f"{tmp_path}/with space/s0-0123456789ab.json"])
    assert spaced == f"'{tmp_path}/with space'/s0-*.json"


def test_key_follows_recipe_study_and_bound_inputs(report):
    other = plan_of(report.study, inputs=_bound("0"))
    changed = plan_of(report.study, inputs=_bound("1"))
    stages = ("data", "train", "probe", "validation", "downstream")
    for stage in stages:
        route = "" if stage == "data" else "bf16"
        keys = {p.key(stage, route) for p in (report, other, changed)}
        assert len(keys) == 3, stage
    assert other.key("boundary") == changed.key("boundary") == report.key("boundary")
    assert report.key("train", "bf16") != report.key("train", "mxfp4_sr")


def _bound(digit: str):
    kinds = ("tokenizer", "corpus", "validation", "evaluation")
    return SimpleNamespace(**{kind: SimpleNamespace(sha256={"a.bin": digit * 64}) for kind in kinds})


def test_where_inputs_lie_is_not_in_the_key(report, tmp_path):
    """Only the bytes count, so that a corpus may move to another disk in the middle of a study."""
    keys = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.bin").write_bytes(b"a")
        text = "\n".join(
            f"{kind}: {{directory: {tmp_path / name}, sha256: {{a.bin: '{'0' * 64}'}}}}"
            for kind in ("tokenizer", "corpus", "validation", "evaluation")
        )
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"version: 1\n{text}\n", encoding="utf-8")
        keys.add(recipe.make_plan({"study": "report", "inputs": str(path)})[1].key("train", "bf16"))
    assert len(keys) == 1
