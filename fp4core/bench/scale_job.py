"""One measured run of the trainer on N GPUs: what ``scale`` starts N times, once per rank.

    python -m fp4core.bench.scale_job JOB_JSON OUT        with RANK, WORLD_SIZE, ... as torchrun sets them

The engine, its sharding, guard, optimizer and clipping are those of ``fp4core train``; only the tokens and
the initial weights are made here, since neither a corpus nor a minute of random numbers is what is measured.

Tokens: t_i = successor(x_(i-1)) with probability 1/2, else x_i, where x is drawn from a Zipf law over 4096
symbols spread over the vocabulary and successor is a fixed permutation of them. A model that trains first
learns the unigrams, then the pairs, so its loss falls within a few steps.

A step's seconds are from the end of the step before it to its own, of the slowest rank: the moments at which
the host has seen that gradients are exact and finite. The GPU's queue is drained once before the first step
and after the last, not between them, as in training: the update of a step is made in the next one's time, and
none in the first.

Rank 0 rewrites OUT after every step: a run that is cut short leaves what it has.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fp4core.bench import trace
from fp4core.model.build import init_std
from fp4core.recipe import Study, load_recipe, load_study
from fp4core.records import write_json
from fp4core.train.collection import scheduled_collection
from fp4core.train.distributed import World, device_record, is_out_of_memory, joined, memory_line
from fp4core.train.engine import Engine
from fp4core.train.utilisation import mfu

_SYMBOLS = 4096


@dataclasses.dataclass(frozen=True)
class Job:
    """One run. `tokens per step = gpus x local_batch x accumulation x sequence`.

    `sharded` goes through FSDP with one GPU too: the whole path, where there is no second one. `profile`
    makes one step more and records what rank 0's GPU did in it (`fp4core.bench.trace`).
    """

    route: str
    gpus: int = 2
    blocks: int = 32
    local_batch: int = 1
    accumulation: int = 4
    activation_checkpoint: str = "none"
    gather: str = "bf16"
    keep_gathered: bool = True
    replicas: int = 1
    exchange: bool = True
    deterministic: bool = False
    sharded: bool = False
    compile: bool = True
    sequence: int = 8192
    steps: int = 12
    lr: float = 1.0e-4
    window: int = 5
    size: str = "8b"
    device: str = "cuda"
    profile: bool = False

    @property
    def title(self) -> str:
        shape = f"{self.local_batch}x{self.accumulation} {self.activation_checkpoint}"
        again = "" if self.keep_gathered else " gathered anew"
        return f"{self.route} {self.gpus} GPU {self.blocks} blocks {shape}{again}"

    def geometry(self) -> tuple[Any, ...]:
        """What must be equal for two routes to be compared."""
        settings = dataclasses.asdict(self)
        return tuple(v for k, v in settings.items() if k not in ("route", "steps", "window", "profile"))

    def experiment(self) -> tuple[Any, ...]:
        """What must be equal for two routes to have trained the same model on the same tokens."""
        apart = (
            *("route", "steps", "window", "profile", "local_batch", "accumulation", "activation_checkpoint"),
            *("keep_gathered", "exchange"),
        )
        settings = dataclasses.asdict(self)
        tokens = self.gpus * self.local_batch * self.accumulation * self.sequence
        return (tokens, *(v for k, v in settings.items() if k not in apart))

    def study(self) -> Study:
        """The report's study with this job's depth, geometry and length."""
        base = load_study("report")
        model = dataclasses.replace(base.model, blocks=self.blocks, max_position=self.sequence)
        if self.size == "tiny":
            model = dataclasses.replace(
                model, hidden=64, ffn=96, heads=2, kv_heads=1, head_dim=32, vocab=5000
            )
        train = dataclasses.replace(
            base.train,
            sequence=self.sequence,
            global_batch=self.gpus * self.local_batch * self.accumulation,
            local_batch=self.local_batch,
            steps=self.steps,
            lr=self.lr,
            warmup=4,
            cuts=(self.steps,),
            endpoint_step=self.steps,
            log_every=1,
            activation_checkpoint=self.activation_checkpoint,
            compile=self.compile,
            device=self.device,
            gather=self.gather,
            keep_gathered=self.keep_gathered,
            replicas=self.replicas,
            exchange=self.exchange,
            deterministic=self.deterministic,
        )
        return dataclasses.replace(base, model=model, train=train)


class Pairs:
    """The stream of the module's text, by the interface of the trainer's token stream."""

    def __init__(self, sequence: int, vocab: int) -> None:
        rng = np.random.default_rng(0)
        count = min(_SYMBOLS, vocab)
        self.sequence, self._symbols = sequence, rng.permutation(vocab)[:count].astype(np.int64)
        weights = 1.0 / np.arange(1, count + 1)
        self._places = np.cumsum(weights / weights.sum())
        self._next = rng.permutation(count)

    def batch(self, first_place: int, count: int, *, seed: int) -> np.ndarray:
        """Sequences at places first_place.., int64 [count, S + 1]."""
        return np.stack([self._window(p, seed) for p in range(first_place, first_place + count)])

    def _window(self, place: int, seed: int) -> np.ndarray:
        rng = np.random.default_rng((seed, place))
        draws = rng.random(self.sequence + 1)
        ranks = np.searchsorted(self._places, draws).clip(max=len(self._symbols) - 1)
        follow = rng.random(self.sequence) < 0.5
        ranks[1:] = np.where(follow, self._next[ranks[:-1]], ranks[1:])
        return self._symbols[ranks]


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Weights of `init_weights`'s distribution, drawn on the device: seconds instead of minutes."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if parameter.dim() == 1:
            local.fill_(1.0)
            continue
        digest = hashlib.sha256(f"{os.environ.get('RANK', '0')}/{name}".encode()).digest()
        generator = torch.Generator(local.device).manual_seed(int.from_bytes(digest[:7], "little"))
        std = init_std(model.config, name)
        local.normal_(0.0, std, generator=generator)
        if name == "lm_head.weight":
            local.clamp_(-3 * std, 3 * std)


def run(job: Job, out: Path, deadline: float | None) -> int:
    """Make the job's steps; returns 0, or 1 after an error that is in the record."""
    record: dict[str, Any] = {"job": dataclasses.asdict(job), "title": job.title, "done": False}
    first = os.environ.get("RANK", "0") == "0"
    began = time.monotonic()
    try:
        with joined(job.device) as world:
            _measure(job, world, record, out, deadline, began)
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:400] if str(error) else ''}"
        record["out_of_memory"] = isinstance(error, RuntimeError) and is_out_of_memory(error)
        if record["out_of_memory"] and (said := memory_line(error)) and said[:400] not in record["error"]:
            record["error"] += f" ... {said[:400]}"
        print(f"[{job.title}] rank {os.environ.get('RANK', '0')}: {record['error']}", flush=True)
        # rank 0's record is the run's, unless rank 0 only saw that its peer had gone
        write_json(out if first else out.with_suffix(f".rank{os.environ['RANK']}.json"), record)
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        # a peer may wait in a collective; nothing is left to agree on
        os._exit(1)
    return 0


