"""A few 8B blocks, forward and backward: fused, layer by layer, and compiled BF16.

    python -m fp4core.bench block [--sequences 1,2] [--routes mxfp4_sr,...] [--repeats 7] [--out FILE]

``step`` with four blocks, where the unfused route (``fp4core.Linear`` layers with compiled element-wise
work between them) is timed as well: what the fused boundaries are worth.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp4core.bench import common
from fp4core.bench.step import measure
from fp4core.bench.workload import ROUTES


@contextmanager
def _layer_by_layer() -> Iterator[None]:
    from fp4core.model import llama

    original = llama.fused_block
    llama.fused_block = lambda block, h: None
    try:
        yield
    finally:
        llama.fused_block = original


def main(argv: list[str]) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m fp4core.bench block", description=__doc__)
    parser.add_argument("--sequences", default="1,2")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--routes", default=",".join(ROUTES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=common.RESULTS / "block.json")
    options = parser.parse_args(argv)
    device = common.require_gpu()
    rows: list[dict[str, Any]] = []

    def put(row: dict[str, Any], schedule: str, base_ms: float) -> None:
        rows.append({**row, "schedule": schedule, "ratio": base_ms / row["ms"]})
        print(f"{row['route']} {schedule}, {row['tokens']} tokens: {row['ms']:.2f} ms", flush=True)
        common.write_record("block", rows, options.out)

    for sequences in (int(n) for n in options.sequences.split(",")):
        one = argparse.Namespace(
            blocks=options.blocks, sequences=sequences, length=options.length, repeats=options.repeats
        )
        base = measure(None, one, device, False)
        put(base, "compiled", base["ms"])
        for route in options.routes.split(","):
            put(measure(route, one, device, False), "fused", base["ms"])
            with _layer_by_layer():
                put(measure(route, one, device, False), "layers", base["ms"])
    print(common.table(rows, ["route", "schedule", "tokens", "ms", "ratio", "memory_gib", "misfits"]))
    print("written", options.out)
    return 0
