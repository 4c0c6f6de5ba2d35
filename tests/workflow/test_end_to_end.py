"""A new route is one new YAML file: from text to every table and figure, with the real commands."""

from __future__ import annotations

import json
import shutil

import jsonschema
import pyarrow.parquet
import pytest
import yaml

from fp4core import recipe
from tests.workflow.pipeline import ROOT, planned, snakemake

NEW = """
version: 1
route: mxfp4_twelfth
label: "The twelfth"
groups:
  - layers: [1, 16]
    fprop:
      x: {format: mxfp4}
      w: {format: mxfp4_w2d}
    dgrad:
      dy: {format: nvfp4_cta, rounding: stochastic}
      w: {format: nvfp4_cta_w2d}
    wgrad:
      dy: {format: mxfp4_even, hadamard: plain16}
      x: {format: mxfp4, hadamard: plain16}
  - layers: [17, 32]
    fprop:
      x: {format: nvfp4}
      w: {format: nvfp4_w2d}
    dgrad:
      dy: {format: ue5m3, rounding: stochastic}
      w: {format: bf16}
    wgrad:
      dy: {format: bf16}
      x: {format: nvfp4_te}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a study of seconds, the control and the new route, run to the end."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("routes", "studies"):
        (folder / "recipes" / name).mkdir(parents=True)
    shutil.copy(ROOT / "recipes" / "routes" / "bf16.yaml", folder / "recipes" / "routes")
    (folder / "recipes" / "routes" / "mxfp4_twelfth.yaml").write_text(NEW, encoding="utf-8")
    data = recipe.to_dict(recipe.load_study("smoke"))
    data.update(study="tiny", description="of a test")
    data["model"].update(blocks=2, hidden=64, ffn=128, heads=2, kv_heads=1, head_dim=32, vocab=512)
    data["train"].update(sequence=64, global_batch=2, local_batch=2, steps=4, cuts=[2, 4], warmup=1)
    data["train"].update(endpoint_step=4, log_every=1, checkpoint_every=2)
    data["probe"] = {"steps": 3, "window": [2, 3]}
    data["validation"].update(sequences=4, batch=4)
    data["downstream"] = {
        "step": 4,
        "max_length": 1024,
        "tasks": {t: {"limit": 4} for t in ("hellaswag", "winogrande")},
    }
    data["dgrad"] = {"route": "mxfp4_twelfth", "step": 4, "batches": 1, "sequence": 64}
    data["output_head"] = {"route": "mxfp4_twelfth", "steps": 3, "window": [2, 3]}
    data["boundary"] = {"tokens": 64, "repeats": 1, "warmup": 0}
    (folder / "recipes" / "studies" / "tiny.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    done = run(folder, "all")
    assert done.returncode == 0, done.stdout[-6000:]
    return folder


def run(folder, *arguments: str, config: tuple[str, ...] = ()):
    return snakemake(
        *("--profile", "local", "-s", ROOT / "Snakefile", "--directory", folder, "--cores", "2"),
        *("--quiet", "rules", "--config", f"recipes={folder / 'recipes'}", "study=tiny", *config, "--"),
        *arguments,
        timeout=600,
    )


@pytest.mark.slow
def test_new_route_reaches_every_output(tiny):
    results = tiny / "results" / "tiny"
    plan = recipe.make_plan(
        {"study": str(tiny / "recipes/studies/tiny.yaml"), "recipes": str(tiny / "recipes")}
    )[1]
    wanted = [*plan.table_files(), *plan.figure_files(), "results/tiny/report.html"]
    empty = [name for name in wanted if (tiny / name).stat().st_size == 0]
    assert not empty
    assert not plan.missing_logs(results)
    assert (results / "runs" / "mxfp4_twelfth" / "s0" / "summary.json").is_file()
    for table in ("table04_recipe_ledger", "table07_endpoint_loss", "table08_downstream"):
        assert "The twelfth" in (results / "tables" / f"{table}.csv").read_text(encoding="utf-8")
    assert "The twelfth" in (results / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_records_follow_their_schemas(tiny):
    results = tiny / "results" / "tiny"
    schemas = recipe.schemas()

    def check(name: str, record: dict) -> None:
        errors = jsonschema.Draft202012Validator(schemas[f"{name}.schema.json"]).iter_errors(record)
        assert [f"{error.json_path}: {error.message}" for error in errors] == []

    for run in sorted((results / "runs").glob("*/s0")):
        check("run_manifest", json.loads((run / "manifest.json").read_text(encoding="utf-8")))
        check("run_summary", json.loads((run / "summary.json").read_text(encoding="utf-8")))
        for row in pyarrow.parquet.read_table(run / "metrics.parquet").to_pylist():
            check("metrics", row)
    markers = sorted((results / "done").rglob("*.json"))
    assert len(markers) > 10
    for marker in markers:
        check("marker", json.loads(marker.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_second_run_does_nothing(tiny):
    done = run(tiny, "all")
    assert "Nothing to be done" in done.stdout, done.stdout


@pytest.mark.slow
def test_copied_logs_redraw_everything_and_run_nothing(tiny, tmp_path):
    logs = tmp_path / "logs"
    kept = (
        "data",
        "runs",
        "probes",
        "validation",
        "downstream",
        "export",
        "dgrad",
        "output_head",
        "boundary",
        "traces",
    )
    for name in kept:
        shutil.copytree(tiny / "results" / "tiny" / name, logs / name, copy_function=shutil.copy)
    shutil.copytree(tiny / "recipes", tmp_path / "recipes")
    done = run(tmp_path, "all", config=(f"from_logs={logs}",))
    assert done.returncode == 0, done.stdout[-6000:]
    assert set(planned(done.stdout)) == {"collect", "tables", "plots", "html", "all"}
    assert (tmp_path / "results" / "tiny" / "report.html").is_file()
