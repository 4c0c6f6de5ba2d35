"""Boundary budget: where the time goes between a producer's BF16 output and the end of the GEMMs it feeds.

A boundary is a place where operands change hands in a block, once forward and once backward:

    norm_qkv           X of q, k, v         forward   row view of X and of each W, Y = X W^T
    attention_output   X of o               backward  row view of dY and W for Dgrad, column views of dY and
    norm_gate_up       X of gate, up                  X for Wgrad, dX = dY W, dW = dY^T X
    silu_down          X of down

Stages of the serial schedule, each a pass of its own over memory:

    reduce     block maxima, and the chunk, stripe or tensor maximum that the format waits for
    quantise   everything else of the quantiser: rotation, scales, rounding (its time less that of `reduce`)
    layout     codes packed, column views transposed, scales with them
    gemm       decode and multiply

Times are medians in milliseconds over the repeats. The reference backend has no fused schedule; where a GPU
backend has one, `fp4core.bench.fused_boundary.rows(...)` adds its rows. What was not measured is left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fp4core import formats
from fp4core.ops.quantize import SRKey, matmul, quantize
from fp4core.recipe import LinearRecipe, Operand, Recipe, Study, study_routes
from fp4core.records import archive_stale, envelope, write_json, write_marker
from fp4core.reference import casts
from fp4core.reference import quantize as reference
from fp4core.train.commands.options import parser, resolve_study
from fp4core.train.distributed import device_record, pick_device

BOUNDARY_SCHEMA = "fp4core.boundary"
STAGES = ("reduce", "quantise", "layout", "gemm")


def main(argv: list[str]) -> int:
    """`python -m fp4core bench boundary`."""
    options = parser("bench boundary", "Time of reduce, quantise, layout and GEMM per boundary.", seed=False)
    options.add_argument("--results", type=Path, required=True, help="results directory of the study")
    arguments = options.parse_args(argv)
    study = resolve_study(arguments)
    path = budget(study, study_routes(study, arguments.recipes), results=arguments.results)
    if arguments.done:
        write_marker(arguments.done, path, recipe_hash=None, stage_hash=study.stage_hash("boundary"))
    return 0


def budget(study: Study, recipes: dict[str, Recipe], *, results: Path) -> Path:
    """Measure every route's boundaries on this machine and write boundary/budget.json; returns its path."""
    device = pick_device(study.train.device)
    torch.set_num_threads(study.train.threads)
    clock = Clock(study, device)
    record = device_record(device)
    shared = {"device": record["name"], "backend": "reference", "tokens": study.boundary.tokens}
    rows: list[dict[str, Any]] = []
    for number, (route, recipe) in enumerate(recipes.items(), start=1):
        for boundary, stages in route_stages(study, recipe, clock).items():
            for stage in STAGES:
                if stage in stages:
                    cell = {"route": route, "boundary": boundary, "stage": stage, "schedule": "serial"}
                    rows.append({**cell, "milliseconds": stages[stage], **shared})
        print(f"boundary {number}/{len(recipes)}: {route}", flush=True)
    rows += _fused_rows(study, recipes, device)
    head = envelope(
        BOUNDARY_SCHEMA,
        study=study.study,
        route=None,
        seed=None,
        recipe_hash=None,
        stage_hash=study.stage_hash("boundary"),
        device=record,
        backend="reference",
        inputs={route: recipe.hash for route, recipe in recipes.items()},
    )
    path = results / "boundary" / "budget.json"
    archive_stale(path, results, recipe_hash=None, stage_hash=head["stage_hash"], recipes=head["inputs"])
    write_json(path, {**head, "rows": rows})
    return path


def shapes(study: Study) -> dict[str, tuple[int, list[int]]]:
    """Boundary -> input features K and output features N of each linear it feeds."""
    m = study.model
    width, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    return {
        "norm_qkv": (m.hidden, [width, kv, kv]),
        "attention_output": (width, [m.hidden]),
        "norm_gate_up": (m.hidden, [m.ffn, m.ffn]),
        "silu_down": (m.ffn, [m.hidden]),
    }


def route_stages(study: Study, recipe: Recipe, clock: Clock) -> dict[str, dict[str, float]]:
    """Boundary and direction -> stage -> milliseconds, the mean over the model's blocks."""
    depth = study.model.blocks
    linears = [recipe.for_block(block, depth) for block in range(depth)]
    found: dict[str, dict[str, float]] = {}
    for boundary, (features, outputs) in shapes(study).items():
        for direction, measure in (("forward", _forward), ("backward", _backward)):
            total: dict[str, float] = {}
            for linear in linears:
                for stage, value in measure(linear, features, outputs, clock).items():
                    total[stage] = total.get(stage, 0.0) + value / depth
            found[f"{boundary}_{direction}"] = total
    return found


