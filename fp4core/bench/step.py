"""A training step without optimizer: 8B blocks, forward and backward, against the same blocks in compiled
BF16.

    python -m fp4core.bench step [--blocks 8] [--sequences 2] [--length 8192] [--routes mxfp4_sr,...] [--head]
                                 [--out FILE]

Parameters and gradients BF16, no activation checkpointing, cuDNN attention on both sides, every block
compiled (``fullgraph=True``), gradients freed before each step. A carrier step encodes all weights once and
reads the misfit counts once, as training does. ``--head`` adds embedding, final norm, the output head and a
compiled cross entropy, in BF16 on both sides. Milliseconds are medians over steps, memory is torch's peak of
allocated bytes. ``ceiling`` and ``at_copy``, without head, say what bounds a route's ratio: its products and
attention alone, in the same run, and the bytes between them (``fp4core.bench.floors``).
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp4core.bench import common, floors
from fp4core.bench.workload import ROUTES, config_8b, route_spec


class Step:
    """Blocks, and optionally a head, with one batch."""

    def __init__(
        self, route: str | None, blocks: int, sequences: int, length: int, head: bool, device: torch.device
    ) -> None:
        from fp4core.model.llama import Llama
        from fp4core.model.rope import rope_tables
        from fp4core.ops.convert import convert, set_sr_state

        config = config_8b(blocks, length, 128256 if head else 1024)
        with torch.device("meta"):
            self.model = Llama(config)
        if route is not None:
            convert(self.model, route)
        self.model.to_empty(device=device).to(torch.bfloat16)
        generator = torch.Generator(device=device).manual_seed(0)
        for p in self.model.parameters():
            with torch.no_grad():
                p.normal_(0.0, 0.02, generator=generator) if p.dim() > 1 else p.fill_(1.0)
        if route is not None:
            set_sr_state(self.model, seed=1, step=1)
        self.route, self.head = route, head
        self.state = self.model._random_state()
        self.cos, self.sin = rope_tables(self.model._inv_freq, length, device)
        self.tokens = torch.randint(config.vocab, (sequences, length + 1), device=device, generator=generator)
        shape = (sequences, length, config.hidden)
        self.h = torch.randn(shape, device=device, generator=generator).to(torch.bfloat16).requires_grad_()
        self.grad = (torch.randn(shape, device=device, generator=generator) * 1e-4).to(torch.bfloat16)
        self.blocks: list[Callable] = [
            torch.compile(block, fullgraph=True, dynamic=False) for block in self.model.blocks
        ]
        self._loss = torch.compile(_loss, fullgraph=True, dynamic=False)

    def run(self) -> int:
        """One step; returns the number of views that did not fit."""
        from fp4core.ops import carrier

        self.model.zero_grad(set_to_none=True)
        self.h.grad = None
        if self.route is not None:
            carrier.encode_weights(self.model)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            h = self.model.model.embed_tokens(self.tokens[:, :-1]) if self.head else self.h
            for block in self.blocks:
                h = block(h, self.cos, self.sin, self.state)
            if self.head:
                norm = self.model.model.norm
                self._loss(h, norm.weight, norm.eps, self.model.lm_head.weight, self.tokens[:, 1:]).backward()
            else:
                h.backward(self.grad)
        return len(carrier.misfits(self.model)) if self.route is not None else 0

    def defer(self) -> None:
        """Settle references in a checked step, then check once per step."""
        from fp4core.ops import carrier

        if self.route is not None:
            self.run()
            carrier.defer(self.model)


def _loss(h: Tensor, norm: Tensor, eps: float, head: Tensor, targets: Tensor) -> Tensor:
    h = F.rms_norm(h.float(), norm.shape, norm.float(), eps).to(h.dtype)
    return F.cross_entropy(F.linear(h, head).flatten(0, 1).float(), targets.flatten())


def measure(
    route: str | None, options: argparse.Namespace, device: torch.device, head: bool
) -> dict[str, Any]:
    """One row: milliseconds and peak memory of a step."""
    torch.compiler.reset()
    step = Step(route, options.blocks, options.sequences, options.length, head, device)
    step.defer()
    for _ in range(2):
        step.run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times, misfits = [], 0
    for _ in range(options.repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        misfits += step.run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    row = {
        "route": route or "bf16",
        "head": head,
        "blocks": options.blocks,
        "tokens": options.sequences * options.length,
        "ms": statistics.median(times),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "weights_gib": _encoded(step.model) / 2**30,
        "misfits": misfits,
    }
    del step
    if route is not None:
        from fp4core.ops import carrier_groups

        carrier_groups.forget()  # or the next route's memory would count this one's encodings
    gc.collect()
    torch.cuda.empty_cache()
    return row


def _bounds(route: str, base_ms: float, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What bounds a route's ratio; see ``fp4core.bench.floors``."""
    from fp4core.ops import carrier_groups

    blocks, tokens = options.blocks, options.sequences * options.length
    floor = floors.block_floor_ms(
        route_spec(route), options.sequences, options.length, blocks, device, options.repeats
    )
    moved = blocks * floors.block_bytes(tokens, floors.view_bytes(route))
    carrier_groups.forget()
    gc.collect()
    torch.cuda.empty_cache()
    return floors.ceilings(base_ms, floor, moved, floors.copy_rate(device))


def _encoded(model: nn.Module) -> int:
    from fp4core.ops import carrier

    return carrier.memory(model)


def main(argv: list[str]) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m fp4core.bench step", description=__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--routes", default=",".join(ROUTES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--head", action="store_true", help="also with embedding, head and cross entropy")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "step.json")
    return _report("step", parser.parse_args(argv))


def _report(name: str, options: argparse.Namespace) -> int:
    device = common.require_gpu()
    rows = []
    for head in (False, True) if options.head else (False,):
        base = None
        for route in (None, *options.routes.split(",")):
            row = measure(route, options, device, head)
            base = base or row
            row |= {"ratio": base["ms"] / row["ms"], "memory_ratio": row["memory_gib"] / base["memory_gib"]}
            if route is not None and not head:
                row |= _bounds(route, base["ms"], options, device)
            rows.append(row)
            print(
                f"{row['route']}{' + head' if head else ''}: {row['ms']:.2f} ms, {row['ratio']:.3f}x, "
                f"{row['memory_gib']:.1f} GiB, {row['misfits']} misfits"
                + (
                    f", at most {row['at_copy']:.3f}x with boundaries at the copy rate"
                    if "at_copy" in row
                    else ""
                ),
                flush=True,
            )
            common.write_record(name, rows, options.out)
    columns = [
        "route",
        "head",
        "tokens",
        "ms",
        "ratio",
        "memory_gib",
        "memory_ratio",
        "weights_gib",
        "ceiling",
        "at_copy",
        "misfits",
    ]
    print(common.table(rows, columns))
    print("written", common.write_record(name, rows, options.out))
    return 0
