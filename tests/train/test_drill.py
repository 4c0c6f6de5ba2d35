"""The resume drill itself, on this machine: two of the twenty interruptions, and what it makes of them."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from fp4core.bench import drill
from fp4core.bench.drill_kills import KINDS, plan


@pytest.mark.slow
def test_killed_in_a_write_and_in_an_evaluation(tmp_path: Path) -> None:
    out = tmp_path / "drill.json"
    asked = ["--kills", "2", "--kinds", "async write,evaluation", "--steps", "40", "--no-repeat"]
    arguments = ["--device", "cpu", "--routes", "bf16", *asked, "--max-seconds", "150", "--out", str(out)]
    assert drill.main(arguments) == 0
    record = json.loads(out.read_text())
    assert record["command"] == "python -m fp4core.bench drill " + " ".join(arguments)
    (row,) = record["rows"]
    assert sorted([kill["kind"] for kill in row["kills"]] + row["missed"]) == ["async write", "evaluation"]
    assert row["kills"]  # a write of milliseconds may escape on a busy machine, hardly both
    assert row["checkpoint_equal"] and row["metrics_equal"] and row["every_step_once"]
    assert row["evaluation_equal"] and row["evaluated"] == ["step-00000020", "step-00000040"]


def test_kinds_take_turns_and_evaluation_comes_last() -> None:
    made = plan(20, KINDS, random.Random(0))
    assert sorted(Counter(made).values()) == [3, 3, 3, 3, 4, 4]
    assert made[-3:] == ["evaluation"] * 3
    assert made != plan(20, KINDS, random.Random(1))


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="--kinds: got 'power cut', needed some of step, write"):
        drill.main(["--kinds", "step,power cut"])


def test_a_step_made_again_may_differ_only_where_kernels_may() -> None:
    same = {"gradients_equal": True, "deterministic": True}
    assert drill._repeated(same)
    assert drill._repeated({"gradients_equal": False, "deterministic": False})
    assert not drill._repeated({**same, "gradients_equal": False})
    assert not drill._repeated({"route": "bf16", "deterministic": True, "error": ["time limit"]})


def test_a_drill_passes_only_when_it_interrupted_and_compared_everything() -> None:
    equal = {"checkpoint_equal": True, "metrics_equal": True, "every_step_once": True}
    good = {"kills": [{"kind": "step"}], **equal, "evaluation_equal": True}
    assert drill._passed(good)
    failed = {k: v for k, v in good.items() if k != "evaluation_equal"}
    for bad in (
        {**good, "kills": []},
        {**good, "evaluation_equal": False},
        {**good, "metrics_equal": False},
        {**failed, "error": "evaluation of the whole run failed"},
    ):
        assert not drill._passed(bad)
