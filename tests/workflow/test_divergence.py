"""A route that ends in non-finite numbers is a result: every other route, table and figure comes out."""

from __future__ import annotations

import csv
import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from fp4core import recipe, records
from tests.workflow.pipeline import ROOT, planned, snakemake

ROUTE = "mxfp4_sr"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """Two routes, run to the end; from step 3 on one of them is broken by its own optimizer state.

    The first moment of one weight is infinite in the checkpoint of step 2. Step 3 still computes with the
    weights of step 2 and its update writes the overflow; step 4 reads it.
    """
    folder = tmp_path_factory.mktemp("divergence")
    for name in ("routes", "studies"):
        (folder / "recipes" / name).mkdir(parents=True)
    for route in ("bf16", ROUTE):
        shutil.copy(ROOT / "recipes" / "routes" / f"{route}.yaml", folder / "recipes" / "routes")
    data = recipe.to_dict(recipe.load_study("smoke"))
    data.update(study="tiny", description="of a test")
    data["model"].update(blocks=2, hidden=64, ffn=128, heads=2, kv_heads=1, head_dim=32, vocab=512)
    data["train"].update(sequence=64, global_batch=2, local_batch=2, steps=6, cuts=[2, 6], warmup=1)
    data["train"].update(endpoint_step=6, log_every=1, checkpoint_every=2, segments="per_cut")
    data["probe"] = {"steps": 3, "window": [2, 3]}
    data["validation"].update(sequences=4, batch=4)
    data["downstream"] = {"step": 6, "max_length": 1024, "tasks": {"winogrande": {"limit": 2}}}
    data["dgrad"] = {"route": ROUTE, "step": 6, "batches": 1, "sequence": 64}
    data["output_head"] = {"route": "bf16", "steps": 3, "window": [2, 3]}
    data["boundary"] = {"tokens": 64, "repeats": 1, "warmup": 0}
    (folder / "recipes" / "studies" / "tiny.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    (cut,) = (m for m in plan(folder).route_done(ROUTE) if "/train/" in m and "step-00000002" in m)
    done = run(folder, cut)
    assert done.returncode == 0, done.stdout[-6000:]
    overflow_a_moment(folder / f"results/tiny/runs/{ROUTE}/s0/checkpoints/step-00000002")
    done = run(folder, "all")
    assert done.returncode == 0, done.stdout[-6000:]
    return folder


def plan(folder: Path):
    study, recipes = folder / "recipes/studies/tiny.yaml", folder / "recipes"
    return recipe.make_plan({"study": str(study), "recipes": str(recipes)})[1]


def run(folder: Path, *arguments: str, config: tuple[str, ...] = ()):
    return snakemake(
        *("--profile", "local", "-s", ROOT / "Snakefile", "--directory", folder, "--cores", "2"),
        *("--quiet", "rules", "--config", f"recipes={folder / 'recipes'}", "study=tiny", *config, "--"),
        *arguments,
        timeout=600,
    )


def overflow_a_moment(checkpoint: Path) -> None:
    """Make a first moment of a down projection infinite, as an overflow leaves it, and hash the file anew."""
    manifest = records.read_json(checkpoint / "checkpoint.json")
    for path in sorted(checkpoint.glob("*.safetensors")):
        data = bytearray(path.read_bytes())
        (length,) = struct.unpack_from("<Q", data)
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name.startswith("optim.exp_avg.") and "down_proj" in name:
                assert entry["dtype"] == "F32"
                struct.pack_into("<f", data, 8 + length + entry["data_offsets"][0], math.inf)
                path.write_bytes(data)
                manifest["files"][path.name]["sha256"] = records.sha256_file(path)
                records.write_json(checkpoint / "checkpoint.json", manifest)
                return
    pytest.fail("the checkpoint has no such moment")


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_everything_comes_out(tiny):
    outputs = [*plan(tiny).table_files(), *plan(tiny).figure_files(), "results/tiny/report.html"]
    assert not [name for name in outputs if (tiny / name).stat().st_size == 0]
    assert not plan(tiny).missing_logs(tiny / "results/tiny")
    status = {row["route"]: row["status"] for row in rows_of(tiny / "results/tiny/tidy/runs.csv")}
    assert status == {"bf16": "complete", ROUTE: "diverged"}
    assert "Training ended in non-finite numbers: mxfp4_sr (seed 0, step 4)" in (
        tiny / "results/tiny/report.html"
    ).read_text(encoding="utf-8")


@pytest.mark.slow
def test_record_and_markers_say_where_and_what_is_skipped(tiny):
    results = tiny / "results/tiny"
    failure = records.read_json(results / f"runs/{ROUTE}/s0/failure.json")
    jsonschema.validate(failure, recipe.schemas()["run_failure.schema.json"])
    assert (failure["step"], failure["last_good_checkpoint"]) == (4, "step-00000002")
    markers = {path: records.read_json(path) for path in (results / "done").rglob("*.json")}
    noted = {
        path.relative_to(results / "done").as_posix().rpartition("-")[0]: marker["note"]
        for path, marker in markers.items()
        if "note" in marker
    }
    skipped = "training ended in non-finite numbers at step 4; skipped: step 6"
    assert "step 4 gave loss nan" in noted.pop(f"train/{ROUTE}/s0/step-00000006")
    assert {name: note.split(": ", 1)[1] for name, note in noted.items()} == {
        f"validation/{ROUTE}/s0/step-00000006": skipped,
        f"downstream/{ROUTE}/s0": skipped,
        "dgrad": skipped,
    }
    for path, marker in markers.items():
        jsonschema.validate(marker, recipe.schemas()["marker.schema.json"])
        if "note" in marker:
            assert records.sha256_file(path.parent / marker["record"]) == marker["sha256"]


@pytest.mark.slow
def test_tables_leave_the_route_blank(tiny):
    results = tiny / "results/tiny"
    cuts = {(row["route"], row["step"]) for row in rows_of(results / "tidy/validation.csv")}
    assert cuts == {("bf16", "2"), ("bf16", "6"), (ROUTE, "2")}
    assert {row["route"] for row in rows_of(results / "tidy/downstream.csv")} == {"bf16"}
    assert rows_of(results / "tidy/dgrad.csv") == []
    measured = {
        "table07_endpoint_loss": ("loss", "excess"),
        "table09_production": ("window", "tokens_per_s", "memory_gib"),
    }
    for table, columns in measured.items():
        found = {row["route"]: row for row in rows_of(results / f"tables/{table}.csv")}
        assert not any(found[ROUTE][name] for name in columns), found[ROUTE]
        assert found["bf16"][columns[0]]
        assert "diverged" in (results / f"tables/{table}.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_nothing_is_tried_again_but_by_hand(tiny, tmp_path):
    assert "Nothing to be done" in run(tiny, "all").stdout
    shutil.copytree(tiny / "results" / "tiny", tmp_path / "results")
    where = ["--study", str(tiny / "recipes/studies/tiny.yaml"), "--recipes", str(tiny / "recipes")]
    command = [sys.executable, "-m", "fp4core", "train", *where, "--route", ROUTE, "--seed", "0"]
    command += ["--results", str(tmp_path / "results")]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 1
    assert "step 4 gave loss nan" in again.stderr and "Traceback" not in again.stderr


@pytest.mark.slow
def test_copied_logs_redraw_without_the_route(tiny, tmp_path):
    logs = tmp_path / "logs"
    shutil.copytree(
        tiny / "results" / "tiny", logs, ignore=shutil.ignore_patterns("done", "tables", "figures")
    )
    shutil.copytree(tiny / "recipes", tmp_path / "recipes")
    done = run(tmp_path, "all_tables", config=(f"from_logs={logs}",))
    assert done.returncode == 0, done.stdout[-6000:]
    assert set(planned(done.stdout)) == {"collect", "tables", "all_tables"}
