"""Compile every native kernel without a GPU and say what came out: `python -m fp4core.kernels.native.aot`.

One row per kernel, variant and target (sm_100a, sm_103a; sm_90 on request): Tensor Core instructions in the
PTX, registers, spilled bytes, shared memory and Tensor Memory columns, from the cubin and the compiler's
metadata. Prints JSON lines; exit 1 when a kernel does not compile or exceeds the chip. Run it in a process of
its own: it must see compiled kernels, so it refuses under TRITON_INTERPRET, and a compiler that aborts takes
its process with it.

sm_90 is where the same sources can be tested on hardware: producers with software rounding, and MXFP4
products through Triton's emulation of dot_scaled. E4M3 scales abort that backend's compiler and are no part
of its list.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp4core import formats
from fp4core.kernels._launch import interpreted
from fp4core.kernels.native.gemm import EMULATED, OVERLAPPED, WIDE, Schedule, native_gemm_kernel
from fp4core.kernels.native.producers import WARPS, native_kernel
from fp4core.kernels.producers import View, rule

TARGETS = (100, 103)
WITHOUT_FP4 = 90
# what one SM of sm_90, sm_100 and sm_103 has (Tensor Memory: the last two)
REGISTERS, SHARED_BYTES, TMEM_COLUMNS = 255, 227 * 1024, 512
REGISTER_FILE = 65536  # of a processor, given out to each warp in units of 8 per lane
_SR = "stochastic"


@dataclass(frozen=True)
class Build:
    """One kernel variant: Triton function, argument types, constants and options."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]
    needs: tuple[str, ...] = ()
    aligned: tuple[str, ...] = ()

    def compile(self, target: int) -> Any:
        """The compiled kernel (Triton's object) for compute capability ``target``."""
        types = {**self.signature, **dict.fromkeys(self.constants, "constexpr")}
        names = list(types)
        # what a launch finds out: addresses and sizes of the usual shapes are multiples of 16
        aligned = [n for n, t in self.signature.items() if t.startswith("*") or n in self.aligned]
        attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
        source = ASTSource(self.kernel, types, self.constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", target, 32), options=self.options)


def gemms(target: int) -> Iterator[Build]:
    """Products: both schedules, both instruction kinds, both output types; without FP4 units the emulated
    one."""
    if target == WITHOUT_FP4:
        for out in ("bf16", "fp32"):
            yield _gemm(f"gemm-emulated-mxf4-{out}", EMULATED, None, 32, "u8", out)
        return
    for label, s in (("overlapped", OVERLAPPED), ("wide", WIDE)):
        for kind, vec, scale in (("mxf4", 32, "u8"), ("mxf4nvf4", 16, "fp8e4nv")):
            for out in ("bf16", "fp32"):
                yield _gemm(f"gemm-{label}-{kind}-{out}", s, kind, vec, scale, out)


def _gemm(name: str, s: Schedule, kind: str | None, vec: int, scale: str, out: str) -> Build:
    columns, depth = s.bk // vec // 4, s.depth(torch.float32 if out == "fp32" else torch.bfloat16)
    signature = {
        "a_desc": f"tensordesc<u8[{s.bm}, {s.bk // 2}]>",
        "a_scale_desc": f"tensordesc<{scale}[1, {s.bm // 128}, {columns}, 2, 256]>",
        "b_desc": f"tensordesc<u8[{s.bn}, {s.bk // 2}]>",
        "b_scale_desc": f"tensordesc<{scale}[1, {s.bn // 128}, {columns}, 2, 256]>",
        "c_desc": f"tensordesc<{out}[{s.bm}, {s.bn // 2 if s.halves else s.bn}]>",
        **dict.fromkeys(("alpha_ptr", "beta_ptr"), "*fp32"),
        **dict.fromkeys(("M", "N", "K"), "i32"),
    }
    constants = {
        "STRIPE_A": 1,
        "STRIPE_B": 1,
        "VEC": vec,
        "BM": s.bm,
        "BN": s.bn,
        "BK": s.bk,
        "GROUP": 8,
        "PROGRAMS": 148,
        "SPECIALISED": s.specialised,
        "HALVES": s.halves,
        "STAGES": depth,
    }
    options = {"num_warps": s.warps, "num_stages": depth}
    needs = ("cp.async.bulk.tensor",)
    if kind is not None:
        factor = {"mxf4": "2X", "mxf4nvf4": "4X"}[kind]
        needs += (f"kind::{kind}.block_scale.scale_vec::{factor}", "tcgen05.cp")
    return Build(name, native_gemm_kernel, signature, constants, options, needs)


# (row view, column view) of every tensor that a route's training step encodes
PAIRS: dict[str, tuple[View | None, View | None]] = {
    "mxfp4-x": (View("mxfp4"), View("mxfp4")),
    "mxfp4-dy": (View("mxfp4", rounding=_SR), View("mxfp4")),
    "mxfp4-x-h32": (View("mxfp4"), View("mxfp4", hadamard="fixed32")),
    "mxfp4-dy-h32": (View("mxfp4", rounding=_SR), View("mxfp4", hadamard="fixed32")),
    "mxfp4-x-h16": (View("mxfp4"), View("mxfp4", hadamard="plain16")),
    "mxfp4-w": (View("mxfp4_w2d"), None),
    "mxfp4-wt": (None, View("mxfp4_w2d")),
    "nvfp4-x": (View("nvfp4"), View("nvfp4")),
    "nvfp4-dy": (View("nvfp4", rounding=_SR), View("nvfp4")),
    "nvfp4-w": (View("nvfp4_w2d"), None),
    "nvfp4-wt": (None, View("nvfp4_w2d")),
    "te-x": (View("nvfp4_te"), View("nvfp4_te", hadamard="fixed16")),
    "te-dy": (View("nvfp4_te", rounding=_SR), View("nvfp4_te", rounding=_SR, hadamard="fixed16")),
    "te-w": (View("nvfp4_te_w2d"), None),
    "te-wt": (None, View("nvfp4_te_w2d")),
    "cta-x": (View("nvfp4_cta"), View("nvfp4_cta")),
    "cta-dy": (View("nvfp4_cta", rounding=_SR), View("nvfp4_cta")),
    "cta-x-h16": (View("nvfp4_cta"), View("nvfp4_cta", hadamard="fixed16")),
    "cta-dy-h16": (View("nvfp4_cta", rounding=_SR), View("nvfp4_cta", hadamard="fixed16")),
    "cta-w": (View("nvfp4_cta_w2d"), None),
    "cta-wt": (None, View("nvfp4_cta_w2d")),
    "hybrid-dy-h16": (View("nvfp4_cta", rounding=_SR), View("mxfp4", hadamard="plain16")),
    "hybrid-dy-h32": (View("nvfp4_cta", rounding=_SR), View("mxfp4", hadamard="fixed32")),
}


def producers(target: int) -> Iterator[Build]:
    """Producers of every tensor of every route."""
    for name, (row, col) in PAIRS.items():
        yield _producer(f"producer-{name}", row, col, target != WITHOUT_FP4)


def _producer(name: str, row: View | None, col: View | None, ptx: bool) -> Build:
    kinds = [None if v is None else formats.get(v.format) for v in (row, col)]
    stochastic = [v is not None and v.rounding == _SR for v in (row, col)]
    pointers = {
        **dict.fromkeys(("row_codes", "row_scales", "col_codes", "col_scales"), "*u8"),
        **dict.fromkeys(("row_amax", "row_outer", "col_amax", "col_outer"), "*fp32"),
        **dict.fromkeys(("row_sr", "col_sr"), "*i64"),
    }
    arguments = [p.name for p in native_kernel.params if not p.is_constexpr]
    signature = {n: "*i16" if n == "x_ptr" else pointers.get(n, "i32") for n in arguments}
    constants: dict[str, Any] = {
        "HADAMARD": "none" if col is None else col.hadamard,
        "ASM": True,
        "PTX": ptx,
    }
    for side, view, fmt, sr in zip(("ROW", "COL"), (row, col), kinds, stochastic):
        constants |= {
            side: "none" if view is None else rule(view.format),
            f"{side}_BR": 1 if fmt is None else fmt.block_rows,
            f"{side}_B": 16 if fmt is None else fmt.block_cols,
            f"{side}_SR": sr,
            f"{side}_ALIGNED": True,
        }
    nearest = any(v is not None and not sr for v, sr in zip((row, col), stochastic))
    needs = ("cvt.rn.satfinite.e2m1x2.f32",) if nearest and ptx else ()
    aligned = ("M", "K", "X_STRIDE", "ROW_BYTES", "COL_BYTES")
    return Build(name, native_kernel, signature, constants, {"num_warps": WARPS}, needs, aligned)


def builds(target: int) -> list[Build]:
    """Every native kernel that compute capability ``target`` can run."""
    return [*gemms(target), *producers(target)]


def report(build: Build, target: int) -> dict[str, Any]:
    """Compile one kernel and measure it; ``problems`` lists what the chip could not take."""
    compiled = build.compile(target)
    ptx = compiled.asm["ptx"]
    found = {
        "kernel": build.name,
        "target": f"sm_{target}a",  # Triton's name for sm_90 too
        "instructions": sorted(set(re.findall(r"tcgen05\.mma[\w.:]*|cvt\.rn\.satfinite\.e2m1x2\.f32", ptx))),
        **_resources(compiled.asm["cubin"]),
        "shared_bytes": int(compiled.metadata.shared),
        "tmem_columns": int(getattr(compiled.metadata, "tmem_size", 0) or 0),
        "warps": int(compiled.metadata.num_warps),
    }
    return {**found, "problems": _problems(build, ptx, found)}


def _problems(build: Build, ptx: str, found: dict[str, Any]) -> list[str]:
    problems = [f"no {need} in the PTX" for need in build.needs if need not in ptx]
    for name, limit in (
        ("registers", REGISTERS),
        ("stack_bytes", 0),
        ("shared_bytes", SHARED_BYTES),
        ("tmem_columns", TMEM_COLUMNS),
    ):
        if found[name] > limit:
            problems.append(f"{name} {found[name]}, at most {limit}")
    taken = -(-found["registers"] // 8) * 8 * 32 * found["warps"]
    if taken > REGISTER_FILE:
        problems.append(f"registers of {found['warps']} warps {taken}, at most {REGISTER_FILE}")
    return problems


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack bytes (where spilled registers go) and machine instructions, from the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (_cuobjdump(option, file.name) for option in ("-res-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of resources: {usage.strip()}")
    registers, stack, local = map(int, found.groups())
    sass = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE))
    return {"registers": registers, "stack_bytes": stack + local, "sass_instructions": sass}


def _cuobjdump(option: str, path: str) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def main(argv: list[str] | None = None) -> int:
    """Print one JSON line per kernel and target."""
    parser = argparse.ArgumentParser(prog="python -m fp4core.kernels.native.aot", description=__doc__)
    parser.add_argument(
        "--target", type=int, action="append", choices=(*TARGETS, WITHOUT_FP4), help="default: 100, 103"
    )
    parser.add_argument("--only", default="", help="compile kernels whose name contains this")
    options = parser.parse_args(argv)
    if interpreted():
        print("error: TRITON_INTERPRET is set; unset it to compile", file=sys.stderr)
        return 2
    bad = 0
    for target in options.target or TARGETS:
        for build in builds(target):
            if options.only in build.name:
                row = report(build, target)
                bad += bool(row["problems"])
                print(json.dumps(row), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
