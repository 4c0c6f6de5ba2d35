"""The trainer on whole GPUs: Llama-3.1 8B at 8192 tokens, routes against BF16, two GPUs against one.

    python -m fp4core.bench scale --out FILE [--jobs JOB ...] [--steps 12] [--max-seconds 420]

A job is ``ROUTE[:KEY=VALUE...]`` with the fields of ``scale_job.Job`` as keys, for example
``mxfp4_sr:gpus=1:blocks=24:accumulation=2``. Each job is a world of its own processes: one that fails or
runs out of memory takes nothing else with it, and the record is rewritten after every job. Jobs that
``--max-seconds`` leaves no time for are listed as skipped; a job that runs out of memory is made once more
with full recomputation, unless ``--as-given``. Rates are medians over the steps from
``window`` on, of the slowest rank; compilation and warm-up lie before. This process never touches a GPU.

The summary compares each job with the BF16 job of equal geometry, each route's fastest geometry with BF16's,
and each job on several GPUs with the same per-GPU geometry on one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fp4core.bench import common
from fp4core.bench.scale_job import Job
from fp4core.records import code_identity, package_versions, read_json, utc_now, write_json

ROUTES = ("bf16", "mxfp4_sr", "mxfp4_sr_h32", "nvfp4_cta")
SCALING = ("mxfp4_sr:gpus=1:blocks=20:steps=8", "mxfp4_sr:gpus=2:blocks=20:steps=8")
_GRACE = 6.0  # seconds that a rank gets to end after its peer has
_START = 45.0  # seconds before the first step that counts, below which no job is begun


def parse_job(text: str, defaults: dict[str, Any]) -> Job:
    """The Job of `ROUTE[:KEY=VALUE...]`. ValueError names an unknown key or a wrong value."""
    route, *settings = text.split(":")
    kinds = {field.name: field.type for field in dataclasses.fields(Job)}
    values = dict(defaults)
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in kinds or not value:
            raise ValueError(
                f"job {text!r}: got {setting!r}, needed KEY=VALUE with one of {', '.join(kinds)}"
            )
        try:
            values[key] = {"int": int, "float": float, "bool": _boolean, "str": str}[kinds[key]](value)
        except ValueError:
            raise ValueError(f"job {text!r}: {key} got {value!r}, needed {kinds[key]}") from None
    return Job(route, **values)


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def start(job: Job, out: Path, deadline: float) -> list[subprocess.Popen[bytes]]:
    """One process per rank, as torchrun would start them; each leads a process group of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": str(job.gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # memory only: blocks of unequal size would otherwise fragment a nearly full device
    memory = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
    command = [sys.executable, "-m", "fp4core.bench.scale_job", json.dumps(dataclasses.asdict(job)), str(out)]
    return [
        subprocess.Popen(
            [*command, str(deadline)],
            env={**memory, **os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(job.gpus)
    ]


def wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """Wait for all ranks; when one fails or time is up, end the others. What went wrong, or None."""
    problem, until = None, deadline
    while any(p.poll() is None for p in processes):
        failed = [rank for rank, p in enumerate(processes) if p.poll() not in (None, 0)]
        if failed and problem is None:
            problem = f"rank {failed[0]} ended with code {processes[failed[0]].returncode}"
            until = min(until, time.time() + _GRACE)
        if time.time() > until:
            problem = problem or "time limit"
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        time.sleep(0.1)
    codes = [p.returncode for p in processes]
    return problem or (None if not any(codes) else f"exit codes {codes}")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios to BF16 at equal geometry and at each route's fastest, and of several GPUs to one.

    `selected`: each route's fastest geometry against BF16's fastest where that is another one, at equal
    tokens per step, depth and GPUs. `scaling`: at equal geometry per GPU. Of jobs that made all their steps.
    """
    whole = [row for row in rows if row.get("done") and row.get("tokens_per_s")]
    done = [(Job(**row["job"]), row["tokens_per_s"]) for row in whole]
    rates = {(job.route, job.geometry()): rate for job, rate in done}
    ratios, scaling = [], []
    for job, rate in done:
        base = rates.get(("bf16", job.geometry()))
        if base and job.route != "bf16":
            ratios.append({"job": job.title, "against_bf16": rate / base})
        one = rates.get((job.route, dataclasses.replace(job, gpus=1).geometry()))
        if one and job.gpus > 1:
            scaling.append({"job": job.title, "gpus": job.gpus, "against_one": rate / one})
    return {"routes": ratios, "selected": _selected(done), "scaling": scaling}


def _selected(done: list[tuple[Job, float]]) -> list[dict[str, Any]]:
    fastest: dict[tuple[str, tuple[Any, ...]], tuple[float, Job]] = {}
    for job, rate in done:
        place = (job.route, job.experiment())
        if place not in fastest or rate > fastest[place][0]:
            fastest[place] = (rate, job)
    found = []
    for (route, experiment), (rate, job) in fastest.items():
        base = fastest.get(("bf16", experiment))
        if base and route != "bf16" and job.geometry() != base[1].geometry():
            found.append({"job": job.title, "base": base[1].title, "against_bf16": rate / base[0]})
    return found


def main(argv: list[str]) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m fp4core.bench scale", description=__doc__)
    parser.add_argument(
        "--jobs", nargs="+", metavar="JOB", help="default: four routes, then one GPU against two"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--max-seconds", type=float, default=420.0, help="for all jobs together")
    parser.add_argument(
        "--as-given", action="store_true", help="no second try with less memory where a job runs out of it"
    )
    parser.add_argument("--defaults", default="", help="KEY=VALUE:KEY=VALUE that every job starts from")
    parser.add_argument("--commit", help="commit of this tree, where it is no checkout")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "scale.json")
    options = parser.parse_args(argv)
    defaults = {"steps": options.steps}
    if options.defaults:
        settings = dataclasses.asdict(parse_job(f"bf16:{options.defaults}", defaults))
        defaults = {k: v for k, v in settings.items() if k != "route"}
    jobs = [parse_job(text, defaults) for text in options.jobs or (*ROUTES, *SCALING)]
    return _run(jobs, options, argv)


def _run(jobs: list[Job], options: argparse.Namespace, argv: list[str]) -> int:
    began, end = time.time(), time.time() + options.max_seconds
    identity = code_identity()
    head = {
        "benchmark": "scale",
        "versions": package_versions(),
        "commit": options.commit or identity["commit"],
        "dirty": identity["dirty"],
        "date_utc": utc_now(),
        "command": "python -m fp4core.bench scale " + " ".join(argv),
        "max_seconds": options.max_seconds,
    }
    rows: list[dict[str, Any]] = []
    for job in jobs:
        left = end - time.time()
        if left < min(_START, options.max_seconds / 4):
            rows.append({"job": dataclasses.asdict(job), "title": job.title, "skipped": f"{left:.0f} s left"})
            print(f"[{job.title}] skipped, {left:.0f} s left", flush=True)
        else:
            rows.append(_one(job, end))
            smaller = _smaller(job)
            again = rows[-1].get("out_of_memory") and smaller != job and not options.as_given
            if again and end - time.time() > _START:
                rows.append(_one(smaller, end))
        write_json(
            options.out, {**head, "seconds": time.time() - began, "summary": summary(rows), "rows": rows}
        )
    columns = [
        "title",
        "tokens_per_s",
        "tokens_per_s_per_gpu",
        "mfu",
        "memory_gib",
        "median_s",
        "replays",
        "error",
    ]
    print(common.table(rows, columns), flush=True)
    for part, found in summary(rows).items():
        for entry in found:
            print(f"{part}: " + ", ".join(f"{k} {v}" for k, v in entry.items()), flush=True)
    print("written", options.out, flush=True)
    return 0 if all(row.get("done") for row in rows) else 1


def _smaller(job: Job) -> Job:
    """The job with the least memory: every route then still shows its losses, if at another geometry."""
    return dataclasses.replace(job, activation_checkpoint="full", keep_gathered=False)


def _one(job: Job, end: float) -> dict[str, Any]:
    print(f"[{job.title}] starts, {end - time.time():.0f} s left", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "job.json"
        try:
            # the ranks stop by themselves before they are stopped
            problem = wait(start(job, out, end - 5), end)
        except OSError as error:
            problem = str(error)
        record = read_json(out) if out.is_file() else {"job": dataclasses.asdict(job), "title": job.title}
        others = [read_json(p) for p in sorted(out.parent.glob("job.rank*.json"))]
    if problem and "error" not in record:
        record["error"] = problem
    if others:
        record["errors_of_other_ranks"] = [other["error"] for other in others]
        # rank 0 may only have seen that its peer had gone
        record["out_of_memory"] = any(r.get("out_of_memory") for r in (record, *others))
    return record


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