class Clock:
    """Measured milliseconds of single operands and GEMMs; equal ones are measured once."""

    def __init__(self, study: Study, device: torch.device) -> None:
        self.tokens = study.boundary.tokens
        self._repeats, self._warmup, self._device = study.boundary.repeats, study.boundary.warmup, device
        self.operand = cache(self._operand)
        self.gemm = cache(self._gemm)

    def _operand(self, rows: int, columns: int, operand: Operand, column_view: bool) -> dict[str, float]:
        """Stages of one view of a [rows, columns] tensor; nothing for BF16."""
        if operand.format == "bf16":
            return {}
        x = self._random(rows, columns)
        fmt, axis = formats.get(operand.format), 0 if column_view else 1
        hadamard = None if operand.hadamard == "none" else operand.hadamard
        key = SRKey(0, 1, 0) if operand.rounding == "stochastic" else None

        def quantiser() -> reference.Quantised:
            return reference.quantize_2d(x, fmt, axis=axis, hadamard=hadamard, key=key)

        done = quantiser()
        reduce = self._median(lambda: reductions(x, fmt, axis))
        whole = self._median(quantiser)
        layout = self._median(lambda: _layout(done, column_view))
        return {"reduce": reduce, "quantise": max(0.0, whole - reduce), "layout": layout}

    def _gemm(self, rows: int, columns: int, inner: int, left: str, right: str) -> float:
        """[rows, inner] times [columns, inner] transposed, operands decoded on the way."""
        a, b = self._random(rows, inner), self._random(columns, inner)
        if "bf16" in (left, right):
            decoded = [
                (lambda v=v: v.float())
                if name == "bf16"
                else quantize(v, name, backend="reference").dequantize
                for v, name in ((a, left), (b, right))
            ]
            return self._median(lambda: (decoded[0]() @ decoded[1]().mT).to(torch.bfloat16))
        qa, qb = quantize(a, left, backend="reference"), quantize(b, right, backend="reference")
        return self._median(lambda: matmul(qa, qb, dtype=torch.bfloat16, backend="reference"))

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rows * 65537 + columns)
        return torch.randn(rows, columns, generator=generator).to(self._device, torch.bfloat16)

    def _median(self, work: Callable[[], Any]) -> float:
        times = []
        for number in range(self._warmup + self._repeats):
            self._settle()
            began = time.perf_counter()
            work()
            self._settle()
            if number >= self._warmup:
                times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def reductions(x: torch.Tensor, fmt: formats.Format, axis: int) -> torch.Tensor:
    """The maxima a format needs before it can round its first value: blocks, then its outer domain."""
    view = x.float() if axis == 1 else x.float().mT
    rows, columns = fmt.block
    padded = torch.nn.functional.pad(view, (0, -view.shape[1] % columns, 0, -view.shape[0] % rows))
    tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    blocks = tiles.abs().amax((1, 3))
    if fmt.outer == "constant":
        return blocks
    return blocks.amax(1) if fmt.outer == "stripe" else blocks.amax()


def _layout(done: reference.Quantised, column_view: bool) -> torch.Tensor:
    codes, scale = casts.e2m1_codes(done.values), done.scales.byte
    if column_view:
        codes, scale = codes.mT.contiguous(), scale.mT.contiguous()
    return reference.pack(codes)


def _forward(linear: LinearRecipe, features: int, outputs: list[int], clock: Clock) -> dict[str, float]:
    total = dict(clock.operand(clock.tokens, features, linear.fprop.x, False))
    for out in outputs:
        _add(total, clock.operand(out, features, linear.fprop.w, False))
        gemm = clock.gemm(clock.tokens, out, features, linear.fprop.x.format, linear.fprop.w.format)
        _add(total, {"gemm": gemm})
    return total


def _backward(linear: LinearRecipe, features: int, outputs: list[int], clock: Clock) -> dict[str, float]:
    dgrad, wgrad, tokens = linear.dgrad, linear.wgrad, clock.tokens
    total = dict(clock.operand(tokens, features, wgrad.x, True))
    for out in outputs:
        _add(total, clock.operand(tokens, out, dgrad.dy, False))
        _add(total, clock.operand(out, features, dgrad.w, True))
        _add(total, clock.operand(tokens, out, wgrad.dy, True))
        _add(total, {"gemm": clock.gemm(tokens, features, out, dgrad.dy.format, dgrad.w.format)})
        _add(total, {"gemm": clock.gemm(out, features, tokens, wgrad.dy.format, wgrad.x.format)})
    return total


def _add(total: dict[str, float], more: dict[str, float]) -> None:
    for stage, value in more.items():
        total[stage] = total.get(stage, 0.0) + value


def _fused_rows(study: Study, recipes: dict[str, Recipe], device: torch.device) -> list[dict[str, Any]]:
    """Rows of the fused schedule where this machine has one; none on a CPU."""
    if device.type == "cpu":
        return []
    try:
        from fp4core.bench.fused_boundary import rows
    except ModuleNotFoundError:
        return []
    return rows(study, recipes, device)
