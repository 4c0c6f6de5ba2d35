"""Boundary budget of the carrier backend on a GPU: serial and fused, per boundary and route.

    python -m fp4core.bench.fused_boundary [--tokens 16384] [--routes mxfp4_sr,...] [--out FILE]

Boundaries are those of ``fp4core.bench.boundary``. Stages here:

    reduce     the pass for chunk, stripe or tensor maxima, of formats that wait for one
    quantise   everything else between two products: norm, SiLU or rotation, rounding, every view
    gemm       the products that follow

Schedules are those of ``fp4core.ops.carrier_boundary``: serial; fused, which a block runs; and, in this
command's record only, single, one kernel for a whole backward boundary. Formats that wait for a maximum have
the same schedule three times. The layout is never a pass of its own on a GPU. Milliseconds, medians; weights
are encoded before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp4core.bench import common
from fp4core.bench.floors import Products
from fp4core.bench.workload import ROUTES, GroupData, config_8b
from fp4core.recipe import ModelConfig, Recipe, Study, load_recipe


def rows(study: Study, recipes: dict[str, Recipe], device: torch.device) -> list[dict[str, Any]]:
    """Tidy rows (boundary.csv) of a study's model; none for models that the fused kernels do not take."""
    found: list[dict[str, Any]] = []
    for route, recipe in recipes.items():
        found += measure(study.model, route, recipe, study.boundary.tokens, device)
    return found


def measure(
    config: ModelConfig,
    route: str,
    recipe: Recipe,
    tokens: int,
    device: torch.device,
    schedules: tuple[str, ...] = ("serial", "fused"),
) -> list[dict[str, Any]]:
    """Rows of one route; empty for BF16 routes and for shapes without whole tiles."""
    from fp4core.ops import spec as specs

    linear = recipe.for_block(0, config.blocks)
    dims = (config.hidden, config.ffn, config.heads * 128, config.kv_heads * 128, tokens)
    if specs.is_plain_bf16(linear) or config.head_dim != 128 or any(n % 128 for n in dims):
        return []
    work = _Boundaries(config, specs.encode(linear), tokens, device)
    out = []
    for name, boundary, products in work.cases():
        times = {"reduce": work.reduce_ms(name), "gemm": products()}
        for schedule in schedules:
            ms = work.boundary_ms(boundary, schedule)
            stages = {"quantise": max(0.0, ms - times["reduce"]), **times}
            for stage, value in stages.items():
                if value:
                    out.append(
                        {
                            "route": route,
                            "boundary": name,
                            "stage": stage,
                            "schedule": schedule,
                            "milliseconds": value,
                            "device": torch.cuda.get_device_name(device),
                            "backend": "carrier",
                            "tokens": tokens,
                        }
                    )
    return out


