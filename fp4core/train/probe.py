"""Throughput probe: tokens/s per device over a window of steps, compilation and warm-up excluded.

Each route is measured at its selected geometry (its own local batch and activation checkpointing) and, when
the study names one, at a geometry matched over all routes, so that a table can tell the format from the
batch. A step's time is that of the slowest rank (see `timed_steps`). Equal geometries are measured once. A
geometry that comes upon non-finite numbers has no rate; the record's `failed` says so.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp4core.ops.linear import preferred_backend, resolve_backend
from fp4core.recipe import Geometry, Recipe, Study
from fp4core.records import archive_stale, envelope, write_json, write_marker

from .collection import collect_engines, scheduled_collection
from .distributed import World, device_record, peak_memory_gib
from .engine import Engine
from .errors import NonFinite
from .progress import Progress
from .shards import TokenStream, check_data, open_training
from .utilisation import mfu

PROBE_SCHEMA = "fp4core.probe"


def probe(study: Study, recipe: Recipe, seed: int, *, results: Path, done: Path | None, world: World) -> Path:
    """Measure the route and write probes/<route>/s<seed>.json; returns its path.

    Non-finite numbers are an outcome, noted in record and marker; without a marker NonFinite is raised after
    the record is written.
    """
    data = check_data(results / "data", share=(world.rank, world.size))
    stream = open_training(results / "data", data, sequence=study.train.sequence)
    measured: dict[Geometry, dict[str, Any]] = {}
    rows, failed = [], {}
    for name, geometry in geometries(study, recipe.route).items():
        shared = geometry in measured
        try:
            if not shared:
                measured[geometry] = _measure(study, recipe, seed, geometry, stream=stream, world=world)
        except NonFinite as error:
            failed[name] = str(error)
            continue
        rows.append({"geometry": name, "same_measurement": shared, **measured[geometry]})
    path = results / "probes" / recipe.route / f"s{seed}.json"
    if world.first:
        head = envelope(
            PROBE_SCHEMA,
            study=study.study,
            route=recipe.route,
            seed=seed,
            recipe_hash=recipe.hash,
            stage_hash=study.stage_hash("probe"),
            device=device_record(world.device),
            backend=resolve_backend(preferred_backend(recipe, study.backend), world.device.type),
            inputs={"data": data["data_sha256"]},
        )
        archive_stale(path, results, recipe_hash=recipe.hash, stage_hash=head["stage_hash"])
        write_json(path, {**head, "measurements": rows, "failed": failed})
        if done:
            note = "; ".join(failed.values()) or None
            write_marker(done, path, recipe_hash=recipe.hash, stage_hash=head["stage_hash"], note=note)
    if failed and not done:
        raise NonFinite("; ".join(failed.values()))
    return path


def geometries(study: Study, route: str) -> dict[str, Geometry]:
    """Name -> geometry of the measurements that the study asks for."""
    train = study.train
    default = Geometry(train.local_batch, train.activation_checkpoint)
    found = {"selected": study.probe.selected.get(route, default)}
    if study.probe.matched is not None:
        found["matched"] = study.probe.matched
    return found


def timed_steps(
    engine: Engine, steps: int, *, title: str, seconds: list[float] | None = None
) -> tuple[list[float], list[float]]:
    """Make updates 1..steps; returns their losses and the seconds of the slowest rank for each.

    A step's seconds are from the end of the step before it to its own: the moments at which the host has seen
    that gradients are exact and finite. The GPU's queue is drained before the first step and after the last,
    not between them, as in training: the update of a step is made in the next one's time, and none in the
    first.
    """
    losses, times = [], []
    _settle(engine.world.device)
    ended = time.perf_counter()
    with (
        Progress(title=title, total=steps, first=0, log=None, quiet=not engine.world.first) as progress,
        scheduled_collection() as collection,
    ):
        for step in range(1, steps + 1):
            result = engine.step(step)
            began, ended = ended, time.perf_counter()
            slowest = engine.world.reduce(ended - began, op="max")[0]
            if not result.finite:
                raise NonFinite(f"{title}: step {step} gave loss {result.loss}; the rate would mean nothing")
            losses.append(result.loss)
            times.append(slowest)
            rate = engine.tokens_per_step / slowest
            progress.step(step, loss=result.loss, tokens_per_s=rate, mfu=None, last=step == steps)
            collection.after()
    _settle(engine.world.device)
    return losses, times


def rates(times: list[float], window: tuple[int, int], tokens_per_device: float) -> dict[str, float]:
    """Median, 10th and 90th percentile of tokens/s over steps window[0]..window[1], both included."""
    inside = tokens_per_device / np.array(times[window[0] - 1 : window[1]])
    p10, median, p90 = np.percentile(inside, [10, 50, 90])
    return {"tokens_per_s": float(median), "p10": float(p10), "p90": float(p90)}


def _measure(
    study: Study, recipe: Recipe, seed: int, geometry: Geometry, *, stream: TokenStream, world: World
) -> dict[str, Any]:
    collect_engines()
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    engine = Engine(
        study,
        recipe,
        seed,
        world=world,
        stream=stream,
        local_batch=geometry.local_batch,
        activation_checkpoint=geometry.activation_checkpoint,
    )
    title = f"probe {recipe.route} local batch {geometry.local_batch}"
    _, times = timed_steps(engine, study.probe.steps, title=title)
    found = rates(times, study.probe.window, engine.tokens_per_step / world.size)
    share = mfu(found["tokens_per_s"], study.model, study.train.sequence, device_record(world.device)["name"])
    return {
        **found,
        "mfu_percent": None if share is None else 100 * share,
        "memory_gib": world.reduce(peak_memory_gib(world.device), op="max")[0],
        "world_size": world.size,
        "local_batch": geometry.local_batch,
        "accumulation": engine.split.micro_steps,
        "activation_checkpoint": geometry.activation_checkpoint,
        "window_first": study.probe.window[0],
        "window_last": study.probe.window[1],
        "step_seconds": times,
    }


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
