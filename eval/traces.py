"""Small tables that fig01, fig02, fig03 and fig05 draw, all computed by running the quantisers.

    scale_rounding.csv    fig01: normal values rescaled to every BF16 amax of three octaves, under each rule
                          for E8M0 scales (32 rows of 32, each scaled to the amax; one tile for a 2D format)
    execution_routes.csv  fig02: how far a change travels, found by changing one element and looking which
                          codes, block scales and outer scales move
    scaling_domains.csv   fig03: outer scales of one matrix with local outliers, per 128 x 128 chunk
    weight_2d.csv         fig05: a weight and its transpose, encoded in tiles and in rows

Inputs are drawn from a fixed integer sequence, so the tables are the same on every machine.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4core import formats, records

if TYPE_CHECKING:
    from torch import Tensor

Row = dict[str, Any]
E8M0_RULES = ("mxfp4", "mxfp4_w2d", "mxfp4_decode", "mxfp4_ocp", "mxfp4_rceil", "mxfp4_even")
DOMAIN_FORMATS = ("mxfp4", "nvfp4", "nvfp4_cta")
WEIGHT_FORMATS = ("mxfp4", "mxfp4_w2d", "nvfp4", "nvfp4_w2d")
CHUNK = 128


def normal(*shape: int, seed: int) -> Tensor:
    """N(0, 1) values from SHA-256 in counter mode through the inverse normal distribution, FP32."""
    import torch

    count = math.prod(shape)
    raw = b"".join(hashlib.sha256(f"{seed}:{i}".encode()).digest() for i in range(-(-count // 4)))
    words = (int.from_bytes(raw[i : i + 8], "little") for i in range(0, 8 * count, 8))
    inverse = statistics.NormalDist().inv_cdf
    return torch.tensor([inverse((word + 0.5) / 2**64) for word in words], dtype=torch.float32).view(shape)


def block_scales(q: Any) -> Tensor:
    """Decoded block scales, FP32, in the grid's shape. E8M0 and E4M3 only."""
    import torch

    kind = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}[formats.get(q.format).block_scale]
    return q.block_scale.view(kind).float()


def scale_rounding() -> list[Row]:
    """rule, amax, scale (value of code 1.0), largest_code, mse_relative, over amax in [1, 8)."""
    import torch

    import fp4core

    tile = normal(32, 32, seed=1)
    rows_of = {True: tile / tile.abs().max(), False: tile / tile.abs().amax(1, keepdim=True)}
    grid = [2.0**octave * (1 + i / 128) for octave in range(3) for i in range(128)]  # every BF16 value
    amax = torch.tensor(grid)[:, None, None]
    rows = []
    for rule in E8M0_RULES:
        fmt = formats.get(rule)
        x = amax * rows_of[fmt.two_d]  # [amax, 32, 32]; outer scales are constant
        q = fp4core.quantize(x.flatten(0, 1), rule)
        scale = block_scales(q).view(len(grid), -1)[:, 0] * q.outer_scale
        largest = (q.unpack() & 7).view(len(grid), -1).amax(1)
        exact = x.to(torch.bfloat16).double()
        error = (q.dequantize().double().view_as(exact) - exact).square().sum((1, 2)) / exact.square().sum(
            (1, 2)
        )
        rows += [
            {"rule": rule, "amax": a, "scale": s, "largest_code": formats.E2M1_VALUES[c], "mse_relative": e}
            for a, s, c, e in zip(grid, scale.tolist(), largest.tolist(), error.tolist())
        ]
    return rows