class _Boundaries:
    """A block's tensors and groups, and its boundaries as calls."""

    def __init__(self, config: ModelConfig, spec: str, tokens: int, device: torch.device) -> None:
        from fp4core.ops import carrier_groups
        from fp4core.ops import spec as specs

        carrier_groups.forget()
        self.generator = torch.Generator(device=device).manual_seed(0)
        self.device, self.tokens = device, tokens
        h, f, q, kv = config.hidden, config.ffn, config.heads * 128, config.kv_heads * 128
        outs = ([q, kv, kv], [h], [f, f], [h])
        self.groups, self.weights, index = [], [], 0
        for k, widths in zip((h, q, h, f), outs):
            ids = [specs.producer_id(0, index + i) for i in range(len(widths))]
            self.groups.append(carrier_groups.group(ids, spec, device))
            self.weights.append([self.normal(n, k, scale=0.02) for n in widths])
            index += len(widths)
        self.x, self.delta, self.dy = (self.normal(tokens, h, scale=s) for s in (1.0, 0.5, 1e-3))
        self.mixed, self.dh = self.normal(tokens, q), self.normal(tokens, f, scale=1e-3)
        self.gate_up = self.normal(tokens, 2 * f)
        length = min(tokens, 8192)
        shape = (tokens // length, length)
        self.dqkv = [self.normal(*shape, n // 128, 128, scale=1e-3).transpose(1, 2) for n in (q, kv, kv)]
        angle = torch.rand(length, 64, device=device)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.norm = torch.ones(h, device=device)
        self.rstd = torch.ones(tokens, device=device)
        self.state = torch.tensor([1, 2, 0], device=device)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, device=self.device, generator=self.generator) * scale
        return values.to(torch.bfloat16)

    def cases(self) -> list[tuple[str, Callable[[], Any], Callable[[], float]]]:
        """(name, boundary, time of the products that follow)."""
        from fp4core.ops import carrier_boundary as b
        from fp4core.ops.carrier_encode import encode, encode_gradients
        from fp4core.ops.carrier_plan import X_COL, X_ROW

        qkv, o, ffn, down = self.groups
        f = self.dh.shape[1]
        gate, up = self.gate_up[:, :f], self.gate_up[:, f:]
        dy, state = self.dy, self.state

        def norm_back(g: Any, before: Any, scales: Any = None) -> Any:
            return b.norm_backward(g, before, dy, self.x, self.delta, self.norm, self.rstd, state, scales)

        def down_backward() -> Any:
            scales = b.gradient_scales(down, dy)
            rows, _ = encode_gradients(down, [dy], state, True, True, scales)
            return rows, b.silu_backward(ffn, down, [self.dh], gate, up, state, lambda h: h, scales)

        def qkv_backward() -> Any:
            # these gradients have no outliers, which the product after it would complete
            rows, cols, scales, _ = b.rope_backward(qkv, self.dqkv, self.cos, self.sin, state)
            return rows, cols, norm_back(qkv, None, scales)

        def mixed(row: int | None, col: int | None) -> Any:
            return encode(o, self.mixed, row, col, state, o.producers[0])

        forward = [
            lambda: b.norm_forward(qkv, self.x, None, self.norm, 1e-5),
            lambda: mixed(X_ROW, None),
            lambda: b.norm_forward(ffn, self.x, self.delta, self.norm, 1e-5),
            lambda: b.silu_forward(down, gate, up),
        ]
        backward = [qkv_backward, lambda: mixed(None, X_COL), lambda: norm_back(ffn, o), down_backward]
        cases = []
        for i, name in enumerate(("norm_qkv", "attention_output", "norm_gate_up", "silu_down")):
            cases.append((f"{name}_forward", forward[i], self.fprop(i)))
            cases.append((f"{name}_backward", backward[i], self.grads(i)))
        return cases

    def _products(self, i: int) -> Products:
        g, weights = self.groups[i], self.weights[i]
        x = self.normal(self.tokens, weights[0].shape[1])
        grads = [self.normal(self.tokens, w.shape[0], scale=1e-3) for w in weights]
        return Products(GroupData("", x, weights, grads, list(g.producers)), g.spec)

    def fprop(self, i: int) -> Callable[[], float]:
        """Time of a group's Fprop."""
        return lambda: common.time_ms(self._products(i).forward, calls=2, replays=3)

    def grads(self, i: int) -> Callable[[], float]:
        """Time of a group's Dgrad and Wgrad."""
        return lambda: common.time_ms(self._products(i).backward, calls=2, replays=3)

    def boundary_ms(self, boundary: Callable[[], Any], schedule: str) -> float:
        """Milliseconds of a boundary once its references have settled."""
        from fp4core.ops import carrier_boundary, carrier_groups

        def settled() -> float:
            boundary()
            for g in self.groups:
                g.deferred = True
            carrier_groups.read(self.groups)
            return common.time_ms(boundary, calls=2, replays=5)

        with carrier_boundary.schedule(schedule):
            return settled()

    def reduce_ms(self, name: str) -> float:
        """Milliseconds of the maxima passes of a boundary's views; 0 for MX formats."""
        from fp4core import formats
        from fp4core.kernels._amax import chunk_amax
        from fp4core.ops.carrier_plan import DY_ROW, X_ROW

        g = self.groups[0]
        op = g.operands[X_ROW if name.endswith("forward") else DY_ROW]
        if op.format == "bf16" or formats.get(op.format).block_scale == "e8m0":
            return 0.0
        flat = [d.transpose(1, 2).reshape(self.tokens, -1) for d in self.dqkv]
        tensors = {
            "norm_qkv_forward": [self.x],
            "norm_qkv_backward": [*flat, self.x],
            "attention_output_forward": [self.mixed],
            "attention_output_backward": [self.mixed],
            "norm_gate_up_forward": [self.x],
            "norm_gate_up_backward": [self.x, self.dy],
            "silu_down_forward": [self.dh],
            "silu_down_backward": [self.dy, self.dh, self.dh, self.dh],
        }[name]
        return common.time_ms(lambda: [chunk_amax(t) for t in tensors], calls=2, replays=3)


def main(argv: list[str]) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m fp4core.bench.fused_boundary", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--routes", default=",".join(ROUTES))
    parser.add_argument("--out", type=Path, default=common.RESULTS / "boundary.json")
    options = parser.parse_args(argv)
    from fp4core.ops import carrier_boundary

    device = common.require_gpu()
    found: list[dict[str, Any]] = []
    for route in options.routes.split(","):
        found += measure(
            config_8b(32), route, load_recipe(route), options.tokens, device, carrier_boundary.SCHEDULES
        )
        part = [r for r in found if r["route"] == route]
        print(common.table(part, ["route", "boundary", "stage", "schedule", "milliseconds"]), flush=True)
        _write(found, options.out)
    print("written", _write(found, options.out))
    return 0


def _write(found: list[dict[str, Any]], out: Path) -> Path:
    """The record: the two schedules that tables compare, and the third beside them."""
    main_rows = [r for r in found if r["schedule"] != "single"]
    return common.write_record(
        "boundary", main_rows, out, single=[r for r in found if r["schedule"] == "single"]
    )


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
