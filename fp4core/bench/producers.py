"""Producers: time and achieved bandwidth of both views from one load, against a device copy of as many bytes.

    python -m fp4core.bench producers [--tokens 32768] [--features 4096] [--only mxfp4] [--tiles] [--out FILE]

A row's ratio is (bytes read + written) / time over the rate of a plain copy that moves the same bytes, in the
same run. Bytes count the input once and every view once. The maxima that NV-style formats need beforehand are
not in the time: "amax" is the pass that finds them when no earlier kernel did.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import torch

from fp4core.bench import common
from fp4core.kernels import producers as p
from fp4core.kernels._amax import chunk_amax

BYTES = {"e5m2": 1, "e4m3": 1, "bf16": 2}


@dataclass(frozen=True)
class Case:
    """A named producer: the two views and whether the input is FP32."""

    name: str
    row: p.View | None
    col: p.View | None
    fp32: bool = False

    def bytes(self, elements: int) -> int:
        """Bytes moved: input once, every view once."""
        out = sum(BYTES[v.carrier] for v in (self.row, self.col) if v is not None)
        return elements * ((4 if self.fp32 else 2) + out)


def cases() -> list[Case]:
    """The producers that the routes use."""
    v = p.View
    return [
        Case("mxfp4 fp8", v("mxfp4", "e5m2"), v("mxfp4", "e4m3")),
        Case("mxfp4 fp8, row SR", v("mxfp4", "e5m2", "stochastic"), v("mxfp4", "e5m2")),
        Case("mxfp4 fp8, H32", v("mxfp4", "e5m2"), v("mxfp4", "e4m3", hadamard="fixed32")),
        Case(
            "mxfp4 fp8, row SR, H32",
            v("mxfp4", "e5m2", "stochastic"),
            v("mxfp4", "e5m2", hadamard="fixed32"),
        ),
        Case("mxfp4 bf16", v("mxfp4"), v("mxfp4")),
        Case("mxfp4 bf16, kept", v("mxfp4"), v("mxfp4", transposed=False)),
        Case("mxfp4_w2d fp8", v("mxfp4_w2d", "e4m3"), v("mxfp4_w2d", "e4m3")),
        Case("mxfp4_w2d fp8, fp32 in", v("mxfp4_w2d", "e4m3"), v("mxfp4_w2d", "e4m3"), fp32=True),
        Case("nvfp4 bf16", v("nvfp4"), v("nvfp4")),
        Case("nvfp4 bf16, kept", v("nvfp4"), v("nvfp4", transposed=False)),
        Case("nvfp4 bf16, row SR, kept", v("nvfp4", rounding="stochastic"), v("nvfp4", transposed=False)),
        Case("nvfp4_w2d bf16, one array", v("nvfp4_w2d"), None),
        Case("nvfp4_cta bf16, kept", v("nvfp4_cta"), v("nvfp4_cta", transposed=False)),
        Case(
            "nvfp4_cta bf16, row SR, H16, kept",
            v("nvfp4_cta", rounding="stochastic"),
            v("nvfp4_cta", hadamard="fixed16", transposed=False),
        ),
        Case(
            "operand hybrid dY: cta SR row, mxfp4 H16 col",
            v("nvfp4_cta", rounding="stochastic"),
            v("mxfp4", "e5m2", hadamard="plain16"),
        ),
        Case("operand hybrid W: mxfp4_w2d row, cta_w2d col", v("mxfp4_w2d", "e4m3"), v("nvfp4_cta_w2d")),
        Case(
            "operand hybrid W: mxfp4_w2d row, cta_w2d col, kept",
            v("mxfp4_w2d", "e4m3"),
            v("nvfp4_cta_w2d", transposed=False),
        ),
        Case(
            "te dY: SR row, SR H16 col",
            v("nvfp4_te", rounding="stochastic"),
            v("nvfp4_te", rounding="stochastic", hadamard="fixed16", transposed=False),
        ),
    ]


def make_input(tokens: int, features: int, device: torch.device, fp32: bool = False) -> torch.Tensor:
    """Values like activations: normal, with features of different size."""
    generator = torch.Generator(device=device).manual_seed(1)
    spread = torch.exp(0.5 * torch.randn(features, device=device, generator=generator))
    x = torch.randn(tokens, features, device=device, generator=generator).mul_(spread)
    return x if fp32 else x.to(torch.bfloat16)


def arguments(case: Case, x: torch.Tensor) -> dict:
    """Keyword arguments of ``produce``: states whose references fit x, scales, random state."""
    out: dict = {"sr": p.SR(torch.tensor([1234567, 3, 0], dtype=torch.int64, device=x.device), 4, 5)}
    top = int(torch.frexp(x.abs().amax().float()).exponent)
    for where, view in (("row", case.row), ("col", case.col)):
        if view is None:
            continue
        if p.is_mx(view.format):
            # the rotated maximum can be sqrt(32) times larger
            ref = {"e5m2": top - 8, "e4m3": top - 3, "bf16": 0}[view.carrier]
            out[f"{where}_state"] = p.new_state(1, x.device, ref)[0]
        else:
            plain, rotated = chunk_amax(x, hadamard=view.hadamard, plain=view.hadamard == "none")
            out[f"{where}_scaling"] = p.scaling(view, where, plain if rotated is None else rotated)
    return out


def measure(
    case: Case,
    tokens: int,
    features: int,
    device: torch.device,
    tile: p.Tile | None = None,
) -> dict:
    """One row of the table."""
    x = make_input(tokens, features, device, case.fp32)
    kwargs = arguments(case, x)
    first = p.produce(x, case.row, case.col, tile=p.Tile(), **kwargs)
    row, col = p.produce(x, case.row, case.col, tile=tile, **kwargs)
    for a, b in zip(first, (row, col)):
        if a is not None and not torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)):
            raise RuntimeError("another tile gave other bytes")
    kwargs |= {"row_out": row.data} if row is not None else {}
    kwargs |= {"col_out": col.data} if col is not None else {}
    ms = common.time_ms(lambda: p.produce(x, case.row, case.col, tile=tile, **kwargs))
    moved = case.bytes(x.numel())
    misfits = sum(int(s[3]) for k in ("row_state", "col_state") if (s := kwargs.get(k)) is not None)
    return {
        "case": case.name,
        "tokens": tokens,
        "features": features,
        "tile": list(dataclasses.astuple(tile or p.default_tile(case.row, case.col))),
        "ms": ms,
        "bytes": moved,
        "tbps": moved / ms / 1e9,
        "misfits": misfits,
    }


def fits(case: Case, tile: p.Tile | None) -> bool:
    """Whether the tile can hold the case's blocks: columns of MX formats are 32 tokens long."""
    long = any(v is not None and p.is_mx(v.format) for v in (case.row, case.col))
    return tile is None or tile.tokens == 32 or not long


