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

Asynchronously, the step waits until its tensors are copied to host memory (and until the checkpoint before
is written: one at a time); a thread of each rank then writes, and agrees with the other ranks over a gloo
group of its own. Files and order of events are the same.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from fp4core.records import read_json, sha256_file, sync_directory, write_json

from .distributed import TIMEOUT, World
from .errors import EchoedRunError, RunError
from .shard_files import ShardWriter, Staging

MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8})")


def checkpoint_name(step: int) -> str:
    """Directory name of the checkpoint at `step`."""
    return f"step-{step:08d}"


def verify(path: Path, *, share: tuple[int, int] = (0, 1)) -> str | None:
    """Why the checkpoint at `path` cannot be used, or None when every byte is as it was written.

    `share` = (r, n) reads the r-th of n parts of its files, for n processes that check it together.
    """
    manifest = Path(path) / MANIFEST
    if not manifest.is_file():
        return f"{MANIFEST} is missing"
    try:
        files = read_json(manifest)["files"]
    except (ValueError, KeyError, OSError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, expected in list(files.items())[share[0] :: share[1]]:
        file = Path(path) / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, needed {expected['bytes']}"
        if sha256_file(file) != expected["sha256"]:
            return f"{name} does not have the SHA-256 it was written with"
    return None


class Checkpoints:
    """The checkpoints of one run directory. `retained` steps are never removed; of others the last stay.

    `beside` writes them asynchronously; errors of the writing come out of `wait`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        world: World,
        retained: frozenset[int],
        keep_last: int,
        beside: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self._world, self._retained, self._keep_last = world, retained, max(1, keep_last)
        self._staging = Staging() if beside else None
        # collectives of a thread need a group in which nothing else is said
        self._writers = world.aside() if beside else world
        self._writing: _Writing | None = None
        self._seconds = 0.0
        with _agreed(world):
            if world.first:
                self.directory.mkdir(parents=True, exist_ok=True)
                for leftover in self.directory.glob(".step-*"):
                    shutil.rmtree(leftover)

    def path(self, step: int) -> Path:
        return self.directory / checkpoint_name(step)

    def steps(self) -> list[int]:
        """Steps that have a directory, ascending."""
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    @property
    def seconds(self) -> float:
        """What a checkpoint that is begun now will take until it is on disk, by the last one."""
        return self._seconds if self._writing is None else 2 * self._seconds

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> Path:
        """Write the checkpoint of `step` and drop those that the policy no longer keeps; returns its path.

        Asynchronously it is complete after `wait`.
        """
        self.wait()
        began = time.monotonic()
        tensors, work = _tensors(model, optimizer), self.directory / f".{checkpoint_name(step)}"
        with _agreed(self._world):
            if self._world.first:
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
        indices = {name: 1 if name.startswith("model.") else 2 for name in tensors}
        writer = ShardWriter(work, indices=indices, staging=self._staging)
        with _quiet():
            dcp.save(tensors, storage_writer=writer, no_dist=self._world.size == 1)
        complete = functools.partial(self._complete, step, writer, work, state, began)
        if self._staging is None:
            complete()
        else:
            self._writing = _Writing(complete)
            self._writing.start()
        return self.path(step)

    def failed(self) -> bool:
        """True when an asynchronous checkpoint could not be written; `wait` then raises."""
        return self._writing is not None and not self._writing.is_alive() and self._writing.error is not None

    def wait(self) -> None:
        """Wait until the checkpoint in flight is on disk; raises what kept it from getting there."""
        writing = self._writing
        if writing is not None:
            writing.join()
            self._writing = None
            if writing.error is not None:
                raise writing.error

    def close(self) -> None:
        """Wait for the checkpoint in flight at the end of a run that fails anyway: its errors are dropped."""
        if self._writing is not None:
            self._writing.join(TIMEOUT.total_seconds())
            self._writing = None

    def _complete(
        self, step: int, writer: ShardWriter, work: Path, state: dict[str, Any], began: float
    ) -> None:
        """Every rank's files, then the manifest, then the name. An error of one rank is every rank's."""
        files: dict[str, Any] = {}
        with _agreed(self._writers):
            files = writer.write()
        files = {name: entry for part in self._writers.gather(files) for name, entry in part.items()}
        with _agreed(self._writers):
            if self._world.first:
                record = {
                    "schema": {"name": "fp4core.checkpoint", "version": 1},
                    "step": step,
                    **state,
                    "files": files,
                }
                write_json(work / MANIFEST, record)
                final = self.path(step)
                if final.exists():
                    _remove(final)
                work.rename(final)
                sync_directory(self.directory)
                self._prune()
        self._seconds = time.monotonic() - began

    def newest(self, note: Callable[[str], None]) -> int | None:
        """Newest step whose checkpoint is whole; every bad one is set aside with one line through `note`.

        The ranks read a checkpoint's files together.
        """
        steps = self._world.broadcast({"steps": self.steps() if self._world.first else []})["steps"]
        for step in reversed(steps):
            mine = verify(self.path(step), share=(self._world.rank, self._world.size))
            found = [part["problem"] for part in self._world.gather({"problem": mine})]
            problem = next((text for text in found if text), None)
            if problem is None:
                return step
            with _agreed(self._world):
                if self._world.first:
                    aside = self.directory / f"corrupt-{checkpoint_name(step)}"
                    shutil.rmtree(aside, ignore_errors=True)
                    self.path(step).rename(aside)
                    note(
                        f"checkpoint {checkpoint_name(step)} is not usable: {problem}; "
                        f"set aside as {aside.name}, going back to the one before it"
                    )
        return None

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
        with _agreed(self._world):
            if self._world.first:
                for step in self.steps():
                    if step not in self._retained:
                        _remove(self.path(step))

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


class _Writing(threading.Thread):
    """Writes one checkpoint. A daemon: a process that has to end never waits for a disk that hangs."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error


@contextlib.contextmanager
def _agreed(world: World) -> Iterator[None]:
    """Leave the block together: what fails on one rank is raised there, and as its echo on the others.

    A barrier, too: no rank is past the block before all have done their part of it.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    errors = [part["error"] for part in world.gather({"error": None if failure is None else str(failure)})]
    if failure is not None:
        raise failure
    for rank, error in enumerate(errors):
        if error is not None:
            raise EchoedRunError(f"rank {rank}: {error}")


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a reader never takes a half-removed one for whole."""
    hidden = path.with_name(f".{path.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)
