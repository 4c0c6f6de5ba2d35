"""Resume drill on this machine's device: kill -9 at random moments, go on, and end with the same bits.

    python -m fp4core.bench drill --out FILE [--routes bf16,mxfp4_sr] [--kills 3] [--max-seconds 90]

Per route two runs of ``python -m fp4core train`` on the same made-up tokens: one left alone, one killed with
SIGKILL, each time at a random moment after it has made a checkpoint of its own. Equal means that every file
of the last checkpoint (weights and moments) has the same SHA-256 and that every row of the metrics is the
same. All runs share the device and go on side by side. Before that, the gradients of one step are made twice
in one process and compared bit by bit, with and without ``train.deterministic``.
"""

from __future__ import annotations

import argparse
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

import numpy as np
import yaml

from fp4core.bench import common
from fp4core.bench.scale_job import Job, Pairs
from fp4core.recipe import load_study, recipes_dir, to_dict
from fp4core.records import (
    code_identity,
    package_versions,
    read_json,
    sha256_bytes,
    sha256_file,
    utc_now,
    write_json,
)

_STEPS, _EVERY = 240, 20
# many small compilations at once: not a pool of workers per core for each of them
_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}


def settings(device: str, *, steps: int = _STEPS, deterministic: bool = True, **train: Any) -> dict[str, Any]:
    """A study of two small blocks that the fused kernels take, as plain data."""
    study = to_dict(load_study("smoke"))
    study |= {"study": "drill", "description": "resume drill"}
    study["model"] |= {"blocks": 2, "hidden": 256, "ffn": 768, "heads": 2, "kv_heads": 1, "head_dim": 128}
    study["train"] |= {
        "sequence": 256,
        "global_batch": 4,
        "local_batch": 2,
        "steps": steps,
        "cuts": [steps],
        "endpoint_step": steps,
        "log_every": 1,
        "checkpoint_every": _EVERY,
        "keep_last": 2,
        "lr": 1e-3,
        "compile": device == "cuda",
        "device": device,
        "deterministic": deterministic,
        **train,
    }
    study["downstream"]["step"] = study["dgrad"]["step"] = steps
    return study


def make_data(directory: Path, study: Any) -> None:
    """A data directory of made-up tokens for `study`: shards and hashes are real, the tokenizer is a stub."""
    from fp4core.train import tokens

    directory.mkdir(parents=True)
    stub = b'{"made": "by the resume drill"}\n'
    (directory / "tokenizer.json").write_bytes(stub)
    vocab, length = study.model.vocab, study.train.sequence
    shared = {"tokenizer_sha256": sha256_bytes(stub), "vocab": vocab, "source": "drill"}
    stream = Pairs(length, vocab)
    rows = stream.batch(0, 64, seed=1).astype(tokens.token_dtype(vocab))
    counts = tokens.write_shard(directory / "train.arrow", list(rows), **shared)
    held = stream.batch(64, study.validation.sequences, seed=1).astype(np.int32)
    tokens.write_validation(directory / "validation.arrow", held, **shared)
    names = ("tokenizer.json", "train.arrow", "validation.arrow")
    files = {
        n: {"bytes": (directory / n).stat().st_size, "sha256": sha256_file(directory / n)} for n in names
    }
    write_json(
        directory / "data.json",
        {
            "stage_hash": study.stage_hash("data"),
            "tokenizer": {"sha256": shared["tokenizer_sha256"], "vocab": vocab, "end_of_text": 0},
            "training": {"shards": ["train.arrow"], **counts},
            "data_sha256": sha256_bytes(json.dumps(files, sort_keys=True).encode()),
            "files": files,
        },
    )


class Bench:
    """A recipes folder with the drill's study, its data, and runs on them."""

    def __init__(self, root: Path, study: dict[str, Any]) -> None:
        self.root = root
        self.recipes = root / "recipes"
        (self.recipes / "studies").mkdir(parents=True)
        (self.recipes / "routes").symlink_to((recipes_dir() / "routes").resolve())
        (self.recipes / "studies" / "drill.yaml").write_text(yaml.safe_dump(study))
        self.study = load_study("drill", self.recipes)
        make_data(root / "data", self.study)

    def results(self, name: str) -> Path:
        """A results folder of its own on the shared data."""
        folder = self.root / name
        if not folder.exists():
            folder.mkdir()
            (folder / "data").symlink_to(self.root / "data")
        return folder

    def start(self, name: str, route: str) -> subprocess.Popen[bytes]:
        """`python -m fp4core train` in a process group of its own; its output goes to a file."""
        where = ["--study", "drill", "--recipes", str(self.recipes), "--results", str(self.results(name))]
        command = [sys.executable, "-m", "fp4core", "train", *where, "--route", route, "--seed", "0"]
        with open(self.log(name, route), "ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**_ENVIRONMENT, **os.environ},
                start_new_session=True,
            )

    def log(self, name: str, route: str) -> Path:
        return self.root / f"{name}-{route}.txt"

    def run(self, name: str, route: str) -> Path:
        return self.results(name) / "runs" / route / "s0"

    def checkpoints(self, name: str, route: str) -> set[str]:
        return {p.name for p in self.run(name, route).glob("checkpoints/step-*")}

    def outcome(self, name: str, route: str) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
        """(files of the last checkpoint with hashes, rows of the metrics that no restart may change)."""
        import pyarrow.parquet as pq

        run = self.run(name, route)
        last = run / "checkpoints" / f"step-{self.study.train.steps:08d}" / "checkpoint.json"
        table = pq.read_table(run / "metrics.parquet")
        columns = ("step", "loss", "grad_norm", "lr", "tokens")
        return read_json(last)["files"], list(zip(*(table[c].to_pylist() for c in columns), strict=True))