def amax_rows(tokens: int, features: int, device: torch.device, copies: dict[int, float]) -> list[dict]:
    """The pass over BF16 that finds chunk maxima, plain and with the rotated ones."""
    x = make_input(tokens, features, device)
    moved = x.numel() * 2
    copies.setdefault(moved, common.copy_tbps(moved, device))
    rows = []
    for name, options in (("amax", {}), ("amax, plain and H16", {"hadamard": "fixed16"})):
        ms = common.time_ms(lambda options=options: chunk_amax(x, **options))
        tbps = moved / ms / 1e9
        row = {"case": name, "tokens": tokens, "features": features, "ms": ms, "bytes": moved, "tbps": tbps}
        rows.append(row | {"copy_tbps": copies[moved], "ratio": tbps / copies[moved]})
    return rows


def _compile(job: tuple[str, int, p.Tile | None]) -> None:
    name, features, tile = job
    case = next(c for c in cases() if c.name == name)
    device = common.require_gpu()
    x = make_input(1024, features, device, case.fp32)
    with contextlib.suppress(Exception):  # the measurement reports it
        p.produce(x, case.row, case.col, tile=tile, **arguments(case, x))


def precompile(only: str, features: int, tiles: list, workers: int) -> None:
    """Fill Triton's cache for all cases and tiles with several processes."""
    jobs = [(c.name, features, t) for t in tiles for c in cases() if only in c.name and fits(c, t)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(_compile, jobs, chunksize=1)


def main(argv: list[str]) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m fp4core.bench producers", description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--tiles",
        default="",
        help="fields of Tile in order, G,T,W,VEC,warps,row_tokens[,registers];... tried beside the default",
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that compile all kernels beforehand"
    )
    parser.add_argument("--out", type=Path, default=common.RESULTS / "producers.json")
    options = parser.parse_args(argv)
    device = common.require_gpu()
    tiles: list[p.Tile | None] = [None]
    tiles += [p.Tile(*(int(n) for n in t.split(","))) for t in options.tiles.split(";") if t]
    if options.workers:
        precompile(options.only, options.features, tiles, options.workers)
    rows = []
    copies: dict[int, float] = {}
    for case in cases():
        if options.only not in case.name:
            continue
        for tile in tiles:
            if not fits(case, tile):
                continue
            try:
                row = measure(case, options.tokens, options.features, device, tile)
            except Exception as error:  # a tile that does not fit says so and the table goes on
                print(f"{case.name} {tile}: {type(error).__name__}: {str(error)[:120]}", flush=True)
                continue
            copies.setdefault(row["bytes"], common.copy_tbps(row["bytes"], device))
            row["copy_tbps"] = copies[row["bytes"]]
            row["ratio"] = row["tbps"] / row["copy_tbps"]
            rows.append(row)
            print(f"{case.name:55} {row['ms']:.4f} ms  {row['ratio']:.3f} of copy", flush=True)
    rows += amax_rows(options.tokens, options.features, device, copies) if not options.only else []
    print(common.table(rows, ["case", "tile", "ms", "tbps", "copy_tbps", "ratio", "misfits"]))
    print("written", common.write_record("producers", rows, options.out))
    return 0
