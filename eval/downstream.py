"""Benchmark scores of one run: export, gate, lm-eval, one record and every item's result.

Nothing is scored without the gate's record, and the rotation frequencies of the model that lm-eval loaded
must hash to the gate's. The record names every byte and setting a score depends on; lm-eval's own results
name none of them.
"""

from __future__ import annotations

import argparse
import io
import time
from pathlib import Path
from typing import Any

from eval import benchmarks, export, lm_tasks, score
from eval import job as jobs
from fp4core import records
from fp4core.recipe import load_inputs, verify_binding

SCHEMA = "fp4core.downstream"
SEED = 1234  # of the choice of a subset, of held-out shots and of lm-eval's draw of shots
DTYPE = "bfloat16"
# of the gate's record, repeated here so that a score's own record proves that it was gated
GATE_FIELDS = ("passed", "inv_freq_sha256", "probe", "exported_error", "exported_bound", "native_error")


def select(study: jobs.recipes.Study, inputs: Path) -> dict[str, benchmarks.Selection]:
    """The study's items and shots: from the package, or from the evaluation data that `inputs` binds.

    ValueError when the study's data are bound ones and the evaluation data are not.
    """
    directory, hashes = None, {}
    if study.data.source == "bound":
        binding = load_inputs(inputs).evaluation if inputs.is_file() else None
        if binding is None:
            raise ValueError(
                f"study {study.study} needs evaluation data, {inputs} binds none; fp4core bind evaluation DIR"
            )
        bound = verify_binding("evaluation", inputs)
        directory, hashes = bound.directory, bound.sha256
    chosen = {}
    for name in benchmarks.BENCHMARKS:  # a fixed order: it decides which items share a batch
        if name in study.downstream.tasks:
            task = study.downstream.tasks[name]
            source = benchmarks.load(name, directory, hashes)
            chosen[name] = benchmarks.select(source, shots=task.shots, limit=task.limit, seed=SEED)
    return chosen


def run(job: jobs.Job, *, inputs_file: Path = Path("inputs.yaml")) -> Path:
    """Export, gate and score; returns the record's path. An up-to-date record is kept."""
    started = time.perf_counter()
    results, study = job.results, job.study
    out = results / "downstream" / f"{job.place}.json"
    lm_tasks.go_offline(results / "cache" / "huggingface")
    chosen = select(study, inputs_file)
    directory = results / "export" / job.place
    gate = export.run(job, study.downstream.step, directory)
    gate_sha256 = records.sha256_file(directory / "gate.json")
    files = {name: digest for one in chosen.values() for name, digest in one.source.files.items()}
    inputs = {
        "checkpoint_sha256": gate["inputs"]["checkpoint_sha256"],
        "tokenizer_sha256": gate["inputs"]["tokenizer_sha256"],
        "gate_sha256": gate_sha256,
        "evaluation_sha256": records.tree_sha256(files),
    }
    stage_hash = study.stage_hash("downstream")
    path = out.with_suffix(".items.parquet")
    records.archive_stale(out, results, recipe_hash=job.recipe.hash, stage_hash=stage_hash, beside=(path,))
    if out.is_file() and records.read_json(out)["inputs"] == inputs:
        print(f"downstream: {job.route} seed {job.seed} is up to date", flush=True)
        return out
    record, items = _score(job, chosen, directory, gate)
    records.write_atomic(path, _parquet(job, items))
    record = {
        **job.envelope(
            SCHEMA, "downstream", device=record.pop("device"), backend=gate["backend"], inputs=inputs
        ),
        **record,
        "gate": {key: gate[key] for key in GATE_FIELDS},
        "evaluation_files": files,
        "items_sha256": records.sha256_file(path),
        "seconds": time.perf_counter() - started,
    }
    records.write_json(out, record)
    return out


def _score(
    job: jobs.Job, chosen: dict[str, benchmarks.Selection], directory: Path, gate: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    config = job.study.downstream
    max_length = config.max_length or job.study.train.sequence
    device, described = jobs.pick_device(job.study)
    settings = {
        "dtype": DTYPE,
        "softmax_dtype": "float32",
        "batch_size": config.batch,
        "max_length": max_length,
        "seed": SEED,
        "logits_cache": False,
        "begin_of_text": "as the tokenizer does",
    }
    scores = score.score(
        directory,
        chosen,
        batch_size=config.batch,
        max_length=max_length,
        seed=SEED,
        device=device,
        dtype=DTYPE,
    )
    expected = gate["inv_freq_sha256"]["training"]
    if scores.inv_freq_sha256 != expected:
        raise ValueError(
            f"{directory}: the model that lm-eval loaded rotates with frequencies {scores.inv_freq_sha256}, "
            f"training's are {expected}; its scores would be void"
        )
    for row in scores.tasks:
        print(
            f"downstream: {job.route} seed {job.seed} {row['task']} {row['metric']} {row['value']:.4f} "
            f"(n {row['n']}, {row['shots']} shots, {row['truncated']} truncated, chance {row['chance']:.3f})",
            flush=True,
        )
    return {
        "device": described,
        "step": config.step,
        "settings": settings,
        "sources": {name: one.source.origin for name, one in chosen.items()},
        "selection": {
            name: {
                "scored": one.size,
                "available": len(one.source.splits[one.source.benchmark.scored_split]),
                "split": one.source.benchmark.scored_split,
                "pool": one.pool_name,
                "pool_rows": sum(map(len, one.pool.values())),
                "pool_rows_removed": one.removed,
                "same_question_in_shots": one.near,
            }
            for name, one in chosen.items()
        },
        "task_hashes": scores.task_hashes,
        "tasks": scores.tasks,
    }, scores.items


def _parquet(job: jobs.Job, items: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"route": job.route, "seed": job.seed, **row} for row in items]
    sink = io.BytesIO()
    metadata = {"recipe_hash": job.recipe.hash, "stage_hash": job.study.stage_hash("downstream")}
    pq.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), sink)
    return sink.getvalue()


def main(arguments: list[str]) -> None:
    """python -m eval downstream --study S --route R --seed N --results DIR --done MARK"""
    parser = argparse.ArgumentParser(
        prog="python -m eval downstream", description="lm-eval on a run's checkpoint"
    )
    jobs.add_arguments(parser)
    parser.add_argument("--inputs", type=Path, default=Path("inputs.yaml"), help="bindings of local files")
    parsed = parser.parse_args(arguments)
    job = jobs.from_arguments(parsed)
    if job.skip(job.study.downstream.step, parsed.done, "downstream"):
        return
    out = run(job, inputs_file=parsed.inputs)
    if parsed.done:
        stage_hash = job.study.stage_hash("downstream")
        records.write_marker(parsed.done, out, recipe_hash=job.recipe.hash, stage_hash=stage_hash)
