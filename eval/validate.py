"""Validation NLL of every cut of a run on the fixed stream, sequence by sequence.

The weights are scored with BF16 compute (recipe `bf16`), whatever the route trained with: the report's
inference is BF16, and so what differs between routes is what training left in the weights. NLL is in nats
per target token; a sequence's value is the mean over its S targets (FP64 sums of FP32 losses), the stream's
the mean over sequences, its standard error s / sqrt(sequences).

One record a cut, and gate.json for the run: a late checkpoint must beat an early one by more than the
study's number of standard errors (of the difference of two independent means, the wider choice), or the
evaluator or the training is broken and nothing may be compared.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval import job as jobs
from eval import stream
from fp4core import records

if TYPE_CHECKING:
    import numpy as np

SCHEMA = "fp4core.validation"
GATE_SCHEMA = "fp4core.validation_gate"
RECIPE = "bf16"
PROGRESS_SECONDS = 15.0


def sequence_nll(model: Any, rows: np.ndarray, *, batch: int, device: str) -> list[float]:
    """Mean NLL (nats per target) of each row of int64 token ids [sequences, S + 1]."""
    import torch

    values: list[float] = []
    told = time.monotonic()
    with torch.inference_mode():
        for start in range(0, len(rows), batch):
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                print(f"validate: sequence {start} of {len(rows)}", flush=True)
            ids = torch.from_numpy(rows[start : start + batch]).to(device)
            loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            values += loss.double().view(len(ids), -1).mean(dim=1).tolist()
    return values


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error, s / sqrt(n)."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def record_path(job: jobs.Job, step: int) -> Path:
    """Where the record of one cut stands."""
    return job.results / "validation" / job.place / f"step-{step:08d}.json"


def run(job: jobs.Job, steps: list[int]) -> list[Path]:
    """Score the cuts in `steps`; up-to-date records are kept. Returns the records' paths."""
    manifest, found = job.manifest(), stream.validation(job)
    stage_hash = job.study.stage_hash("validation")
    done = []
    for number, step in enumerate(steps, start=1):
        checkpoint, out = job.checkpoint(step), record_path(job, step)
        inputs = {
            "checkpoint_sha256": checkpoint.sha256,
            "stream_sha256": found.sha256,
            "stream_file_sha256": found.file_sha256,
        }
        records.archive_stale(out, job.results, recipe_hash=job.recipe.hash, stage_hash=stage_hash)
        if not (out.is_file() and records.read_json(out)["inputs"] == inputs):
            record = _score(job, manifest, checkpoint, found, inputs)
            records.write_json(out, record)
            print(
                f"validate: {job.route} seed {job.seed} step {step} ({number} of {len(steps)}): "
                f"NLL {record['nll']:.4f} ± {record['se']:.4f}, {record['seconds']:.1f} s",
                flush=True,
            )
        done.append(out)
    return done


def _score(
    job: jobs.Job,
    manifest: dict[str, Any],
    checkpoint: jobs.Checkpoint,
    found: stream.Stream,
    inputs: dict[str, str],
) -> dict[str, Any]:
    from fp4core.model import build_model
    from fp4core.recipe import load_recipe

    started = time.perf_counter()
    device, described = jobs.pick_device(job.study)
    config, state = checkpoint.weights()
    model = build_model(config, load_recipe(RECIPE), device, seed=None)
    model.load_state_dict(state)
    model.eval()
    values = sequence_nll(model, found.rows, batch=job.study.validation.batch, device=device)
    bad = [i for i, value in enumerate(values) if not math.isfinite(value)]
    mean, error = (None, None) if bad else mean_and_error(values)
    head = job.envelope(
        SCHEMA, "validation", device=described, backend=manifest.get("backend", ""), inputs=inputs
    )
    return {
        **head,
        "step": checkpoint.step,
        "scored_with": RECIPE,
        "nll": mean,
        "se": error,
        "sequences": len(values),
        "tokens": len(values) * (found.rows.shape[1] - 1),
        "non_finite_sequences": bad,
        "sequence_nll": [None if i in bad else value for i, value in enumerate(values)],
        "batch": job.study.validation.batch,
        "seconds": time.perf_counter() - started,
    }


def gate(early: dict[str, Any], late: dict[str, Any], sigmas: float) -> dict[str, Any]:
    """Late beats early by more than `sigmas` standard errors? Pure function of two cut records."""
    if early["nll"] is None or late["nll"] is None:
        return {"passed": False, "reason": "a checkpoint has a non-finite loss", "sigmas": sigmas}
    gain = early["nll"] - late["nll"]
    error = math.hypot(early["se"], late["se"])
    pairs = [a - b for a, b in zip(early["sequence_nll"], late["sequence_nll"])]
    return {
        "passed": gain > sigmas * error,
        "sigmas": sigmas,
        "early_step": early["step"],
        "late_step": late["step"],
        "gain": gain,
        "se": error,
        "paired_se": mean_and_error(pairs)[1],
    }


def write_gate(job: jobs.Job, paths: list[Path]) -> Path | None:
    """gate.json from the first and last cut once both are scored; None with a single cut."""
    have = [path for path in paths if path.is_file()]
    if len(have) < 2:
        return None
    early, late = records.read_json(have[0]), records.read_json(have[-1])
    out = have[0].with_name("gate.json")
    inputs = {path.stem: records.sha256_file(path) for path in (have[0], have[-1])}
    head = job.envelope(
        GATE_SCHEMA, "validation", device=late["device"], backend=late["backend"], inputs=inputs
    )
    result = gate(early, late, job.study.validation.gate_standard_errors)
    records.archive_stale(out, job.results, recipe_hash=job.recipe.hash, stage_hash=head["stage_hash"])
    records.write_json(out, {**head, **result})
    verdict = "passes" if result["passed"] else "FAILS"
    print(f"validate: {job.route} seed {job.seed} {verdict} late-beats-early", flush=True)
    return out


def main(arguments: list[str]) -> None:
    """python -m eval validate --study S --route R --seed N --results DIR [--steps a,b] --done MARK"""
    parser = argparse.ArgumentParser(prog="python -m eval validate", description="NLL of a run's checkpoints")
    jobs.add_arguments(parser)
    parser.add_argument("--steps", help="cuts to score, comma-separated (default: all of the study)")
    parsed = parser.parse_args(arguments)
    job = jobs.from_arguments(parsed)
    cuts = list(job.study.all_cuts)
    steps = cuts
    if parsed.steps:
        steps = jobs.parse_steps(parsed.steps, cuts)
    job.manifest()
    steps, note = job.reached(steps)
    if not steps and not parsed.done:
        raise ValueError(note)
    if note:
        print(f"validate: {note}", flush=True)
    done = run(job, steps)
    write_gate(job, [record_path(job, step) for step in job.reached(cuts)[0]])
    if parsed.done:
        record = done[-1] if done else job.run_dir / "failure.json"
        stage_hash = job.study.stage_hash("validation")
        records.write_marker(
            parsed.done, record, recipe_hash=job.recipe.hash, stage_hash=stage_hash, note=note
        )
