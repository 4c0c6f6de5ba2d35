"""Checkpoints: torch.distributed.checkpoint in safetensors files, whole or absent, nothing pickled.

    checkpoints/step-00000100/
        shard-RRRRR-model-00001-of-00002.safetensors   FP32 master weights of rank R: `model.*`
        shard-RRRRR-model-00002-of-00002.safetensors   AdamW moments: `optim.exp_avg.*`, `.exp_avg_sq.*`
        checkpoint.json                                step, identity, model, size and SHA-256 of each file

A checkpoint is written in a hidden directory beside its place, `checkpoint.json` last, and renamed, so a
directory named step-* was complete once; sizes and hashes tell whether it still is. DCP's own `.metadata`
and byte entries are pickles, hence its safetensors storage (any world size reads what another wrote: the
shard offsets are in each file's header) and JSON for everything that is no tensor. Stochastic rounding and
the data order are pure functions of (seed, step), so no random state needs keeping.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from fp4core.records import read_json, sha256_file, sync_directory, write_json

from .distributed import World
from .errors import RunError

MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8})")


def checkpoint_name(step: int) -> str:
    """Directory name of the checkpoint at `step`."""
    return f"step-{step:08d}"


def verify(path: Path) -> str | None:
    """Why the checkpoint at `path` cannot be used, or None when every byte is as it was written."""
    manifest = Path(path) / MANIFEST
    if not manifest.is_file():
        return f"{MANIFEST} is missing"
    try:
        files = read_json(manifest)["files"]
    except (ValueError, KeyError, OSError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, expected in files.items():
        file = Path(path) / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, needed {expected['bytes']}"
        if sha256_file(file) != expected["sha256"]:
            return f"{name} does not have the SHA-256 it was written with"
    return None


class Checkpoints:
    """The checkpoints of one run directory. `retained` steps are never removed; of others the last stay."""

    def __init__(self, directory: Path, *, world: World, retained: frozenset[int], keep_last: int) -> None:
        self.directory = Path(directory)
        self._world, self._retained, self._keep_last = world, retained, max(1, keep_last)
        if world.first:
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob(".step-*"):
                shutil.rmtree(leftover)
        world.barrier()

    def path(self, step: int) -> Path:
        return self.directory / checkpoint_name(step)

    def steps(self) -> list[int]:
        """Steps that have a directory, ascending."""
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> Path:
        """Write the checkpoint of `step` and drop those that the policy no longer keeps; returns its path."""
        final, work = self.path(step), self.directory / f".{checkpoint_name(step)}"
        tensors = _tensors(model, optimizer)
        if self._world.first:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
        self._world.barrier()
        writer = HuggingFaceStorageWriter(
            str(work),
            fqn_to_index_mapping={k: 1 if k.startswith("model.") else 2 for k in tensors},
            save_distributed=True,
        )
        with _quiet():
            dcp.save(tensors, storage_writer=writer, no_dist=self._world.size == 1)
        mine = sorted(work.glob(f"shard-{self._world.rank + 1:05d}-*.safetensors"))
        for file in mine:
            _settle_header(file)
        listed = {f.name: {"bytes": f.stat().st_size, "sha256": sha256_file(f)} for f in mine}
        files = {name: entry for part in self._world.gather(listed) for name, entry in part.items()}
        if self._world.first:
            record = {
                "schema": {"name": "fp4core.checkpoint", "version": 1},
                "step": step,
                **state,
                "files": files,
            }
            write_json(work / MANIFEST, record)
            if final.exists():
                _remove(final)
            work.rename(final)
            sync_directory(self.directory)
            self._prune()
        self._world.barrier()
        return final

    def newest(self, note: Callable[[str], None]) -> int | None:
        """Newest step whose checkpoint is whole; every bad one is set aside with one line through `note`."""
        found: int | None = None
        if self._world.first:
            for step in reversed(self.steps()):
                problem = verify(self.path(step))
                if problem is None:
                    found = step
                    break
                aside = self.directory / f"corrupt-{checkpoint_name(step)}"
                shutil.rmtree(aside, ignore_errors=True)
                self.path(step).rename(aside)
                note(
                    f"checkpoint {checkpoint_name(step)} is not usable: {problem}; "
                    f"set aside as {aside.name}, going back to the one before it"
                )
        return self._world.broadcast({"step": found})["step"]

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Read weights and moments in place; returns the manifest. RunError when the tensors do not fit."""
        tensors = _tensors(model, optimizer)
        path = self.path(step)
        reader = HuggingFaceStorageReader(str(path))
        try:
            with _quiet():
                dcp.load(tensors, storage_reader=reader, no_dist=self._world.size == 1)
        except (RuntimeError, ValueError, AssertionError, dcp.api.CheckpointException) as error:
            raise RunError(f"{path}: tensors do not fit this model ({str(error).splitlines()[0]})") from error
        return read_json(path / MANIFEST)

    def finish(self) -> None:
        """Drop what only a resume would need: the run is complete."""
        if self._world.first:
            for step in self.steps():
                if step not in self._retained:
                    _remove(self.path(step))
        self._world.barrier()

    def _prune(self) -> None:
        passing = [step for step in self.steps() if step not in self._retained]
        for step in passing[: -self._keep_last]:
            _remove(self.path(step))


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments under stable names. AdamW's step count equals the run's step and stays in JSON."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"optim.{key}.{name}"] = optimizer.state[parameter][key]
    return tensors


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns that it runs in a single process, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to", category=UserWarning)
        yield


def _settle_header(path: Path) -> None:
    """Sort the free-form part of a safetensors header, which is written in random order.

    Equal runs then have equal files, and their hashes say so. Header: u64 length, JSON padded with spaces.
    """
    with open(path, "r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > length:
            raise RunError(f"{path}: header grew from {length} to {len(text)} bytes when put in order")
        file.seek(8)
        file.write(text.ljust(length))
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a reader never takes a half-removed one for whole."""
    hidden = path.with_name(f".{path.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)