def drill(
    bench: Bench, routes: list[str], kills: int, deadline: float, seed: int = 0
) -> list[dict[str, Any]]:
    """Run, kill and compare; one row per route. The whole pairs ran side by side."""
    rng = random.Random(seed)
    whole = {route: bench.start("whole", route) for route in routes}
    broken = {route: bench.start("broken", route) for route in routes}
    killed: dict[str, list[str]] = {route: [] for route in routes}
    plan: dict[str, float | None] = dict.fromkeys(routes)
    known: dict[str, set[str]] = {route: set() for route in routes}
    while time.time() < deadline:
        for route, process in broken.items():
            if process.poll() is not None or len(killed[route]) >= kills:
                continue
            fresh = bench.checkpoints("broken", route) - known[route]
            if plan[route] is None and fresh:
                plan[route] = time.time() + rng.uniform(0.0, 1.0)
            if plan[route] is not None and time.time() >= plan[route]:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                known[route] = bench.checkpoints("broken", route)
                killed[route].append(max(known[route], default="none"))
                print(f"[drill] {route}: killed after {killed[route][-1]}, starts again", flush=True)
                plan[route], broken[route] = None, bench.start("broken", route)
        if all(p.poll() is not None for p in (*whole.values(), *broken.values())):
            break
        time.sleep(0.02)
    return [_compare(bench, route, whole[route], broken[route], killed[route]) for route in routes]


def _compare(
    bench: Bench,
    route: str,
    whole: subprocess.Popen[bytes],
    broken: subprocess.Popen[bytes],
    killed: list[str],
) -> dict[str, Any]:
    row: dict[str, Any] = {"route": route, "killed_after": killed}
    for name, process in (("whole", whole), ("broken", broken)):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            tail = bench.log(name, route).read_text(errors="replace").splitlines()[-25:]
            row["error"] = f"{name} run ended with {process.returncode}"
            row[f"{name}_log"] = tail
            print(f"[drill] {route} {row['error']}:\n" + "\n".join(tail), flush=True)
    if "error" not in row:
        files, metrics = bench.outcome("whole", route)
        other_files, other_metrics = bench.outcome("broken", route)
        steps = [r[0] for r in other_metrics]
        different = [a[0] for a, b in zip(metrics, other_metrics) if a != b]
        row |= {
            "starts": len(read_json(bench.run("broken", route) / "manifest.json")["starts"]),
            "checkpoint_equal": files == other_files,
            "metrics_equal": metrics == other_metrics,
            "first_different_step": min(different, default=None),
            "every_step_once": steps == list(range(1, bench.study.train.steps + 1)),
            "first_loss": metrics[0][1],
            "last_loss": metrics[-1][1],
            "files": files,
        }
        print(
            f"[drill] {route}: {len(killed)} kills, {row['starts']} starts, checkpoint "
            f"{'equal' if row['checkpoint_equal'] else 'DIFFERS'}, metrics "
            f"{'equal' if row['metrics_equal'] else 'DIFFER from step ' + str(row['first_different_step'])}, "
            f"loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}",
            flush=True,
        )
    return row


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
            sums.append(engine._exact_gradients(2)[0])
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
                env={**_ENVIRONMENT, **os.environ},
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
    parser.add_argument("--kills", type=int, default=3, help="of every route's broken run")
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--max-seconds", type=float, default=90.0)
    parser.add_argument("--no-repeat", action="store_true", help="only the drill")
    parser.add_argument("--fast", action="store_true", help="without train.deterministic: may not be equal")
    parser.add_argument("--commit", help="commit of this tree, where it is no checkout")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "drill.json")
    options = parser.parse_args(argv)
    end, routes = time.time() + options.max_seconds, options.routes.split(",")
    identity = code_identity()
    record: dict[str, Any] = {
        "benchmark": "drill",
        "device": _device_name(options.device),
        "versions": package_versions(),
        "commit": options.commit or identity["commit"],
        "date_utc": utc_now(),
        "command": "python -m fp4core.bench " + " ".join(argv),
    }
    # they share the device with the drill: bits are compared, not times
    repeats = [] if options.no_repeat else _start_repeats(routes, options.device)
    with tempfile.TemporaryDirectory() as folder:
        study = settings(options.device, steps=options.steps, deterministic=not options.fast)
        bench = Bench(Path(folder), study)
        record["settings"] = study
        record["rows"] = drill(bench, routes, options.kills, end - 10)
    write_json(options.out, record)
    record["repeats"] = _finish_repeats(repeats, end - 2)
    write_json(options.out, record)
    print("written", options.out, flush=True)
    return 0 if all(r.get("checkpoint_equal") and r.get("metrics_equal") for r in record["rows"]) else 1


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
