"""The doctor: what a study asks of a machine, and everything that is missing before a job is submitted."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import pytest
import yaml

from figures import published
from fp4core import recipe
from fp4core.__main__ import main
from fp4core.model.arithmetic import count_parameters
from fp4core.recipe import Geometry
from fp4core.train import readiness
from fp4core.train.commands import doctor
from tests.workflow.pipeline import planned, snakemake

REPORT = recipe.load_study("report")


@pytest.mark.parametrize("name", ["smoke", "h200", "report"])
def test_parameters_are_the_models(name):
    model = recipe.load_study(name).model
    assert readiness.parameters(model) == count_parameters(model)


def test_memory_estimate_is_near_what_the_report_measured():
    """Same geometries: FSDP over 32 GPUs, local batch 4 and every 32nd block recomputed, BF16 local batch 2
    and every eighth (FP4 views of operands are kept or not, hence a third either way)."""
    probe = REPORT.probe
    for route in ("mxfp4_sr", "nvfp4_cta", "nvfp4_global", "bf16"):
        geometry = probe.selected.get(route, probe.matched)
        estimate = readiness.memory(REPORT, 32, geometry)["total"]
        measured = published.number("table06_throughput", route, "memory_gib")
        assert 2 / 3 < estimate / measured < 3 / 2, (route, estimate, measured)


def test_memory_follows_the_geometry():
    def total(gpus: int, batch: int, policy: str) -> float:
        return readiness.memory(REPORT, gpus, Geometry(batch, policy))["total"]

    assert total(8, 2, "full") < total(8, 2, "selective") < total(8, 2, "selective-8") < total(8, 2, "none")
    assert total(32, 2, "selective") < total(8, 2, "selective") < total(8, 4, "selective")
    kept = dataclasses.replace(REPORT, train=dataclasses.replace(REPORT.train, keep_gathered=True))
    more = (4 * 8030261248 - 4 * (2 * 128256 * 4096 + 4096 + 2 * 218112000)) / 2**30  # FP32, two blocks
    assert readiness.memory(kept, 8, Geometry(2, "full"))["total"] == pytest.approx(
        total(8, 2, "full") + more
    )
    one = readiness.memory(REPORT, 1, Geometry(1, "full"))
    assert one["state"] == pytest.approx(16 * 8030261248 / 2**30) and one["gathered"] == 0


def test_gpu_days_are_the_published_rates_and_give_way_to_own_probes(tmp_path):
    routes = recipe.study_routes(REPORT)
    rates = readiness.rates(REPORT, routes, tmp_path)
    assert rates["mxfp4_sr"].tokens_per_s == 37876.75
    assert readiness.tokens(REPORT) / rates["bf16"].tokens_per_s / 86400 == pytest.approx(98.44, abs=0.01)
    probe = tmp_path / "probes" / "bf16" / "s42.json"
    probe.parent.mkdir(parents=True)
    head = f'"recipe_hash": "{routes["bf16"].hash}", "stage_hash": "{REPORT.stage_hash("probe")}"'
    probe.write_text(f'{{{head}, "device": {{"name": "B300"}}, "measurements": [{{"tokens_per_s": 20000}}]}}')
    assert readiness.rates(REPORT, routes, tmp_path)["bf16"] == readiness.Rate(
        20000, "B300 (this study's probe)"
    )
    probe.write_text(probe.read_text().replace(routes["bf16"].hash, "0" * 12))
    assert readiness.rates(REPORT, routes, tmp_path)["bf16"].source == "GB200 (published)"
    assert readiness.rates(recipe.load_study("h200"), routes, tmp_path / "none") == {}


def test_unbound_report_lists_everything(tmp_path, capsys):
    arguments = ["doctor", "--study", "report", "--inputs", str(tmp_path / "inputs.yaml"), "--gpus", "32"]
    assert main([*arguments, "--results", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    for kind in ("tokenizer", "corpus", "validation", "evaluation"):
        assert f"bind it: fp4core bind {kind} PATH" in said
    assert "training on 32 GPUs: about 78 GiB each" in said
    assert "mxfp4_sr: 48.9 at 37,877 tokens/s per GB200 (published)" in said
    assert "missing     disk: 7," in said
    assert "ready" not in said


class TestOnGpus:
    """With a pretended machine: which facts make the study impossible."""

    @pytest.fixture
    def machine(self, monkeypatch):
        def pretend(count: int, gib: float, disk: float = 1e6) -> None:
            import torch

            monkeypatch.setattr(doctor, "_machine", list)
            monkeypatch.setattr(doctor, "_available", lambda: ["reference", "carrier"])
            monkeypatch.setattr(readiness, "free_disk", lambda path: disk)
            monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
            monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
            properties = SimpleNamespace(total_memory=int(gib * 2**30), major=9, minor=0, name="NVIDIA H200")
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

        return pretend

    @pytest.fixture
    def inputs(self, tmp_path):
        bindings = {"version": 1}
        for kind in ("tokenizer", "corpus", "validation", "evaluation"):
            (tmp_path / kind).mkdir()
            (tmp_path / kind / "a.bin").touch()
            bindings[kind] = {"directory": kind, "sha256": {"a.bin": "0" * 64}}
        (tmp_path / "inputs.yaml").write_text(yaml.safe_dump(bindings), encoding="utf-8")
        return tmp_path / "inputs.yaml"

    def ask(self, inputs, capsys, *more: str) -> tuple[int, list[str]]:
        code = main(["doctor", "--study", "report", "--inputs", str(inputs), *more])
        lines = capsys.readouterr().out.splitlines()
        return code, [line.split(maxsplit=1)[1] for line in lines if line.startswith("missing")]

    def test_ready(self, machine, inputs, capsys):
        machine(8, 180)
        assert self.ask(inputs, capsys) == (0, [])

    def test_too_little_memory(self, machine, inputs, capsys):
        machine(8, 80)
        code, missing = self.ask(inputs, capsys)
        assert code == 1
        assert [line.split(":")[1].split(" needs")[0].strip() for line in missing] == [
            "training",
            "probe, local batch 2, selective-32",
            "probe, local batch 4, selective-32",
        ]
        assert (
            "these have 80; use more GPUs, a smaller local_batch or activation_checkpoint: full" in missing[0]
        )

    def test_too_little_disk(self, machine, inputs, capsys):
        machine(8, 180, disk=100)
        code, (missing,) = self.ask(inputs, capsys)
        assert code == 1 and missing.startswith("disk: ") and "100 GiB are free" in missing

    def test_number_of_gpus_that_does_not_divide_the_batch(self, machine, inputs, capsys):
        machine(8, 180)
        code, (missing,) = self.ask(inputs, capsys, "--gpus", "24")
        assert code == 1 and "global batch 512 is no multiple of 24 GPUs x local batch 2" in missing

    def test_no_gpu(self, machine, inputs, capsys):
        machine(0, 0)
        code, (missing,) = self.ask(inputs, capsys)
        assert code == 1 and missing.startswith("GPU: study report trains on CUDA, none is here")

    def test_dry_run_of_the_bound_report_study_plans_everything_in_seconds(self, inputs, tmp_path):
        started = time.monotonic()
        done = snakemake(
            *("--profile", "slurm", "all", "-n"),
            *("--config", f"results={tmp_path}/results", f"inputs={inputs}"),
        )
        seconds = time.monotonic() - started
        assert done.returncode == 0, done.stdout[-3000:]
        routes, cuts = len(recipe.study_routes(REPORT)), len(REPORT.all_cuts)
        jobs = planned(done.stdout)
        assert jobs["train"] == jobs["validate"] == routes * cuts
        assert jobs["probe"] == jobs["downstream"] == routes
        assert seconds < 30, "under 10 s on an idle machine; three times that beside other tests"


def test_refusal_names_the_doctor(tmp_path):
    with pytest.raises(recipe.ConfigError, match="python -m fp4core doctor --study report"):
        recipe.make_plan({"study": "report", "inputs": str(tmp_path / "inputs.yaml")})


def test_wrong_number_of_gpus(capsys):
    assert main(["doctor", "--study", "smoke", "--gpus", "0"]) == 2
    assert "--gpus 0: needed at least 1" in capsys.readouterr().err
