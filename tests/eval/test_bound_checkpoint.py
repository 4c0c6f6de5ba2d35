"""A checkpoint trained elsewhere, bound by hash, is evaluated as one of this machine's own."""

from __future__ import annotations

import pytest

from eval.__main__ import main
from fp4core import records
from fp4core.train.bind import bind


@pytest.fixture
def elsewhere(project, tmp_path):
    """The run of bf16 moved away, its second checkpoint bound."""
    run = tmp_path / "elsewhere" / "s3"
    run.parent.mkdir()
    project.job().run_dir.rename(run)
    bind("checkpoint", run, inputs=tmp_path / "inputs.yaml", step=20, note=lambda line: None)
    return run


def test_bound_checkpoint_scores_as_the_run_itself(pristine, project, elsewhere, tmp_path):
    bound = ["--steps", "20", "--checkpoint", str(tmp_path / "inputs.yaml")]
    assert main(["validate", *project.cli(), *bound]) == 0
    own = pristine.copy(tmp_path / "own")
    assert main(["validate", *own.cli(), "--steps", "20"]) == 0
    name = "validation/bf16/s3/step-00000020.json"
    mine, theirs = (records.read_json(p.results / name) for p in (project, own))
    assert mine["sequence_nll"] == theirs["sequence_nll"]
    assert mine["inputs"] == theirs["inputs"]


def test_changed_weights_are_refused(project, elsewhere, tmp_path, capsys):
    files = sorted((elsewhere / "checkpoints" / "step-00000020").iterdir())
    weights = next(path for path in files if "json" not in path.name)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    more = ["--steps", "20", "--checkpoint", str(tmp_path / "inputs.yaml")]
    assert main(["validate", *project.cli(), *more]) == 2
    assert f"checkpoint: {weights}: sha256 expected" in capsys.readouterr().err


def test_other_route_is_refused(project, elsewhere, tmp_path, capsys):
    more = ["--steps", "20", "--checkpoint", str(tmp_path / "inputs.yaml")]
    assert main(["validate", *project.cli("mxfp4_sr"), *more]) == 2
    assert "binds a checkpoint of bf16, --route says mxfp4_sr" in capsys.readouterr().err
