"""Linear layers of an 8B block: forward and backward with all quantisation, against compiled BF16.

    python -m fp4core.bench linear [--tokens 8192,16384,32768] [--routes mxfp4_sr,...] [--peers] [--out FILE]

Every call quantises x, W and dY again, as the first micro-batch of an optimizer step does. The baseline is
the faster of two compiled BF16 versions, one product per linear and one per group of linears with the same
input, timed in the same run. Peers: how others emulate MXFP4 (``peers``), on one linear of 4096 x 14336.
References are centred and misfits counted as in deferred training; ``misfits`` must be 0 for the numbers to
mean anything. ``ceiling`` and ``at_copy`` say what bounds the ratio (``fp4core.bench.floors``).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp4core.bench import common, floors
from fp4core.bench.workload import GROUPS, ROUTES, GroupData, bf16_joint, bf16_linears, route_spec


def _compiled(fn: Callable) -> Callable:
    return torch.compile(fn, dynamic=False, fullgraph=True)


def baseline_ms(data: GroupData) -> float:
    """The faster compiled BF16 forward and backward of a group."""
    torch.compiler.reset()  # every group and token count is a graph of its own, more than dynamo keeps
    versions = [bf16_linears] if len(data.weights) == 1 else [bf16_linears, bf16_joint]
    times = []
    for version in versions:
        compiled = _compiled(version)
        times.append(common.time_ms(functools.partial(data.step, compiled), calls=2, replays=7))
    return min(times)


class Route:
    """Forward and backward of a group through the carrier backend."""

    def __init__(self, route: str, data: GroupData) -> None:
        from fp4core.ops import carrier_groups
        from fp4core.ops.carrier_linear import linears

        self._linears, self._groups = linears, carrier_groups
        self.spec, self.data = route_spec(route), data
        self.state = torch.tensor([1234, 7, 0], dtype=torch.int64, device=data.x.device)

    def _forward(self, x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._linears(x, weights, self.state, self.spec, self.data.producers)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        """One step, weights included."""
        from fp4core.ops.carrier_encode import new_epoch

        new_epoch()
        return self.data.step(self._forward)

    def prepare(self) -> None:
        """The first steps: references settle, then checks are deferred."""
        self()
        group = self.group()
        group.deferred = True
        self._groups.read([group])
        self()

    def group(self) -> Any:
        """The backend's record of this group."""
        return self._groups.group(self.data.producers, self.spec, self.data.x.device)

    def misfits(self) -> int:
        """Views that did not fit since the last look."""
        return len(self._groups.read([self.group()]))


def measure(tokens: int, routes: list[str], device: torch.device) -> list[dict[str, Any]]:
    """Rows of one token count: every group, then the sum over a block."""
    rows: list[dict[str, Any]] = []
    total: dict[str, dict[str, float]] = {}
    copy = floors.copy_rate(device)
    for name in GROUPS:
        data = GroupData.make(name, tokens, device)
        base = baseline_ms(data)
        for route in routes:
            run = Route(route, data)
            run.prepare()
            ms = common.time_ms(run, calls=2, replays=7)
            rows.append(_row(tokens, name, route, ms, base, run.misfits()))
            moved = floors.group_bytes(name, tokens, floors.view_bytes(route))
            floor = floors.products_ms(data, run.spec)
            rows[-1] |= floors.ceilings(base, floor, moved, copy)
            one = {"ms": ms, "bf16_ms": base, "misfits": rows[-1]["misfits"], "floor": floor, "bytes": moved}
            sums = total.setdefault(route, dict.fromkeys(one, 0))
            for key, value in one.items():
                sums[key] += value
        del data
        torch.cuda.empty_cache()
    for route, s in total.items():
        row = _row(tokens, "block", route, s["ms"], s["bf16_ms"], int(s["misfits"]))
        rows.append(row | floors.ceilings(s["bf16_ms"], s["floor"], s["bytes"], copy))
    return rows


def _row(tokens: int, name: str, route: str, ms: float, base: float, misfits: int) -> dict[str, Any]:
    k, outs, _ = GROUPS.get(name, (0, (), 0))
    flops = 6 * tokens * (k * sum(outs) if k else sum(g[0] * sum(g[1]) for g in GROUPS.values()))
    return {
        "tokens": tokens,
        "linears": name,
        "route": route,
        "ms": ms,
        "bf16_ms": base,
        "ratio": base / ms,
        "tflops": flops / ms / 1e9,
        "bf16_tflops": flops / base / 1e9,
        "misfits": misfits,
    }


def measure_peers(tokens: int, route: str, device: torch.device) -> list[dict[str, Any]]:
    """One linear of 4096 x 14336 by every peer, by the carriers, and in BF16."""
    from fp4core.bench.peers import peers

    data = GroupData.make("gate_up", tokens, device)
    data = GroupData("one", data.x, data.weights[:1], data.grads[:1], data.producers[:1])
    base = baseline_ms(data)
    run = Route(route, data)
    run.prepare()
    ours = common.time_ms(run, calls=2, replays=7)
    rows = [{"tokens": tokens, "implementation": f"carrier {route}", "ms": ours, "bf16_ms": base}]
    for name, linear in peers().items():
        ms = common.time_ms(
            lambda f=linear: data.step(lambda x, ws: [f(x, w) for w in ws]), calls=2, replays=3, graph=False
        )
        rows.append({"tokens": tokens, "implementation": name, "ms": ms, "bf16_ms": base})
    for row in rows:
        row |= {"ratio": row["bf16_ms"] / row["ms"], "carrier_speedup": row["ms"] / ours}
    return rows


def main(argv: list[str]) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m fp4core.bench linear", description=__doc__)
    parser.add_argument("--tokens", default="8192,16384,32768")
    parser.add_argument("--routes", default=",".join(ROUTES))
    parser.add_argument("--peers", action="store_true", help="time the peers' emulations as well")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "linear.json")
    options = parser.parse_args(argv)
    device = common.require_gpu()
    routes = options.routes.split(",")
    rows: list[dict[str, Any]] = []
    for tokens in (int(t) for t in options.tokens.split(",")):
        rows += measure(tokens, routes, device)
        columns = ["tokens", "linears", "route", "ms", "bf16_ms", "ratio", "tflops", "bf16_tflops"]
        columns += ["ceiling", "at_copy", "misfits"]
        print(common.table([r for r in rows if r["tokens"] == tokens], columns), flush=True)
        common.write_record("linear", rows, options.out)
    peer_rows = measure_peers(8192, routes[0], device) if options.peers else []
    if peer_rows:
        print(common.table(peer_rows, ["implementation", "ms", "bf16_ms", "ratio", "carrier_speedup"]))
    print("written", common.write_record("linear", rows, options.out, peers=peer_rows))
    return 0
