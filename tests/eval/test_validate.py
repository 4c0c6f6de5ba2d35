"""Validation: the number is the mean NLL, its error the sequences', and the gate tells learning from not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from eval import oracle, stream, validate
from eval.__main__ import main
from fp4core import records
from fp4core.model import build_model, rope_inv_freq


def test_sequence_nll_equals_the_spelled_out_mean(pristine):
    """FP32 compute against FP64 log-softmax of the oracle; FP32 rounding over 32 terms stays below 1e-5."""
    job = pristine.job()
    config, state = job.checkpoint(20).weights()
    rows = stream.validation(job).rows[:5]
    model = build_model(config, None, "cpu", seed=None, compute_dtype=torch.float32)
    model.load_state_dict(state)
    found = validate.sequence_nll(model, rows, batch=2, device="cpu")
    for row, value in zip(rows, found, strict=True):
        ids = torch.from_numpy(row)
        logits = oracle.logits(state, config, ids[:-1], table=rope_inv_freq(config))
        exact = -logits.log_softmax(-1).gather(1, ids[1:, None]).mean().item()
        assert value == pytest.approx(exact, abs=1e-5)


def test_batch_size_changes_nothing_beyond_rounding(pristine):
    job = pristine.job()
    config, state = job.checkpoint(20).weights()
    model = build_model(config, "bf16", "cpu", seed=None)
    model.load_state_dict(state)
    rows = stream.validation(job).rows[:6]
    one, all_ = (validate.sequence_nll(model, rows, batch=b, device="cpu") for b in (1, 6))
    np.testing.assert_allclose(one, all_, rtol=0, atol=1e-3)  # BF16 activations, other GEMM shapes


def test_mean_and_error():
    values = [1.0, 2.0, 4.0]
    mean, error = validate.mean_and_error(values)
    assert mean == pytest.approx(7 / 3)
    assert error == pytest.approx(np.std(values, ddof=1) / math.sqrt(3))


def _cut(step, values):
    mean, error = validate.mean_and_error(values)
    return {"step": step, "nll": mean, "se": error, "sequence_nll": values}


@pytest.mark.parametrize(
    ("late", "passed"),
    [([4.0, 4.1, 3.9, 4.0], True), ([4.95, 5.1, 4.85, 5.0], False), ([6.0, 6.1, 5.9, 6.0], False)],
    ids=["clearly better", "within the noise", "worse"],
)
def test_gate_needs_the_gain_to_exceed_its_error(late, passed):
    early = _cut(10, [5.0, 5.1, 4.9, 5.0])
    assert validate.gate(early, _cut(20, late), 5.0)["passed"] is passed


def test_gate_fails_on_a_non_finite_cut():
    broken = {"step": 20, "nll": None, "se": None, "sequence_nll": [None]}
    found = validate.gate(_cut(10, [1.0, 2.0]), broken, 5.0)
    assert found["passed"] is False
    assert "non-finite" in found["reason"]


def test_command_writes_records_gate_and_marker(project, capsys):
    done = project.results / "done.json"
    assert main(["validate", *project.cli(), "--done", str(done)]) == 0
    job = project.job()
    first, last = (records.read_json(validate.record_path(job, step)) for step in (10, 20))
    assert first["nll"] > last["nll"]
    for record in (first, last):
        assert record["sequences"] == len(record["sequence_nll"]) == 24
        assert record["tokens"] == 24 * 32
        assert record["inputs"]["stream_sha256"] == job.data()["validation"]["stream_sha256"]
        assert record["scored_with"] == "bf16"
    gate = records.read_json(project.results / "validation/bf16/s3/gate.json")
    assert gate["passed"] is True
    marker = records.read_json(done)
    assert marker["sha256"] == records.sha256_file(validate.record_path(job, 20))
    assert "2 of 2" in capsys.readouterr().out


def test_second_command_scores_nothing_again(project, monkeypatch):
    assert main(["validate", *project.cli()]) == 0
    monkeypatch.setattr(validate, "_score", lambda *_: pytest.fail("scored an up-to-date cut again"))
    assert main(["validate", *project.cli(), "--steps", "20"]) == 0


def test_cuts_after_a_divergence_are_skipped_in_every_stage(project, capsys):
    """Cut 20 would be there to be scored by mistake: the record says that the run ended at 15."""
    job = project.job()
    (job.run_dir / "summary.json").unlink()
    records.write_json(job.run_dir / "failure.json", {"step": 15, "loss": "nan"})
    note = "bf16 seed 3: training ended in non-finite numbers at step 15; skipped: step 20"
    done = project.results / "done.json"
    assert main(["validate", *project.cli(), "--done", str(done)]) == 0
    assert validate.record_path(job, 10).is_file() and not validate.record_path(job, 20).exists()
    marker = records.read_json(done)
    assert marker["record"].endswith("step-00000010.json") and marker["note"] == note
    for command in ("validate --steps 20", "downstream", "export", "dgrad"):
        name, *more = command.split()
        where = project.cli(route=None if name == "dgrad" else "bf16")
        done.unlink()
        capsys.readouterr()
        assert main([name, *where, *more, "--done", str(done)]) == 0
        marker = records.read_json(done)
        assert marker["record"].endswith("runs/bf16/s3/failure.json") and marker["note"] == note
        assert note in capsys.readouterr().out
        assert main([name, *where, *more]) == 2
        assert capsys.readouterr().err == f"error: {note}\n"
    assert not [p for p in ("downstream", "export", "dgrad") if (project.results / p).exists()]


def test_record_of_another_study_is_archived_not_overwritten(project):
    assert main(["validate", *project.cli(), "--steps", "20"]) == 0
    path = validate.record_path(project.job(), 20)
    old = records.read_json(path) | {"recipe_hash": "0123456789ab"}
    records.write_json(path, old)
    assert main(["validate", *project.cli(), "--steps", "20"]) == 0
    kept = list((project.results / "archive" / "bf16").rglob("step-00000020.json"))
    assert [records.read_json(p)["recipe_hash"] for p in kept] == ["0123456789ab"]
    assert records.read_json(path)["recipe_hash"] == project.recipe("bf16").hash


def _tamper_stream(project):
    path = project.results / "data" / "validation.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    return "validation.arrow: sha256 expected"


def _tamper_checkpoint(project):
    (path,) = project.job().checkpoint(10).path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    return "restore the checkpoint"


def _tamper_manifest(project):
    path = project.job().run_dir / "manifest.json"
    records.write_json(path, records.read_json(path) | {"stage_hash": "feedfeedfeed"})
    return "train the route again"


def _drop_checkpoint(project):
    (project.job().checkpoint(10).path / "checkpoint.json").unlink()
    return "no whole checkpoint of step 10"


@pytest.mark.parametrize(
    "spoil",
    [_tamper_stream, _tamper_checkpoint, _tamper_manifest, _drop_checkpoint],
    ids=lambda f: f.__name__,
)
def test_wrong_bytes_are_refused_in_one_line(project, spoil, capsys):
    message = spoil(project)
    assert main(["validate", *project.cli()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not validate.record_path(project.job(), 10).exists()


def test_unknown_step_names_the_cuts(project, capsys):
    assert main(["validate", *project.cli(), "--steps", "15"]) == 2
    assert "needed steps of the study: 10, 20" in capsys.readouterr().err
