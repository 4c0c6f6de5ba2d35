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
    rows = []
    for sequences in (int(n) for n in options.sequences.split(",")):
        one = argparse.Namespace(
            blocks=options.blocks, sequences=sequences, length=options.length, repeats=options.repeats
        )
        base = measure(None, one, device, False)
        rows.append({**base, "schedule": "compiled", "ratio": 1.0})
        for route in options.routes.split(","):
            fused = measure(route, one, device, False)
            rows.append({**fused, "schedule": "fused", "ratio": base["ms"] / fused["ms"]})
            with _layer_by_layer():
                serial = measure(route, one, device, False)
            rows.append({**serial, "schedule": "layers", "ratio": base["ms"] / serial["ms"]})
    print(common.table(rows, ["route", "schedule", "tokens", "ms", "ratio", "memory_gib", "misfits"]))
    print("written", common.write_record("block", rows, options.out))
    return 0
