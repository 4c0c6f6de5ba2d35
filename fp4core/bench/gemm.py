"""GEMMs on carriers: rate and exactness against cuBLAS BF16 on the same shapes, in the same run.

    python -m fp4core.bench gemm [--tokens 8192] [--out FILE]

Operands are real carriers (quantised normal data), because a product's rate depends on its data through the
power limit. ``equal`` is the share of BF16 outputs equal to the FP64 product rounded once, on a slice.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fp4core.bench import common
from fp4core.bench.producers import make_input
from fp4core.kernels import gemm
from fp4core.kernels import producers as p

SHAPES = {"qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def mx(x: Tensor, carrier: str) -> Tensor:
    """MXFP4 carrier of x, reference from its amax."""
    top = int(torch.frexp(x.abs().amax().float()).exponent)
    ref = {"e5m2": top - 13, "e4m3": top - 6, "bf16": 0}[carrier]
    row, _ = p.produce(x, p.View("mxfp4", carrier), row_state=p.new_state(1, x.device, ref)[0])
    return row.data


def nv(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """BF16 carrier and outer scales of an NV-style format."""
    row, _ = p.produce(x, p.View(name))
    return row.data, row.outer


def share_equal(
    a: Tensor, b: Tensor, c: Tensor, scale: Tensor | float, rows: int = 256, cols: int = 512
) -> float:
    """Share of c's leading rows x cols entries equal to the exact product rounded to BF16."""
    exact = (a[:rows].double() @ b[:cols].double().t()) * scale
    return (c[:rows, :cols] == exact.to(torch.bfloat16)).double().mean().item()


def variants(x: Tensor, w: Tensor) -> dict[str, tuple[Callable[[], Tensor], tuple]]:
    """name -> (call, what ``share_equal`` needs)."""
    one = torch.ones(1, device=x.device)
    x5, x4, w4, w5 = mx(x, "e5m2"), mx(x, "e4m3"), mx(w, "e4m3"), mx(w, "e5m2")
    xb, wb = mx(x, "bf16"), mx(w, "bf16")
    (xn, xo), (wn, wo) = nv(x, "nvfp4"), nv(w, "nvfp4")
    (xc, xco), (wc, wco) = nv(x, "nvfp4_cta"), nv(w, "nvfp4_cta")
    stripes = xco[:1].double() * wco.double().repeat_interleave(256)[:512]
    made: dict[str, tuple[Callable[[], Tensor], tuple]] = {
        "cublas bf16, plain data": (lambda: x @ w.t(), (x, w, 1.0)),
        "cublas bf16, mxfp4 carriers": (lambda: xb @ wb.t(), (xb, wb, 1.0)),
        "scaled_mm e5m2 x e4m3": (lambda: gemm.fp8_gemm(x5, w4, one, one), (x5.float(), w4.float(), 1.0)),
        "scaled_mm e4m3 x e4m3": (lambda: gemm.fp8_gemm(x4, w4, one, one), (x4.float(), w4.float(), 1.0)),
        "triton e5m2 x e5m2": (lambda: gemm.fp8_gemm(x5, w5, one, one), (x5.float(), w5.float(), 1.0)),
        "cublas bf16, device factor (nvfp4)": (
            lambda: gemm.bf16_gemm(xn, wn, 1.0, xo, wo),
            (xn, wn, xo.double() * wo.double()),
        ),
        "triton bf16, stripes (nvfp4_cta)": (
            lambda: gemm.bf16_gemm(xc, wc, 1.0, xco, wco),
            (xc, wc, stripes),
        ),
    }
    # Wgrad of BF16 carriers that were kept as they lie: both operands stored with the contraction outermost
    xt, wt = xc.t().contiguous().t(), wc.t().contiguous().t()
    made["triton bf16, stripes, both transposed"] = (
        lambda: gemm.bf16_gemm(xt, wt, 1.0, xco, wco),
        (xc, wc, stripes),
    )
    made["cublas bf16, device factor, both transposed"] = (
        lambda: gemm.bf16_gemm(xt, wt, 1.0, xo, wo),
        (xc, wc, xo.double() * wo.double()),
    )
    made["triton bf16, one factor (nvfp4)"] = (
        lambda: gemm.triton_gemm(xn, wn, one, xo, wo, xn.new_empty(len(xn), len(wn))),
        (xn, wn, xo.double() * wo.double()),
    )
    return made


