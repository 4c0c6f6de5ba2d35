"""collect: tables from logs alone, or one error that lists everything that is wrong with the logs."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval import collect, tidy, validate
from eval.__main__ import main
from eval.logs import Logs
from fp4core import recipe as recipes
from fp4core import records

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = sorted((ROOT / "schemas" / "tidy").glob("*.schema.json"))


def head(project, schema: str, stage: str, route: str | None = None) -> dict:
    return {
        **records.envelope(
            f"fp4core.{schema}",
            study="tiny",
            route=route,
            seed=3 if route else None,
            recipe_hash=project.recipe(route).hash if route else None,
            stage_hash=project.study.stage_hash(stage),
            device={"name": "a CPU", "kind": "cpu"},
            backend="reference",
            inputs={},
        ),
        "commit": "0" * 40,
        "dirty": False,
        "date_utc": "2026-01-02T03:04:05Z",
    }


def _probe(project, route):
    row = {
        "same_measurement": False,
        "tokens_per_s": 1234.5678901234567,
        "p10": 1200.0,
        "p90": 1300.0,
        "mfu_percent": None,
        "memory_gib": 0.25,
        "world_size": 1,
        "local_batch": 2,
        "accumulation": 1,
        "activation_checkpoint": "none",
        "window_first": 2,
        "window_last": 4,
        "step_seconds": [0.1] * 4,
    }
    record = head(project, "probe", "probe", route) | {"measurements": [{"geometry": "selected", **row}]}
    records.write_json(project.results / f"probes/{route}/s3.json", record)


def _downstream(project, route):
    path = project.results / f"downstream/{route}/s3.items.parquet"
    items = [
        {"route": route, "seed": 3, "task": "winogrande", "item": str(i), "metric": "acc", "correct": i % 2}
        | {"truncated": False, "loglikelihoods": [0.0, 1.0], "target": 0}
        for i in range(4)
    ]
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(items), path)
    row = {"task": "winogrande", "metric": "acc", "value": 0.5, "se": 0.28, "n": 4, "shots": 5}
    record = head(project, "downstream", "downstream", route) | {
        "step": 20,
        "settings": {"batch_size": 8},
        "task_hashes": {"winogrande": "f" * 64},
        "evaluation_files": {"a": "0" * 64},
        "selection": {"winogrande": {"scored": 4, "available": 1267}},
        "gate": {"passed": True},
        "tasks": [{**row, "truncated": 0, "chance": 0.5}],
        "items_sha256": records.sha256_file(path),
    }
    record["inputs"] = {
        "checkpoint_sha256": project.job(route).checkpoint(20).sha256,
        "gate_sha256": "0" * 64,
    }
    records.write_json(path.with_name("s3.json"), record)


def _head_screen(project):
    row = {"forward": "BF16", "hidden_gradient": "BF16", "weight_gradient": "BF16", "tokens_per_s": 9.0}
    row |= {"final_loss": 5.0, "loss_difference": 0.0, "grad_relative_difference": 0.0, "losses": [5.0]}
    variants = [{"variant": name, **row} for name in ("bf16", "lowp", "lowp_mxfp8_wgrad")]
    record = head(project, "output_head", "output_head", "mxfp4_sr") | {"variants": variants}
    records.write_json(project.results / "output_head/s3.json", record)


def _boundary(project):
    row = {"route": "bf16", "boundary": "norm to qkv", "schedule": "serial", "device": "a CPU", "tokens": 64}
    stages = ("reduce", "quantise", "layout", "gemm")
    rows = [{**row, "stage": stage, "milliseconds": 1.5, "backend": "reference"} for stage in stages]
    record = head(project, "boundary", "boundary") | {"rows": rows}
    records.write_json(project.results / "boundary/budget.json", record)


@pytest.fixture(scope="module")
def complete(pristine, tmp_path_factory):
    """Every record of the tiny study. Not to be changed: take `logs`."""
    project = pristine.copy(tmp_path_factory.mktemp("collect") / "results")
    for route in ("bf16", "mxfp4_sr"):
        assert main(["validate", *project.cli(route)]) == 0
        _probe(project, route)
        _downstream(project, route)
    assert main(["dgrad", *project.cli(route=None)]) == 0
    assert main(["traces", "--out", str(project.results / "traces")]) == 0
    _head_screen(project)
    _boundary(project)
    return project


@pytest.fixture
def logs(complete, tmp_path):
    return complete.copy(tmp_path / "results")


def run(project, out: Path | None = None) -> int:
    out = out or project.results / "tidy"
    where = ["--recipes", str(project.recipes_dir), "--logs", str(project.results), "--out", str(out)]
    return main(["collect", "--study", "tiny", *where])


def rows_of(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def typed(row: dict, schema: dict) -> dict:
    """A CSV row with the types its schema asks for."""
    found = {}
    for name, value in row.items():
        kinds = schema["properties"][name]["type"]
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if value in ("", None):
            found[name] = None
        elif "integer" in kinds:
            found[name] = int(value)
        elif "number" in kinds:
            found[name] = float(value)
        elif "boolean" in kinds:
            found[name] = {"true": True, "false": False}.get(value, value)
        else:
            found[name] = value
    return found


@pytest.fixture(scope="module")
def tables(complete, tmp_path_factory):
    out = tmp_path_factory.mktemp("tidy") / "tidy"
    assert run(complete, out) == 0
    return out


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda p: p.name.removesuffix(".schema.json"))
def test_every_table_satisfies_its_schema(tables, path):
    schema = json.loads(path.read_text())
    validator = jsonschema.Draft202012Validator(schema)
    rows = rows_of(tables / schema["x-file"])
    assert rows
    for row in rows[:: max(1, len(rows) // 100)]:
        validator.validate(row if schema["x-file"].endswith("parquet") else typed(row, schema))
    keys = [tuple(row[column] for column in schema["x-key"]) for row in rows]
    assert len(set(keys)) == len(keys)


def test_nothing_else_is_written(tables):
    assert {p.name for p in tables.iterdir()} == {json.loads(p.read_text())["x-file"] for p in SCHEMAS}


def test_numbers_keep_every_digit(tables):
    assert {row["tokens_per_s"] for row in rows_of(tables / "throughput.csv")} == {"1234.5678901234567"}


def test_values_are_those_of_the_records(complete, tables):
    for row in rows_of(tables / "validation.csv"):
        record = records.read_json(validate.record_path(complete.job(row["route"]), int(row["step"])))
        assert (float(row["nll"]), float(row["se"])) == (record["nll"], record["se"])
    assert [row["loss"] for row in rows_of(tables / "endpoint.csv")] == ["4.0", "4.0"]


def test_unmeasured_values_are_blank(tables):
    assert {row["mfu"] for row in rows_of(tables / "throughput.csv")} == {""}
    assert {row["report_value"] for row in rows_of(tables / "training.csv")} == {""}  # no report study there


def test_production_is_the_median_of_the_last_quarter(tables):
    for row in rows_of(tables / "production.csv"):
        assert (row["window_first"], row["window_last"], row["tokens_per_s"]) == ("16", "20", "1018.0")


def test_meta_says_what_was_run(tables):
    meta = {row["key"]: row["value"] for row in rows_of(tables / "meta.csv")}
    assert meta["study"] == "tiny"
    assert meta["seeds"] == "3"
    assert meta["device"] == "a CPU"
    assert meta["date"] > "2026-01-02"
    assert meta["validation_gate"] == "passed"
    assert meta["note_downstream"].endswith("(winogrande: 4 of 1,267 questions).")
    assert meta["version_torch"]


def test_groups_of_a_recipe_are_in_the_studys_depth(complete):
    hybrid = recipes.load_recipe("depth_hybrid_27_5")
    rows = tidy.operands(Logs(complete.results, complete.study, {"x": hybrid}, hybrid))
    assert {(row["first_block"], row["last_block"], row["depth"]) for row in rows} == {(1, 1, 2), (2, 2, 2)}


def test_a_linear_that_differs_is_told_in_its_operand(complete):
    """ue5m3 sets another scale target for one operand of the last down projections."""
    route = recipes.load_recipe("ue5m3")
    rows = tidy.operands(Logs(complete.results, complete.study, {"x": route}, route))
    told = {
        (r["first_block"], r["contraction"], r["operand"]): r["exception"] for r in rows if r["exception"]
    }
    assert told == {(2, "wgrad", "dy"): "down: scale target 2048"}


def test_logs_copied_elsewhere_give_the_same_bytes(complete, tables, tmp_path):
    other = complete.copy(tmp_path / "far" / "away")
    shutil.rmtree(other.results / "runs/bf16/s3/checkpoints")  # too large to copy, and not needed
    assert run(other, tmp_path / "tidy") == 0
    for path in tables.iterdir():
        assert (tmp_path / "tidy" / path.name).read_bytes() == path.read_bytes(), path.name


def test_failed_gate_keeps_other_routes_out_of_validation(logs):
    for route in ("bf16", "mxfp4_sr"):
        early, late = (validate.record_path(logs.job(route), step) for step in (10, 20))
        best, worst = records.read_json(late), records.read_json(early)
        for key in ("nll", "se", "sequence_nll"):
            best[key], worst[key] = worst[key], best[key]
        records.write_json(late, best)
        records.write_json(early, worst)
    assert run(logs) == 0
    assert {row["route"] for row in rows_of(logs.results / "tidy/validation.csv")} == {"bf16"}
    meta = {row["key"]: row["value"] for row in rows_of(logs.results / "tidy/meta.csv")}
    assert meta["validation_gate"] == "failed"
    assert "not compared" in meta["note_validation"]


def diverge(run_dir: Path, step: int) -> None:
    """Turn the complete run into one that ended at `step`."""
    head = records.read_json(run_dir / "summary.json")
    (run_dir / "summary.json").unlink()
    schema = {"name": "fp4core.failure", "version": 1}
    records.write_json(run_dir / "failure.json", {**head, "schema": schema, "step": step, "loss": "nan"})


def test_diverged_run_is_a_result(logs):
    run_dir = logs.job("mxfp4_sr").run_dir
    diverge(run_dir, step=15)
    for path in ("validation/mxfp4_sr/s3/step-00000020.json", "downstream/mxfp4_sr/s3.json"):
        (logs.results / path).unlink()
    assert run(logs) == 0
    status = {row["route"]: row["status"] for row in rows_of(logs.results / "tidy/runs.csv")}
    assert status == {"bf16": "complete", "mxfp4_sr": "diverged"}
    cuts = {(r["route"], r["step"]) for r in rows_of(logs.results / "tidy/validation.csv")}
    assert ("mxfp4_sr", "10") in cuts and ("mxfp4_sr", "20") not in cuts
    meta = {row["key"]: row["value"] for row in rows_of(logs.results / "tidy/meta.csv")}
    assert "mxfp4_sr (seed 3, step 15)" in meta["note_diverged"]


def test_diagnostic_of_a_diverged_route_is_empty_not_missing(logs):
    """Here even the reference diverged: no score, no diagnostic, and tables all the same."""
    diverge(logs.job("bf16").run_dir, step=15)
    for path in ("validation/bf16/s3/step-00000020.json", "downstream/bf16/s3.json", "dgrad/s3.json"):
        (logs.results / path).unlink()
    assert run(logs) == 0
    assert rows_of(logs.results / "tidy/dgrad.csv") == []
    meta = {row["key"]: row["value"] for row in rows_of(logs.results / "tidy/meta.csv")}
    assert meta["note_dgrad"] == "The Dgrad diagnostic was not made: bf16 diverged before step 20."


def test_failure_of_another_recipe_is_no_result(logs, capsys):
    run_dir = logs.job("mxfp4_sr").run_dir
    diverge(run_dir, step=15)
    change(run_dir / "failure.json", recipe_hash="0123456789ab")
    assert run(logs) == 2
    assert "failure.json: recipe_hash 0123456789ab, now " in capsys.readouterr().err


def change(path: Path, **fields) -> None:
    records.write_json(path, records.read_json(path) | fields)


def change_input(path: Path, **fields) -> None:
    record = records.read_json(path)
    records.write_json(path, record | {"inputs": record["inputs"] | fields})


# what is done to a file of the logs, and what the error must say
SPOILED = {
    "missing record": (
        "probes/bf16/s3.json",
        Path.unlink,
        "probes/bf16/s3.json: missing",
    ),
    "broken JSON": (
        "dgrad/s3.json",
        lambda p: p.write_text("{"),
        "dgrad/s3.json: not valid JSON",
    ),
    "other recipe": (
        "validation/mxfp4_sr/s3/step-00000010.json",
        lambda p: change(p, recipe_hash="0123456789ab"),
        "recipe_hash 0123456789ab, now ",
    ),
    "other settings": (
        "output_head/s3.json",
        lambda p: change(p, stage_hash="0123456789ab"),
        "output_head/s3.json: stage_hash 0123456789ab, now ",
    ),
    "other study": (
        "boundary/budget.json",
        lambda p: change(p, study="report"),
        "boundary/budget.json: study report, now tiny",
    ),
    "other schema": (
        "downstream/bf16/s3.json",
        lambda p: change(p, schema={"name": "x", "version": 1}),
        "needed fp4core.downstream version 1",
    ),
    "other stream": (
        "validation/bf16/s3/step-00000010.json",
        lambda p: change_input(p, stream_sha256="0" * 64),
        "scored on another stream",
    ),
    "other checkpoint": (
        "validation/bf16/s3/step-00000020.json",
        lambda p: change_input(p, checkpoint_sha256="0" * 64),
        "scored another checkpoint than runs/bf16/s3 holds at step 20",
    ),
    "edited metrics": (
        "runs/bf16/s3/metrics.parquet",
        lambda p: p.write_bytes(p.read_bytes() + b"x"),
        "metrics.parquet: not the file that summary.json describes",
    ),
    "edited items": (
        "downstream/bf16/s3.items.parquet",
        lambda p: p.write_bytes(p.read_bytes() + b"x"),
        "s3.items.parquet: not the file",
    ),
    "edited trace": (
        "traces/weight_2d.csv",
        lambda p: p.write_text("x"),
        "traces/weight_2d.csv: missing or not the file",
    ),
    "unfinished run": (
        "runs/mxfp4_sr/s3/summary.json",
        Path.unlink,
        "runs/mxfp4_sr/s3: incomplete, the run has no summary.json",
    ),
    "no gate": (
        "downstream/mxfp4_sr/s3.json",
        lambda p: change(p, gate={"passed": False}),
        "scored without a passed export gate",
    ),
    "other prompts": (
        "downstream/mxfp4_sr/s3.json",
        lambda p: change(p, task_hashes={"winogrande": "0" * 64}),
        "downstream/mxfp4_sr/s3.json: task_hashes differ from those of bf16/s3",
    ),
    "other data": (
        "runs/bf16/s3/manifest.json",
        lambda p: change(p, data_sha256="0" * 64),
        "runs/bf16/s3: trained on other data",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_wrong_log_is_named_and_no_table_is_written(logs, name, capsys):
    file, spoil, message = SPOILED[name]
    spoil(logs.results / file)
    assert run(logs) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error
    assert not (logs.results / "tidy").exists()


def test_all_problems_are_in_one_error(logs, capsys):
    for file in ("probes/bf16/s3.json", "dgrad/s3.json", "traces/traces.json", "boundary/budget.json"):
        (logs.results / file).unlink()
    assert run(logs) == 2
    error = capsys.readouterr().err
    assert "4 problems, no table was written" in error
    assert len(error.strip().splitlines()) == 5


def test_old_tables_survive_a_failure(logs):
    assert run(logs) == 0
    before = (logs.results / "tidy/meta.csv").read_bytes()
    (logs.results / "dgrad/s3.json").unlink()
    assert run(logs) == 2
    assert (logs.results / "tidy/meta.csv").read_bytes() == before


def test_exchange_of_directories_leaves_nothing_behind(tmp_path):
    out = tmp_path / "tidy"
    for content in (b"one", b"two"):
        collect.write({"a.csv": content}, out)
    assert (out / "a.csv").read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["tidy"]


def test_results_that_are_not_there(pristine, tmp_path, capsys):
    from dataclasses import replace

    assert run(replace(pristine, results=tmp_path / "nowhere"), tmp_path / "tidy") == 2
    assert "nowhere: no such results directory" in capsys.readouterr().err
