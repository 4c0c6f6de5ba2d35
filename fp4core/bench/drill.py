"""Resume drill on this machine's device: interrupt a run at random moments, go on, end with the same bits.

    python -m fp4core.bench drill --out FILE [--routes bf16,mxfp4_sr] [--kills 3] [--kinds step,write]
                                  [--ranks 1] [--max-seconds 90]

Per route two runs of ``python -m fp4core train`` on the same made-up tokens: one left alone, one interrupted
``--kills`` times, in the ways of ``drill_kills`` by turns. Equal means that every file of the last checkpoint
(weights and moments) has the same SHA-256, that every row of the metrics is the same, and that every
validation sequence scores the same where evaluations were interrupted. All runs share the device and go on
side by side. Before that, the gradients of one step are made twice in one process and compared bit by bit,
with and without ``train.deterministic``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fp4core.bench import common
from fp4core.bench.drill_kills import KINDS, Broken, plan
from fp4core.bench.drill_lab import ENVIRONMENT, Bench, default_steps, settings
from fp4core.bench.scale_job import Job, Pairs
from fp4core.records import code_identity, package_versions, read_json, utc_now, write_json

_EVALUATION_S = {"cpu": 4.0, "cuda": 20.0}  # roughly, of the small study, start included


def drill(
    bench: Bench, routes: list[str], kills: int, kinds: tuple[str, ...], deadline: float, seed: int = 0
) -> list[dict[str, Any]]:
    """Run, interrupt and compare; one row per route. Whole and broken runs go on side by side."""
    evaluation_s = _EVALUATION_S[bench.study.train.device]
    whole = {route: bench.start("whole", route) for route in routes}
    broken = {}
    for number, route in enumerate(routes):
        rng = random.Random(f"{seed}/{number}")
        broken[route] = Broken(bench, route, plan(kills, kinds, rng), rng, evaluation_s)
    while time.time() < deadline and not all(b.ended for b in broken.values()):
        for each in broken.values():
            if not each.ended:
                each.poll()
        time.sleep(0.002)
    for process in whole.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.time()))
    for each in broken.values():
        each.kill()
    return [_compare(bench, route, whole[route], broken[route], "evaluation" in kinds) for route in routes]


def _compare(
    bench: Bench, route: str, whole: subprocess.Popen[bytes], broken: Broken, scored: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {"route": route, "kills": broken.made, "missed": broken.missed}
    if whole.poll() is None:
        os.killpg(whole.pid, signal.SIGKILL)
        whole.wait()
    problems = {
        "whole": f"ended with {whole.returncode}" if whole.returncode else None,
        "broken": broken.error,
    }
    for name, problem in problems.items():
        if problem:
            tail = bench.log(name, route).read_text(errors="replace").splitlines()[-25:]
            row["error"] = f"{name} run: {problem}"
            row[f"{name}_log"] = tail
            print(f"[drill] {route} {row['error']}:\n" + "\n".join(tail), flush=True)
    if "error" not in row:
        row |= _equal(bench, route, scored)
    return row


def _equal(bench: Bench, route: str, scored: bool) -> dict[str, Any]:
    files, metrics = bench.outcome("whole", route)
    other_files, other_metrics = bench.outcome("broken", route)
    steps = [r[0] for r in other_metrics]
    different = [a[0] for a, b in zip(metrics, other_metrics) if a != b]
    found: dict[str, Any] = {
        "starts": len(read_json(bench.run("broken", route) / "manifest.json")["starts"]),
        "checkpoint_equal": files == other_files,
        "metrics_equal": metrics == other_metrics,
        "first_different_step": min(different, default=None),
        "every_step_once": steps == list(range(1, bench.study.train.steps + 1)),
        "half_written_left": len(bench.half_written("broken", route)),
        "first_loss": metrics[0][1],
        "last_loss": metrics[-1][1],
        "files": files,
    }
    if scored:
        if bench.evaluate("whole", route).wait():
            return found | {"error": "evaluation of the whole run failed"}
        scores = bench.scores("whole", route)
        found["evaluation_equal"] = scores == bench.scores("broken", route)
        found["evaluated"] = list(scores)
    equal = {k.removesuffix("_equal"): v for k, v in found.items() if k.endswith("_equal")}
    print(
        f"[drill] {route}: {found['starts']} starts, "
        + ", ".join(f"{name} {'equal' if same else 'DIFFERENT'}" for name, same in equal.items())
        + f", loss {found['first_loss']:.4f} -> {found['last_loss']:.4f}",
        flush=True,
    )
    return found


def repeat(route: str, device: str, deterministic: bool) -> dict[str, Any]:
    """Whether the gradients of one step are the same bits when made again; runs in this process."""
    import torch

    from fp4core.bench.scale_job import fill
    from fp4core.recipe import load_recipe
    from fp4core.train.distributed import joined
    from fp4core.train.engine import Engine

    tiny = {"size": "tiny", "sequence": 64} if device == "cpu" else {"sequence": 4096}
    job = Job(
        route, gpus=1, blocks=2, accumulation=1, deterministic=deterministic, device=device,
        compile=device == "cuda", **tiny,
    )  # fmt: skip
    study = job.study()
    study = dataclasses.replace(study, model=dataclasses.replace(study.model, vocab=8192))
    with joined(device) as world:
        engine = Engine(
            study, load_recipe(route), 0, world=world, stream=Pairs(job.sequence, 8192), initialise=fill
        )
        engine.step(1)  # settles references and compiles
        sums, grads = [], []
        for _ in range(3):
            began = time.perf_counter()
            sums.append(engine.exact_gradients(2)[0])
            found = {n: p.grad.clone() for n, p in engine.model.named_parameters()}
            seconds = time.perf_counter() - began
            grads.append(found)
    different = [n for n in grads[1] if not torch.equal(grads[1][n], grads[2][n])]
    return {
        "route": route,
        "deterministic": deterministic,
        "seconds": seconds,
        "loss_equal": sums[1] == sums[2],
        "gradients_equal": not different,
        "different": different[:4],
    }


def _start_repeats(routes: list[str], device: str) -> list[tuple[str, bool, subprocess.Popen[bytes]]]:
    """`repeat` of every route, with and without deterministic attention, each in a process of its own."""
    command = [sys.executable, "-m", "fp4core.bench.drill", "repeat"]
    return [
        (
            route,
            exact,
            subprocess.Popen(
                [*command, route, device, str(exact)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**ENVIRONMENT, **os.environ},
                start_new_session=True,
            ),
        )
        for route in routes
        for exact in (False, True)
    ]


def _finish_repeats(
    running: list[tuple[str, bool, subprocess.Popen[bytes]]], deadline: float
) -> list[dict[str, Any]]:
    rows = []
    for route, exact, process in running:
        try:
            text = process.communicate(timeout=max(1.0, deadline - time.time()))[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text = process.communicate()[0].decode(errors="replace") + "\ntime limit"
        lines = text.splitlines()
        answer = [line for line in lines if line.startswith("RESULT ")]
        if answer:
            rows.append(json.loads(answer[-1].removeprefix("RESULT ")))
            print(f"[repeat] {rows[-1]}", flush=True)
        else:
            rows.append({"route": route, "deterministic": exact, "error": lines[-25:]})
            print(f"[repeat] {route} deterministic {exact} failed:\n" + "\n".join(lines[-25:]), flush=True)
    return rows


def main(argv: list[str]) -> int:
    """Command line; see the module."""
    if argv[:1] == ["repeat"]:
        print("RESULT " + json.dumps(repeat(argv[1], argv[2], argv[3] == "True")), flush=True)
        return 0
    parser = argparse.ArgumentParser(prog="python -m fp4core.bench drill", description=__doc__)
    parser.add_argument("--routes", default="bf16,mxfp4_sr")
    parser.add_argument("--kills", type=int, default=3, help="interruptions of every route's broken run")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--ranks", type=int, default=1, help="processes (GPUs) of each run, sharded")
    parser.add_argument(
        "--gather", default="fp32", choices=("fp32", "bf16"), help="train.gather of the study"
    )
    parser.add_argument("--steps", type=int, help="default: enough for the interruptions")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--max-seconds", type=float, default=90.0)
    parser.add_argument("--no-repeat", action="store_true", help="only the drill")
    parser.add_argument("--fast", action="store_true", help="without train.deterministic: may not be equal")
    parser.add_argument("--commit", help="commit of this tree, where it is no checkout")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "drill.json")
    options = parser.parse_args(argv)
    kinds = tuple(options.kinds.split(","))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"--kinds: got {unknown[0]!r}, needed some of {', '.join(KINDS)}")
    steps = options.steps or default_steps(options.device, options.kills)
    end, routes = time.time() + options.max_seconds, options.routes.split(",")
    identity = code_identity()
    record: dict[str, Any] = {
        "benchmark": "drill",
        "device": _device_name(options.device),
        "versions": package_versions(),
        "commit": options.commit or identity["commit"],
        "date_utc": utc_now(),
        "command": "python -m fp4core.bench drill " + " ".join(argv),
    }
    # they share the device with the drill: bits are compared, not times
    repeats = [] if options.no_repeat else _start_repeats(routes, options.device)
    with tempfile.TemporaryDirectory() as folder:
        whole = {"deterministic": not options.fast, "local_batch": 2 if options.ranks <= 2 else 1}
        whole["gather"] = options.gather
        study = settings(options.device, steps=steps, **whole)
        bench = Bench(Path(folder), study, ranks=options.ranks)
        record["settings"] = study
        record["rows"] = drill(bench, routes, options.kills, kinds, end - 10)
    write_json(options.out, record)
    record["repeats"] = _finish_repeats(repeats, end - 2)
    write_json(options.out, record)
    print("written", options.out, flush=True)
    return 0 if all(map(_passed, record["rows"])) and all(map(_repeated, record["repeats"])) else 1


def _passed(row: dict[str, Any]) -> bool:
    """Whether a route's run was interrupted at all and ended as the one that was left alone."""
    wanted = ("kills", "checkpoint_equal", "metrics_equal", "every_step_once")
    return "error" not in row and all(row.get(k) for k in wanted) and row.get("evaluation_equal", True)


def _repeated(row: dict[str, Any]) -> bool:
    """Whether a step was made twice, and to the same bits where that is promised."""
    return "error" not in row and (row["gradients_equal"] or not row["deterministic"])


def _device_name(device: str) -> str:
    if device == "cpu":
        return "cpu"
    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
