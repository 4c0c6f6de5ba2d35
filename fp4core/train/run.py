"""The long trajectory of one route: start or resume, train to the target, leave a record.

Ends in one of five ways: complete (summary.json), segment done (checkpoint at `until`), StopEarly
(checkpoint written; the same command goes on), Diverged (failure.json: non-finite numbers; the checkpoints
stay), RunError (anything else that a run cannot go on from).
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from fp4core.model.arithmetic import count_parameters
from fp4core.ops.linear import preferred_backend, resolve_backend
from fp4core.recipe import to_dict
from fp4core.records import envelope, read_json

from .checkpoint import Checkpoints
from .collection import scheduled_collection
from .diagnose import first_bad_tensor
from .distributed import World, check_replicas, device_record, peak_memory_gib
from .engine import Engine, Split, StepResult
from .errors import Diverged, StopEarly
from .events import Events, need_tensorboard
from .lock import run_lock
from .metrics import Metrics
from .progress import Progress
from .rundir import FAILURE_SCHEMA, MANIFEST_SCHEMA, SUMMARY_SCHEMA, Identity, RunDir
from .shards import check_data, open_training
from .stopping import StopWish
from .together import one_line_errors, together
from .utilisation import mfu


@dataclass(frozen=True)
class Request:
    """What to train and how far: to step `until` (None: the end) within `max_seconds` of process age.

    `tensorboard` writes events even where the study does not ask for them.
    """

    run: RunDir
    until: int | None = None
    max_seconds: float | None = None
    on_mismatch: Literal["archive", "refuse"] = "archive"
    tensorboard: bool = False

    def target(self) -> int:
        """Last step of this call. ValueError when `until` is outside the run."""
        steps = self.run.study.train.steps
        if self.until is not None and not 1 <= self.until <= steps:
            raise ValueError(f"--until {self.until} is outside the run's steps 1 to {steps}")
        return self.until or steps

    @property
    def events(self) -> bool:
        """Whether TensorBoard events are written."""
        return self.tensorboard or self.run.study.train.tensorboard


def train(request: Request, *, world: World) -> Path:
    """Train to the request's target; returns the record that proves it (summary or checkpoint manifest).

    A run that has diverged is tried again from its last checkpoint. Raises ValueError (settings, lock,
    foreign run), StopEarly, Diverged and RunError.
    """
    target, run = request.target(), request.run
    with contextlib.ExitStack() as stack:
        with together(world):
            if world.first:
                settings = run.study.train
                Split.of(global_batch=settings.global_batch, local_batch=settings.local_batch, world=world)
                check_replicas(world, settings.replicas)
                if request.events:
                    need_tensorboard()
                stack.enter_context(run_lock(run.path))
                archived = run.settle(run.identity(), on_mismatch=request.on_mismatch)
                run.path.mkdir(parents=True, exist_ok=True)
                run.file("failure.json").unlink(missing_ok=True)
                if archived:
                    print(archived, flush=True)
        if run.finished():
            return run.file("summary.json")
        with one_line_errors(world):
            trajectory = _Trajectory(request, world, run.identity())
            try:
                return trajectory.train(target)
            except Exception:  # an interrupt from the keyboard does not wait
                trajectory.checkpoints.close()
                raise


class _Trajectory:
    """The working parts of one call of `train`."""

    def __init__(self, request: Request, world: World, identity: Identity) -> None:
        run, study = request.run, request.run.study
        self.request, self.world, self.run, self.study, self.identity = request, world, run, study, identity
        record = check_data(run.data, share=(world.rank, world.size))
        stream = open_training(run.data, record, sequence=study.train.sequence)
        self.title = f"{run.recipe.route} s{run.seed}"
        self.checkpoints = Checkpoints(
            run.file("checkpoints"),
            world=world,
            retained=frozenset(study.all_cuts),
            keep_last=study.train.keep_last,
            beside=study.train.async_checkpoint,
        )
        self.start = self.checkpoints.newest(self._say)
        self.engine = Engine(
            study,
            run.recipe,
            run.seed,
            world=world,
            stream=stream,
            # a checkpoint fills every weight: nothing is drawn that would be overwritten
            initialise=None if self.start is None else _leave,
            note=self._say,
        )
        self.device = device_record(world.device)
        self.metrics = Metrics(run.file("metrics.parquet") if world.first else None)
        self.backend = resolve_backend(preferred_backend(run.recipe, study.backend), world.device.type)
        self.wall_s = 0.0
        self.replays = 0

    def _say(self, line: str) -> None:
        if self.world.first:
            print(f"{self.title} {line}", flush=True)

    def train(self, target: int) -> Path:
        log = self.run.file("run.log") if self.world.first else None
        start = self._resume()
        if self.world.first:
            self.run.write_manifest(self._head(MANIFEST_SCHEMA), self.identity, self._geometry(start))
        if start >= target:
            return self._record(start, target)
        events = self.run.file("tensorboard") if self.request.events and self.world.first else None
        progress = Progress(title=self.title, total=target, first=start, log=log, quiet=not self.world.first)
        with (
            progress,
            contextlib.closing(Events(events, after=start)) as self.events,
            StopWish(self.request.max_seconds) as wish,
            scheduled_collection() as collection,
        ):
            if start:
                progress.note(f"resumed from step {start}")
            for step in range(start + 1, target + 1):
                seconds = self._step(step, target, progress)
                collection.after()
                mine = wish.check(step_seconds=seconds, save_seconds=self.checkpoints.seconds)
                told = self.world.reduce(float(mine), float(self.checkpoints.failed()), op="max")
                if told[1]:
                    self.checkpoints.wait()
                stop = told[0] > 0
                if stop or step == target or self._due(step):
                    self._save(step)
                if stop and step < target:
                    self.checkpoints.wait()
                    reason = wish.reason or "another rank asked for it"
                    progress.note(f"stopped after step {step}: {reason}; checkpoint written")
                    raise StopEarly(
                        f"{self.title}: {reason}; run the same command again to go on from step {step}"
                    )
            self.checkpoints.wait()
        return self._record(target, target)

    def _resume(self) -> int:
        step = self.start
        if step is None:
            self.metrics.resume(0)
            return 0
        record = self.checkpoints.load(step, self.engine.model, self.engine.optimizer)
        differences = self.identity.differences(record)
        if differences:
            raise ValueError(f"{self.checkpoints.path(step)}: of another run: {'; '.join(differences)}")
        self._same_implementation()
        self.engine.resume(step, record)
        self.metrics.resume(step)
        self.wall_s, self.replays = record["wall_s"], record.get("replays", 0)
        return step

    def _same_implementation(self) -> None:
        """ValueError when this run would change between Transformer Engine and our own kernels."""
        manifest = self.run.file("manifest.json")
        before = read_json(manifest)["starts"][-1]["backend"] if manifest.is_file() else self.backend
        if before != self.backend and "te" in (before, self.backend):
            raise ValueError(
                f"{self.run.path}: trained by backend {before} so far, this start would use {self.backend}; "
                "their numbers differ: go on where the first one runs (or set the study's backend), or move "
                "the directory away to begin a new run"
            )

    def _step(self, step: int, target: int, progress: Progress) -> float:
        began = time.perf_counter()
        result = self.engine.step(step)
        seconds = time.perf_counter() - began
        self.wall_s += seconds
        if not result.finite:
            self._fail(step, result)
        self.replays += result.replayed
        rate = self.engine.tokens_per_step / seconds
        train, shape = self.study.train, self.study.model
        share = mfu(rate / self.world.size, shape, train.sequence, self.device["name"])
        if step in (1, train.steps) or step % train.log_every == 0:
            row = {
                "step": step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "tokens": step * self.engine.tokens_per_step,
                "tokens_per_s": rate,
                "seconds": seconds,
                "memory_gib": self.world.reduce(peak_memory_gib(self.world.device), op="max")[0],
                "time_utc": time.time(),
                "replays": self.replays,
            }
            self.metrics.add(**row)
            self.events.add(row, share)
        progress.step(step, loss=result.loss, tokens_per_s=rate, mfu=share, last=step == target)
        return seconds

    def _due(self, step: int) -> bool:
        return step in self.study.all_cuts or step % self.study.train.checkpoint_every == 0

    def _save(self, step: int) -> None:
        self.metrics.flush()
        self.events.flush()
        state = {
            "route": self.run.recipe.route,
            "seed": self.run.seed,
            **vars(self.identity),
            "tokens": step * self.engine.tokens_per_step,
            "next_sequence": step * self.study.train.global_batch,
            "wall_s": self.wall_s,
            "replays": self.replays,
            "world_size": self.world.size,
            "model": to_dict(self.study.model),
            **self.engine.extra_state(),
        }
        self.checkpoints.save(step, self.engine.model, self.engine.optimizer, state)

    def _record(self, step: int, target: int) -> Path:
        """The file that proves the target: summary.json at the end, else the checkpoint's manifest."""
        if target < self.study.train.steps:
            path = self.checkpoints.path(target) / "checkpoint.json"
            return path if path.is_file() else self.run.file("manifest.json")
        self.checkpoints.finish()
        if self.world.first:
            self.metrics.flush()
            rows = {row["step"]: row for row in self.metrics.rows}
            endpoint = self.study.train.endpoint_step
            extra = {
                "steps": step,
                "tokens": step * self.engine.tokens_per_step,
                "wall_s": self.wall_s,
                "final_loss": rows[step]["loss"],
                "endpoint": {"step": endpoint, "loss": rows[endpoint]["loss"]},
            }
            self.run.write_summary(self._head(SUMMARY_SCHEMA), self.identity, extra)
        self.world.barrier()
        return self.run.file("summary.json")

    def _fail(self, step: int, result: StepResult) -> None:
        tensor = first_bad_tensor(self.engine, step)
        self.checkpoints.close()
        saved = self.checkpoints.steps()
        last = self.checkpoints.path(saved[-1]).name if saved else "none"
        found = {
            "step": step,
            "loss": repr(result.loss),
            "grad_norm": repr(result.grad_norm),
            "first_bad_tensor": tensor,
            "last_good_checkpoint": last,
        }
        if self.world.first:
            self.metrics.flush()
            self.run.write_failure(self._head(FAILURE_SCHEMA), self.identity, found)
        raise Diverged(self.run.failure_message(found), self.run.file("failure.json"))

    def _geometry(self, start: int) -> dict[str, Any]:
        train, split = self.study.train, self.engine.split
        return {
            "first_step": start + 1,
            "world_size": self.world.size,
            "local_batch": split.local_batch,
            "accumulation": split.micro_steps,
            "activation_checkpoint": train.activation_checkpoint,
            "compile": train.compile,
            "threads": train.threads,
            "parameters": count_parameters(self.study.model),
        }

    def _head(self, schema: str) -> dict[str, Any]:
        return envelope(
            schema,
            study=self.study.study,
            route=self.run.recipe.route,
            seed=self.run.seed,
            recipe_hash=self.identity.recipe_hash,
            stage_hash=self.identity.stage_hash,
            device=self.device,
            backend=self.backend,
            inputs={"data": self.identity.data_sha256},
        )


def _leave(model: nn.Module) -> None:
    """Initialise nothing."""