def scaling_domains(size: int = 6) -> list[Row]:
    """Outer scale, amax and amax relative to the tensor's, per chunk of one matrix with local outliers."""
    import fp4core

    x = normal(size, size, 32, seed=2).abs().amax(-1)  # a chunk's own scale varies a little
    x = x.repeat_interleave(CHUNK, 0).repeat_interleave(CHUNK, 1)
    x = x * normal(64, 64, seed=3).repeat(size * 2, size * 2)
    for row, col, factor in ((1, 4, 8.0), (4, 1, 4.0), (5, 3, 2.0)):  # one outlier in each of three chunks
        chunk = x[row * CHUNK : (row + 1) * CHUNK, col * CHUNK : (col + 1) * CHUNK]
        chunk[37, 81] = factor * chunk.abs().max()
    x = x.bfloat16().float()
    amax = x.view(size, CHUNK, size, CHUNK).abs().amax((1, 3))
    rows = []
    for name in DOMAIN_FORMATS:
        fmt, outer = formats.get(name), fp4core.quantize(x, name).outer_scale
        for i in range(size):
            scale = outer[i * CHUNK // fmt.stripe_rows] if fmt.outer == "stripe" else outer
            for j in range(size):
                factor = amax[i, j].item() / fmt.outer_divisor if fmt.chunk else None
                rows.append(
                    {
                        "format": name,
                        "row_chunk": i,
                        "col_chunk": j,
                        "outer_scale": scale.item(),
                        "amax": amax[i, j].item(),
                        "chunk_factor": factor,
                    }
                )
    return rows


def weight_2d(size: int = 64) -> list[Row]:
    """Codes and scales of W from its rows and from its columns (transposed back), W [size, size]."""
    import fp4core

    w = normal(size, size, seed=4) * 0.02
    w[5, 40] *= 6
    w[50, 9] *= 6
    rows = []
    for name in WEIGHT_FORMATS:
        for layout, view in (("row", w), ("column", w.T.contiguous())):
            q = fp4core.quantize(view, name)
            fmt = formats.get(name)
            scale = block_scales(q).repeat_interleave(fmt.block_rows, 0).repeat_interleave(fmt.block_cols, 1)
            parts = [q.unpack(), scale, q.dequantize()]
            codes, scale, value = ((p.T if layout == "column" else p).tolist() for p in parts)
            rows += [
                {
                    "layout": f"{name}/{layout}",
                    "row": i,
                    "col": j,
                    "code": codes[i][j],
                    "scale": scale[i][j],
                    "value": value[i][j],
                }
                for i in range(size)
                for j in range(size)
            ]
    return rows


# Where one element is changed, from near to far, for results observed in the block at the origin (distance
# "block") or in the first 64 x 64 values. A result that moves with a change needs everything up to there.
_PLACES = {"block": (0, 1), "chunk": (100, 100), "stripe": (200, 300), "tensor": (400, 20)}
_WIDTH = {name: i for i, name in enumerate(("none", "element", *_PLACES))}


def reach(name: str) -> dict[str, str]:
    """Domain on which codes, block scales and the outer scale of format `name` depend, by experiment."""
    import fp4core

    fmt = formats.get(name)
    x = normal(64, 64, seed=5).repeat(8, 6).bfloat16()  # 512 x 384: two stripes, three chunks across
    base, found = (
        fp4core.quantize(x, name),
        {"codes": "element", "block scale": "none", "outer scale": "none"},
    )
    for distance, place in _PLACES.items():
        rows, cols = (fmt.block_rows, fmt.block_cols) if distance == "block" else (64, 64)
        grid = (slice(rows // fmt.block_rows), slice(cols // fmt.block_cols))
        for value in (11.0, 37.0, 150.0):
            changed = x.clone()
            changed[place] = value
            q = fp4core.quantize(changed, name)
            codes = q.unpack() != base.unpack()
            codes[place] = False  # the changed element's own code
            moved = {
                "codes": codes[:rows, :cols].any(),
                "block scale": (q.block_scale != base.block_scale)[grid].any(),
                "outer scale": q.outer_scale.flatten()[0] != base.outer_scale.flatten()[0],
            }
            found |= {part: distance for part, did in moved.items() if did}
    return found


def execution_routes() -> list[Row]:
    """Steps of every format in the order in which their inputs are complete, with what each waits for.

    Domains come from `reach`, texts from the format descriptors. In `domain` a block of a 2D format is a
    "tile".
    """
    rows = []
    for name in formats.names():
        fmt, needs = formats.get(name), reach(name)
        domains = {"block", *needs.values(), *(["chunk"] if fmt.chunk else [])} - {"none", "element"}
        steps = [(f"{d} amax", d, "largest magnitude") for d in sorted(domains, key=_WIDTH.get)]
        if needs["outer scale"] != "none":
            steps.append(("outer scale", needs["outer scale"], fmt.outer_rule))
        steps.append(("block scale", needs["block scale"], f"{fmt.block_scale.upper()}: {fmt.rule}"))
        steps.append(("codes", needs["codes"], "E2M1, two per byte"))
        steps.sort(key=lambda step: _WIDTH[step[1]])  # stable: within a domain the amax comes first
        narrower = None
        for order, (step, domain, detail) in enumerate(steps):
            is_amax = step.endswith("amax")
            rows.append(
                {
                    "format": name,
                    "step_order": order,
                    "step": step,
                    "domain": "tile" if domain == "block" and fmt.two_d else domain,
                    "waits_for": narrower if is_amax else f"{domain} amax",
                    "detail": detail,
                }
            )
            narrower = step if is_amax else narrower
    return rows


TABLES = {
    "scale_rounding": scale_rounding,
    "execution_routes": execution_routes,
    "scaling_domains": scaling_domains,
    "weight_2d": weight_2d,
}


def csv_bytes(rows: list[Row]) -> bytes:
    """CSV with a header; None is empty, floats keep every digit."""
    sink = io.StringIO()
    writer = csv.DictWriter(sink, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()


def main(arguments: list[str]) -> None:
    """python -m eval traces --out DIR --done MARK"""
    parser = argparse.ArgumentParser(prog="python -m eval traces", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--done", type=Path)
    parsed = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)  # tiny tensors: threads only wait for each other
    hashes = {}
    for name, compute in TABLES.items():
        data = csv_bytes(compute())
        records.write_atomic(parsed.out / f"{name}.csv", data)
        hashes[f"{name}.csv"] = records.sha256_bytes(data)
        print(f"traces: {name}.csv", flush=True)
    head = records.envelope(
        "fp4core.traces",
        study="",
        route=None,
        seed=None,
        recipe_hash=None,
        stage_hash="",
        device={"name": "", "kind": "cpu"},
        backend="reference",
        inputs={},
    )
    records.write_json(parsed.out / "traces.json", {**head, "files": hashes})
    if parsed.done:
        records.write_marker(parsed.done, parsed.out / "traces.json", recipe_hash=None, stage_hash=None)