T = gemm.Tile
TILES = {
    "bf16 stripes": (
        T(128, 256, 64, halves=False, group=16),
        T(128, 256, 64, halves=False, group=8),
        T(128, 256, 64, halves=False, group=32),
        T(128, 256, 64, stages=4, group=16),
        T(128, 256, 64, stages=4, group=32),
        T(256, 128, 64, stages=4, group=4),
        T(256, 128, 64, stages=4, group=8),
        T(256, 128, 64, stages=3, halves=False, group=8),
    ),
    "e5m2 x e5m2": (
        T(256, 128, 128, group=4),
        T(256, 128, 128, group=8),
        T(256, 128, 128, group=16),
        T(256, 128, 128, halves=False, group=8),
        T(256, 128, 128, stages=4, halves=True, group=8),
    ),
    "e5m2 x e4m3": (T(256, 128, 128, group=8),),
    "bf16 stripes, both transposed": (
        T(128, 256, 64, halves=False, group=16),
        T(128, 256, 64, halves=False, group=8),
        T(128, 256, 64, stages=4, group=8),
        T(256, 128, 64, stages=4, group=8),
        T(128, 128, 64, stages=4, group=8),
        T(128, 256, 32, stages=4, halves=False, group=16),
    ),
}


def tune(x: Tensor, w: Tensor) -> list[dict]:
    """Times of the Triton kernel's tiles on CTA-local BF16 and E5M2 x E5M2 operands."""
    one = torch.ones(1, device=x.device)
    (xc, xo), (wc, wo) = nv(x, "nvfp4_cta"), nv(w, "nvfp4_cta")
    x5, w5 = mx(x, "e5m2"), mx(w, "e5m2")
    operands = {
        "bf16 stripes": (xc, wc, xo, wo),
        "e5m2 x e5m2": (x5, w5, one, one),
        "e5m2 x e4m3": (x5, mx(w, "e4m3"), one, one),
        "bf16 stripes, both transposed": (xc.t().contiguous().t(), wc.t().contiguous().t(), xo, wo),
    }
    rows = []
    for name, (a, b, oa, ob) in operands.items():
        out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=x.device)
        for tile in TILES[name]:
            try:
                ms = common.time_ms(
                    lambda a=a, b=b, oa=oa, ob=ob, out=out, tile=tile: gemm.triton_gemm(
                        a, b, one, oa, ob, out, tile=tile
                    )
                )
            except Exception as error:  # a tile that does not fit says so
                print(f"{name} {tile}: {type(error).__name__}: {str(error)[:100]}", flush=True)
                continue
            tflops = 2 * a.shape[0] * b.shape[0] * a.shape[1] / ms / 1e9
            rows.append(
                {"variant": name, "tile": list(dataclasses.astuple(tile)), "ms": ms, "tflops": tflops}
            )
    return rows


def main(argv: list[str]) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m fp4core.bench gemm", description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--out", type=Path, default=common.RESULTS / "gemm.json")
    parser.add_argument("--tune", action="store_true", help="time the Triton kernel's tiles instead")
    options = parser.parse_args(argv)
    device = common.require_gpu()
    rows = []
    if options.tune:
        for name in options.shapes.split(","):
            n, k = SHAPES[name]
            found = tune(make_input(options.tokens, k, device), make_input(n, k, device))
            rows += [{"shape": name, **row} for row in found]
        print(common.table(rows, ["shape", "variant", "tile", "ms", "tflops"]))
        print("written", common.write_record("gemm_tune", rows, options.out))
        return 0
    for name in options.shapes.split(","):
        n, k = SHAPES[name]
        x = make_input(options.tokens, k, device)
        w = make_input(n, k, device)
        base = None
        for variant, (call, check) in variants(x, w).items():
            try:
                c = call()
                equal = share_equal(*check[:2], c, check[2])
                ms = common.time_ms(call)
            except Exception as error:  # one variant that cannot run says so
                print(f"{name} {variant}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            base = base or ms
            tflops = 2 * options.tokens * n * k / ms / 1e9
            rows.append(
                {
                    "shape": name,
                    "M": options.tokens,
                    "N": n,
                    "K": k,
                    "variant": variant,
                    "ms": ms,
                    "tflops": tflops,
                    "ratio": base / ms,
                    "equal": equal,
                }
            )
    print(common.table(rows, ["shape", "variant", "ms", "tflops", "ratio", "equal"]))
    print("written", common.write_record("gemm", rows, options.out))
    return 0
