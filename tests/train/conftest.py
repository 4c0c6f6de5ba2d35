"""A study small enough that a run takes a second, and helpers that train it in this or another process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import multiprocessing
import random
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess as Process
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from child import Work, run_commands

from fp4core.recipe import load_study, recipes_dir
from fp4core.records import read_json, write_json
from fp4core.train import data
from fp4core.train.corpus import Corpus
from fp4core.train.data import prepare_data

TINY: dict[str, Any] = {
    "version": 1,
    "study": "tiny",
    "description": "for tests",
    "seeds": [0],
    "routes": "all",
    "model": {
        "blocks": 2,
        "hidden": 64,
        "ffn": 96,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 32,
        "vocab": 300,
        "max_position": 64,
        "rope": {"original_max_position": 16},
    },
    "data": {"source": "embedded", "validation_documents": 2},
    "train": {
        "sequence": 32,
        "global_batch": 4,
        "local_batch": 4,
        "steps": 6,
        "warmup": 2,
        "lr": 0.005,
        "cuts": [3, 6],
        "endpoint_step": 6,
        "log_every": 1,
        "checkpoint_every": 2,
        "keep_last": 2,
        "threads": 1,
        "device": "cpu",
    },
    "probe": {"steps": 3, "window": [2, 3], "matched": {"local_batch": 2}},
    "validation": {"sequences": 8},
    "downstream": {"step": 6, "tasks": {"mmlu": {}}},
    "dgrad": {"route": "bf16", "step": 6, "sequence": 32},
    "output_head": {"route": "mxfp4_sr", "steps": 3, "window": [2, 3]},
    "boundary": {"tokens": 64, "repeats": 2},
}


class Lab:
    """A recipes folder, a results folder with data, and commands on them."""

    def __init__(self, root: Path, data: Path) -> None:
        self.recipes = root / "recipes"
        shutil.copytree(recipes_dir() / "routes", self.recipes / "routes")
        (self.recipes / "studies").mkdir()
        self.results = root / "results"
        self.results.mkdir(parents=True)
        (self.results / "data").symlink_to(data)
        self.write_study()

    def write_study(self, **train: Any) -> None:
        """Write the study with changed training settings."""
        study = copy.deepcopy(TINY)
        study["train"].update(train)
        last = study["train"]["steps"]
        study["downstream"]["step"] = study["dgrad"]["step"] = last
        (self.recipes / "studies" / "tiny.yaml").write_text(yaml.safe_dump(study))

    def study(self) -> Any:
        return load_study("tiny", self.recipes)

    def arguments(self, route: str, *more: str, results: Path | None = None) -> list[str]:
        where = ["--study", "tiny", "--recipes", str(self.recipes), "--results", str(results or self.results)]
        return ["train", *where, "--route", route, "--seed", "0", *more]

    def train(self, route: str, *more: str) -> int:
        """Train in this process; returns the exit code."""
        from fp4core.__main__ import main

        return main(self.arguments(route, *more))

    def start(self, route: str, *more: str, disk: str | None = None) -> Process:
        """Train in another process that starts from a warm interpreter; `disk` as in child.py."""
        return self._spawn([(self.arguments(route, *more), {})], disk)

    def start_ranks(
        self, size: int, routes: list[str], *more: str, disks: dict[int, str] | None = None
    ) -> list[Process]:
        """Train routes one after another in `size` processes, as torchrun would start them.

        `disks`: rank -> its disk, as in child.py.
        """
        ports = _free_ports(len(routes))
        processes = []
        for rank in map(str, range(size)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
            work = [
                (self.arguments(route, *more), {**place, "MASTER_PORT": port})
                for route, port in zip(routes, ports, strict=True)
            ]
            processes.append(self._spawn(work, (disks or {}).get(int(rank))))
        return processes

    def _spawn(self, work: list[Work], disk: str | None = None) -> Process:
        process = _CONTEXT.Process(target=run_commands, args=(work, str(self.output), disk), daemon=True)
        process.start()
        return process

    @property
    def output(self) -> Path:
        """What the other processes printed."""
        return self.results / "output.txt"

    def run_path(self, route: str) -> Path:
        return self.results / "runs" / route / "s0"

    def finish_ranks(self, size: int, routes: list[str], *more: str) -> None:
        """Train in `size` processes to the end of the command; AssertionError when one fails."""
        processes = self.start_ranks(size, routes, *more)
        for process in processes:
            process.join(240)
            process.kill()
        assert [p.exitcode for p in processes] == [0] * size, self.output.read_text()

    def metrics(self, route: str) -> list[tuple[Any, ...]]:
        """(step, loss, grad_norm, lr, tokens) of every row: what must not depend on interruptions."""
        table = pq.read_table(self.run_path(route) / "metrics.parquet")
        return list(zip(*(table[name].to_pylist() for name in ("step", "loss", "grad_norm", "lr", "tokens"))))

    def tensors(self, route: str, step: int) -> dict[str, Any]:
        """File -> size and SHA-256 of a checkpoint: equal means bit-equal weights and moments."""
        return read_json(self.run_path(route) / "checkpoints" / f"step-{step:08d}" / "checkpoint.json")[
            "files"
        ]


def old_record(path: Path, **fields: Any) -> str:
    """Leave a record of another recipe and study at `path`; returns its text."""
    old = {"seed": 0, "recipe_hash": "aaa", "stage_hash": "bbb", "inputs": {"bf16": "ccc"}}
    write_json(path, old | fields)
    return path.read_text()


def _free_ports(count: int) -> list[str]:
    """Ports below the range that outgoing connections draw from, so that none is lost until its use."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(12000, 32000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return [str(port) for port in found]


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["child", "fp4core.train.run", "torch.distributed.fsdp"])


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny study's data directory, made once."""
    return make_tiny_data(tmp_path_factory.mktemp("tiny"))


def make_tiny_data(root: Path) -> Path:
    """Make the tiny study's data directory in `root`."""
    path = root / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    with few_documents():
        prepare_data(load_study(path), root / "data", note=lambda line: None)
    return root / "data"


@contextlib.contextmanager
def few_documents() -> Iterator[None]:
    """Train tokenizers on the last thirty addresses: seconds less, and no test needs more text."""
    real = data.embedded_corpus

    def fewer(validation_documents: int) -> Corpus:
        source = real(validation_documents)
        return dataclasses.replace(source, training=source.training[-30:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "embedded_corpus", fewer)
        yield


@pytest.fixture
def lab(tmp_path: Path, tiny_data: Path) -> Lab:
    """A fresh laboratory per test."""
    return Lab(tmp_path, tiny_data)


@pytest.fixture
def second_lab(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Lab:
    """Another one, for the run that is compared with."""
    return Lab(tmp_path_factory.mktemp("second"), tiny_data)


@pytest.fixture
def make_lab(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Callable[[], Lab]:
    """As many as a test wants."""
    return lambda: Lab(tmp_path_factory.mktemp("lab"), tiny_data)
