"""What the resume drill works on: a study of two small blocks, made-up tokens, and runs side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fp4core.bench.scale_job import Pairs
from fp4core.recipe import load_study, recipes_dir, to_dict
from fp4core.records import read_json, sha256_bytes, sha256_file, write_json

# many small compilations at once: not a pool of workers per core for each of them
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
_SIZES = {
    "cuda": {"blocks": 2, "hidden": 256, "ffn": 768, "heads": 2, "kv_heads": 1, "head_dim": 128},
    "cpu": {"blocks": 2, "hidden": 64, "ffn": 96, "heads": 2, "kv_heads": 1, "head_dim": 32},
}
_PLACE = {"cuda": {"sequence": 256, "checkpoint_every": 20}, "cpu": {"sequence": 64, "checkpoint_every": 10}}


def default_steps(device: str, kills: int) -> int:
    """Enough that every kill finds a run that is still going on."""
    return 240 + 40 * max(0, kills - 3) if device == "cuda" else 40 * (kills + 3)


def settings(device: str, *, steps: int, deterministic: bool = True, **train: Any) -> dict[str, Any]:
    """A study of two small blocks (on a GPU such as the fused kernels take), as plain data."""
    study = to_dict(load_study("smoke"))
    study |= {"study": "drill", "description": "resume drill"}
    study["model"] |= _SIZES[device]
    study["train"] |= {
        **_PLACE[device],
        "global_batch": 4,
        "local_batch": 2,
        "steps": steps,
        "cuts": [steps // 2, steps],
        "endpoint_step": steps,
        "log_every": 1,
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
            "validation": {"stream_sha256": tokens.stream_sha256(held)},
            "data_sha256": sha256_bytes(json.dumps(files, sort_keys=True).encode()),
            "files": files,
        },
    )


class Bench:
    """Recipes folders with the drill's study, its data, and runs of `ranks` processes on them."""

    def __init__(self, root: Path, study: dict[str, Any], *, ranks: int = 1) -> None:
        self.root, self.ranks = root, ranks
        for folder, beside in (("recipes", False), ("recipes-async", True)):
            (root / folder / "studies").mkdir(parents=True)
            (root / folder / "routes").symlink_to((recipes_dir() / "routes").resolve())
            content = {**study, "train": {**study["train"], "async_checkpoint": beside}}
            (root / folder / "studies" / "drill.yaml").write_text(yaml.safe_dump(content))
        self.study = load_study("drill", root / "recipes")
        make_data(root / "data", self.study)

    def results(self, name: str) -> Path:
        """A results folder of its own on the shared data."""
        folder = self.root / name
        if not folder.exists():
            folder.mkdir()
            (folder / "data").symlink_to(self.root / "data")
        return folder

    def start(self, name: str, route: str, *more: str, beside: bool = False) -> subprocess.Popen[bytes]:
        """`python -m fp4core train`, with asynchronous checkpoints where asked."""
        return self._start("fp4core", "train", name, route, *more, beside=beside)

    def evaluate(self, name: str, route: str) -> subprocess.Popen[bytes]:
        """`python -m eval validate`: evaluation is a job of its own."""
        return self._start("eval", "validate", name, route, beside=False)

    def _start(
        self, module: str, command: str, name: str, route: str, *more: str, beside: bool
    ) -> subprocess.Popen[bytes]:
        """In a process group of its own; its output goes to a file."""
        recipes = self.root / ("recipes-async" if beside else "recipes")
        where = ["--study", "drill", "--recipes", str(recipes), "--results", str(self.results(name))]
        line = [module, command, *where, "--route", route, "--seed", "0", *more]
        if self.ranks > 1 and command == "train":
            line = ["fp4core.bench.drill_ranks", str(self.ranks), *line]
        with open(self.log(name, route), "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *line],
                stdout=log,
                stderr=log,
                env={**ENVIRONMENT, **os.environ},
                start_new_session=True,
            )

    def log(self, name: str, route: str) -> Path:
        return self.root / f"{name}-{route}.txt"

    def run(self, name: str, route: str) -> Path:
        return self.results(name) / "runs" / route / "s0"

    def checkpoints(self, name: str, route: str) -> set[str]:
        return {p.name for p in self.run(name, route).glob("checkpoints/step-*")}

    def half_written(self, name: str, route: str) -> list[Path]:
        """Checkpoints that are being written, or were when their writer was killed."""
        return list(self.run(name, route).glob("checkpoints/.step-????????"))

    def outcome(self, name: str, route: str) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
        """(files of the last checkpoint with hashes, rows of the metrics that no restart may change)."""
        import pyarrow.parquet as pq

        run = self.run(name, route)
        last = run / "checkpoints" / f"step-{self.study.train.steps:08d}" / "checkpoint.json"
        table = pq.read_table(run / "metrics.parquet")
        columns = ("step", "loss", "grad_norm", "lr", "tokens")
        return read_json(last)["files"], list(zip(*(table[c].to_pylist() for c in columns), strict=True))

    def records(self, name: str, route: str) -> list[Path]:
        """Records of the cuts that are scored, by step."""
        return sorted((self.results(name) / "validation" / route / "s0").glob("step-*.json"))

    def scores(self, name: str, route: str) -> dict[str, Any]:
        """Cut -> NLL of every validation sequence."""
        return {path.stem: read_json(path)["sequence_nll"] for path in self.records(name, route)}