def _measure(
    job: Job, world: World, record: dict[str, Any], out: Path, deadline: float | None, began: float
) -> None:
    def say(text: str) -> None:
        if world.first:
            print(f"[{job.title}] {time.monotonic() - began:6.1f} s  {text}", flush=True)

    study, recipe = job.study(), load_recipe(job.route)
    if job.sharded and world.size == 1:
        dist.init_process_group("nccl" if job.device == "cuda" else "gloo", rank=0, world_size=1)
    record["device"] = device_record(world.device)
    record["recipe_hash"] = recipe.hash
    say(f"{record['device']['name']}, world of {world.size}")
    engine = Engine(
        study,
        recipe,
        0,
        world=world,
        stream=Pairs(job.sequence, study.model.vocab),
        head_chunk=max(32, -(-job.local_batch * job.sequence // 32) * 32),
        initialise=fill,
    )
    record["parameters"] = sum(p.numel() for p in engine.model.parameters())
    record["setup_s"] = time.monotonic() - began
    say(f"{record['parameters']:,} parameters, {_memory(world)['memory_gib']:.1f} GiB")
    rows: list[dict[str, Any]] = []
    slowest = 0.0
    _settle(world)
    ended = time.perf_counter()
    with scheduled_collection() as collection:
        for step in range(1, job.steps + 1):
            late = deadline is not None and time.time() + 1.5 * slowest > deadline
            if world.reduce(float(late), op="max")[0]:
                record["stopped"] = f"no time left for step {step}"
                say(record["stopped"])
                break
            result = engine.step(step)
            start, ended = ended, time.perf_counter()
            seconds = world.reduce(ended - start, op="max")[0]
            slowest = seconds if step > 1 else 0.0
            row = {
                "step": step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "seconds": seconds,
                "replayed": result.replayed,
            }
            if not result.finite:
                raise ValueError(f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}")
            rows.append(row)
            memory = _memory(world)
            rate = engine.tokens_per_step / seconds
            say(
                f"step {step}/{job.steps}  loss {result.loss:.4f}  norm {result.grad_norm:.3f}  "
                f"{seconds:.3f} s  {rate:,.0f} tokens/s  {memory['memory_gib']:.1f} GiB"
                + ("  replayed" if result.replayed else "")
            )
            record |= memory | {"steps": rows} | _rates(rows, job, engine, world)
            if world.first:
                write_json(out, record)
            collection.after()
    _settle(world)
    record["done"] = len(rows) == job.steps
    if job.profile and record["done"]:
        record["profile"] = _profile(engine, job.steps + 1, world)
        say(f"profile: {record['profile']}")
    record["total_s"] = time.monotonic() - began
    if world.first:
        write_json(out, record)


def _rates(rows: list[dict[str, Any]], job: Job, engine: Engine, world: World) -> dict[str, Any]:
    """Median over the window's steps, those included that were made twice."""
    from fp4core.ops import carrier

    window = [row for row in rows if row["step"] >= job.window]
    found: dict[str, Any] = {
        "tokens_per_step": engine.tokens_per_step,
        "carrier": carrier.counters(engine.model) | {"misfit_views": carrier.misfit_views(engine.model)},
    }
    if not window:
        return found
    seconds = statistics.median(row["seconds"] for row in window)
    once = [row["seconds"] for row in window if not row["replayed"]]
    rate = engine.tokens_per_step / seconds
    device = device_record(world.device)["name"]
    share = mfu(rate / world.size, engine.study.model, job.sequence, device)
    return found | {
        "window": [job.window, rows[-1]["step"]],
        "median_s": seconds,
        "median_once_s": statistics.median(once) if once else None,
        "replays": sum(row["replayed"] for row in rows),
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / world.size,
        "mfu": share,
    }


def _profile(engine: Engine, step: int, world: World) -> dict[str, Any]:
    """Kinds of rank 0's kernels in one step that every rank makes; {} on the others and without a GPU."""
    if not world.first or world.device.type != "cuda":
        engine.step(step)
        return {}
    return trace.record(lambda: engine.step(step))


def _memory(world: World) -> dict[str, float]:
    """Peaks of the fullest GPU, GiB."""
    if world.device.type != "cuda":
        return {"memory_gib": 0.0, "reserved_gib": 0.0}
    peak = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    allocated, reserved = world.reduce(*map(float, peak), op="max")
    return {"memory_gib": allocated / 2**30, "reserved_gib": reserved / 2**30}


def _settle(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def main(argv: list[str]) -> int:
    """JOB_JSON OUT [DEADLINE]: DEADLINE in seconds since 1970."""
    job = Job(**json.loads(argv[0]))
    return run(job, Path(argv[1]), float(argv[2]) if len(argv) > 2 else None)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
