"""What goes wrong is said in one line, and nothing that was there is lost."""

from __future__ import annotations

import dataclasses
import errno

import jsonschema
import pytest
import torch
import torch.distributed as dist
import yaml
from conftest import Lab

from fp4core.__main__ import main
from fp4core.recipe import schemas
from fp4core.records import read_json, sha256_file
from fp4core.train import checkpoint, engine
from fp4core.train.lock import run_lock


def _one_error(capfd: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_second_process_is_refused(lab: Lab) -> None:
    with run_lock(lab.run_path("bf16")):
        process = lab.start("bf16")
        process.join(60)
    assert process.exitcode == 2
    assert lab.output.read_text().startswith("error: ")
    assert "another process owns this run (pid " in lab.output.read_text()
    assert lab.train("bf16", "--until", "2") == 0


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no manifest", "file gone"])
def test_damaged_checkpoint_falls_back(
    damage: str, lab: Lab, second_lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    assert lab.train("mxfp4_sr", "--until", "4") == 0
    path = lab.run_path("mxfp4_sr") / "checkpoints" / "step-00000004"
    weights = next(path.glob("*-model-00001-*.safetensors"))
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "flipped":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "file gone":
        weights.unlink()
    else:
        (path / "checkpoint.json").unlink()
    capfd.readouterr()
    assert lab.train("mxfp4_sr") == 0
    out = capfd.readouterr().out
    assert out.count("is not usable") == 1
    assert "resumed from step 3" in out
    assert (path.parent / "corrupt-step-00000004").is_dir()
    assert second_lab.train("mxfp4_sr") == 0
    assert lab.tensors("mxfp4_sr", 6) == second_lab.tensors("mxfp4_sr", 6)
    assert lab.metrics("mxfp4_sr") == second_lab.metrics("mxfp4_sr")


def test_half_written_checkpoint_is_cleared(lab: Lab) -> None:
    assert lab.train("bf16", "--until", "2") == 0
    half = lab.run_path("bf16") / "checkpoints" / ".step-00000004"
    half.mkdir()
    (half / "shard-00001-model-00001-of-00002.safetensors").write_bytes(b"half")
    assert lab.train("bf16") == 0
    assert not half.exists()


def test_nothing_is_pickled(lab: Lab) -> None:
    assert lab.train("bf16", "--until", "3") == 0
    names = [p.name for p in (lab.run_path("bf16") / "checkpoints" / "step-00000003").iterdir()]
    assert sorted(names) == [
        "checkpoint.json",
        "shard-00001-model-00001-of-00002.safetensors",
        "shard-00001-model-00002-of-00002.safetensors",
    ]


def test_cuts_and_the_last_are_kept(lab: Lab) -> None:
    lab.write_study(steps=9, cuts=[3, 9], endpoint_step=9, checkpoint_every=1, keep_last=2)
    assert lab.train("bf16", "--until", "7") == 0
    names = sorted(p.name for p in (lab.run_path("bf16") / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000006", "step-00000007"]
    assert lab.train("bf16") == 0
    names = sorted(p.name for p in (lab.run_path("bf16") / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000009"]


def test_another_recipe_archives_the_old_run(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    assert lab.train("mxfp4_sr") == 0
    old = read_json(lab.run_path("mxfp4_sr") / "manifest.json")["recipe_hash"]
    metrics = (lab.run_path("mxfp4_sr") / "metrics.parquet").read_bytes()
    path = lab.recipes / "routes" / "mxfp4_sr.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["groups"][0]["dgrad"]["dy"]["rounding"] = "nearest"
    path.write_text(yaml.safe_dump(recipe))
    assert lab.train("mxfp4_sr", "--on-mismatch", "refuse") == 2
    assert "holds a run with another recipe hash" in _one_error(capfd)
    assert lab.train("mxfp4_sr") == 0
    assert read_json(lab.run_path("mxfp4_sr") / "manifest.json")["recipe_hash"] != old
    archived = lab.results / "archive" / "mxfp4_sr" / f"s0-{old}" / "run"
    assert (archived / "metrics.parquet").read_bytes() == metrics
    assert read_json(archived / "summary.json")["recipe_hash"] == old


def test_another_study_archives_too_and_never_overwrites(lab: Lab) -> None:
    for lr in (0.005, 0.006, 0.007):
        lab.write_study(lr=lr)
        assert lab.train("bf16", "--until", "3") == 0
    old = read_json(lab.run_path("bf16") / "manifest.json")["recipe_hash"]
    names = sorted(p.name for p in (lab.results / "archive" / "bf16").iterdir())
    assert names == [f"s0-{old}", f"s0-{old}-2"]


def test_a_label_or_comment_changes_nothing(lab: Lab) -> None:
    assert lab.train("bf16", "--until", "3") == 0
    path = lab.recipes / "routes" / "bf16.yaml"
    path.write_text("# a comment\n" + path.read_text().replace("label: ", "label: new "))
    assert lab.train("bf16") == 0
    assert not (lab.results / "archive").exists()


def test_non_finite_loss_stops(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = engine.Engine.gradients

    def poisoned(self: engine.Engine, step: int) -> torch.Tensor:
        if step == 5:
            with torch.no_grad():
                self.model.blocks[1].mlp.up_proj.weight[3, 3] = float("nan")
        return real(self, step)

    monkeypatch.setattr(engine.Engine, "gradients", poisoned)
    assert lab.train("bf16") == 1
    message = _one_error(capfd)
    assert "step 5 gave loss nan" in message
    assert "first bad tensor: weight model.layers.1.mlp.up_proj.weight" in message
    assert message.endswith("last good checkpoint: step-00000004")
    failure = read_json(lab.run_path("bf16") / "failure.json")
    assert failure["step"] == 5
    assert [row[0] for row in lab.metrics("bf16")] == [1, 2, 3, 4]
    monkeypatch.undo()
    assert lab.train("bf16") == 0
    assert not (lab.run_path("bf16") / "failure.json").exists()


def test_divergence_is_a_result_with_a_marker(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real, steps = engine.Engine.gradients, []

    def poisoned(self: engine.Engine, step: int) -> torch.Tensor:
        steps.append(step)
        return torch.tensor(float("nan")) if step == 5 else real(self, step)

    monkeypatch.setattr(engine.Engine, "gradients", poisoned)
    marker, failure = lab.results / "done.json", lab.run_path("bf16") / "failure.json"
    assert lab.train("bf16", "--done", str(marker)) == 0
    error = capfd.readouterr().err
    assert error.startswith("diverged: ") and error.count("\n") == 1
    assert "step 5 gave loss nan" in error
    assert error.count("last good checkpoint: step-00000004") == 1
    content = read_json(marker)
    assert lab.results / content["record"] == failure
    assert content["sha256"] == sha256_file(failure)
    assert content["note"] in error
    jsonschema.validate(read_json(failure), schemas()["run_failure.schema.json"])
    jsonschema.validate(content, schemas()["marker.schema.json"])
    # the workflow's later segments and retries end at once, an earlier one is what it was
    made = len(steps)
    assert lab.train("bf16", "--until", "6", "--done", str(lab.results / "later.json")) == 0
    assert lab.train("bf16", "--until", "3", "--done", str(lab.results / "first.json")) == 0
    assert len(steps) == made
    assert read_json(lab.results / "later.json")["record"].endswith("failure.json")
    assert read_json(lab.results / "first.json")["record"].endswith("step-00000003/checkpoint.json")
    # by hand, the same command tries again; another recipe or study never sees this failure
    capfd.readouterr()
    assert lab.train("bf16") == 1
    assert "step 5 gave loss nan" in _one_error(capfd)
    lab.write_study(lr=0.006)
    monkeypatch.undo()
    assert lab.train("bf16", "--done", str(marker)) == 0
    assert read_json(marker)["record"].endswith("summary.json")


@pytest.mark.parametrize("command", ["probe", "head-screen"])
def test_measurement_of_non_finite_numbers_is_blank(
    command: str, lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine.Engine, "gradients", lambda self, step: torch.tensor(float("nan")))
    where = ["--study", "tiny", "--recipes", str(lab.recipes), "--results", str(lab.results), "--seed", "0"]
    where += ["--route", "mxfp4_sr"] if command == "probe" else []
    marker = lab.results / "done.json"
    assert main([command, *where, "--done", str(marker)]) == 0
    content = read_json(marker)
    record = read_json(lab.results / content["record"])
    assert "step 1 gave loss nan" in content["note"]
    if command == "probe":
        assert record["measurements"] == [] and list(record["failed"]) == ["selected", "matched"]
    else:
        assert {(row["tokens_per_s"], row["final_loss"]) for row in record["variants"]} == {(None, None)}
        assert list(record["failed"]) == ["bf16", "lowp", "lowp_mxfp8_wgrad"]
    capfd.readouterr()
    assert main([command, *where]) == 1
    assert "step 1 gave loss nan" in _one_error(capfd)


def test_overflowing_activation_is_named(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = engine.Engine.gradients

    def huge(self: engine.Engine, step: int) -> torch.Tensor:
        if step == 2:
            with torch.no_grad():
                for name in ("gate_proj", "up_proj"):
                    getattr(self.model.blocks[0].mlp, name).weight.fill_(1e30)
        return real(self, step)

    monkeypatch.setattr(engine.Engine, "gradients", huge)
    assert lab.train("bf16") == 1
    assert "first bad tensor: output of model.layers.0.mlp" in _one_error(capfd)


def test_full_disk_is_one_line(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert lab.train("bf16", "--until", "2") == 0
    real = checkpoint.dcp.save

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    monkeypatch.setattr(checkpoint.dcp, "save", full)
    assert lab.train("bf16") == 1
    message = _one_error(capfd)
    assert "disk is full (somewhere)" in message
    assert "run the same command again" in message
    monkeypatch.setattr(checkpoint.dcp, "save", real)
    assert lab.train("bf16") == 0
    assert [row[0] for row in lab.metrics("bf16")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nand a long tale"),
        # NCCL allocates too
        dist.DistBackendError("NCCL error in: x.cpp\nLast error:\nCuda failure 2 'out of memory'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "NCCL", "cuBLAS"],
)
def test_exhausted_device_memory_is_one_line(
    error: RuntimeError, lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = engine.Engine.gradients

    def exhausted(self: engine.Engine, step: int) -> torch.Tensor:
        if step == 5:
            raise error
        return real(self, step)

    lab.write_study(async_checkpoint=True)
    monkeypatch.setattr(engine.Engine, "gradients", exhausted)
    assert lab.train("bf16") == 1
    message = _one_error(capfd)
    (line,) = (line for line in str(error).splitlines() if "of memory" in line or "ALLOC" in line)
    assert f"out of device memory ({line}); on more ranks" in message
    # what was being written when it happened is whole
    assert checkpoint.verify(lab.run_path("bf16") / "checkpoints" / "step-00000004") is None
    monkeypatch.undo()
    lab.write_study()
    assert lab.train("bf16") == 0
    assert [row[0] for row in lab.metrics("bf16")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--until", "7"], "--until 7 is outside the run's steps 1 to 6"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--route", "mxfp4_srr"], "did you mean 'mxfp4_sr'?"),
        (["--study", "tinny"], "did you mean 'tiny'?"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], message: str, lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    assert lab.train("bf16", *arguments) == 2
    assert message in _one_error(capfd)


def test_no_data_is_one_line(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    (lab.results / "data").unlink()
    assert lab.train("bf16") == 2
    assert "run `python -m fp4core data" in _one_error(capfd)


def test_uneven_batches_are_refused() -> None:
    world = engine.World(0, 1, torch.device("cpu"))
    two = dataclasses.replace(world, size=2)
    assert engine.Split.of(global_batch=8, local_batch=2, world=two) == engine.Split(0, 2, 2)
    with pytest.raises(ValueError, match="no multiple of local batch 3 x 1 ranks"):
        engine.Split.of(global_batch=8, local_batch=3, world=world)
