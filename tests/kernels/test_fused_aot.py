"""Every fused kernel compiles for sm_90 without a GPU, as the launchers call it, and stays within limits.

The interpreter takes Python that the compiler refuses, and knows nothing of registers and code size. In a
process of its own: kernels imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

SCRIPT = r"""
import importlib, json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FLOATS = {"alpha", "factor", "mean_ptr", "weight_ptr", "rstd_ptr", "dw_ptr", "planes_ptr", "table_ptr", "eps"}
TYPES = {"sr_ptr": "i64", "places_ptr": "i64", "w_ptr": "fp8e4nv"}
TYPES |= dict.fromkeys(("parts_ptr", "rows_ptr", "out_ptr"), "bf16")
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
for case, module, name, constants, *options in json.loads(sys.argv[1]):
    kernel = getattr(importlib.import_module("fp4core.kernels." + module), name)
    signature = {}
    for argument in kernel.arg_names:
        base = TYPES.get(argument, "fp32" if argument in FLOATS else "i32")
        pointer = argument.endswith(("ptr", "state"))
        signature[argument] = "constexpr" if argument in constants else "*" * pointer + base
    if "own" in signature:
        signature["own"] = ("i64",) * 9  # addresses
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(kernel.arg_names)
        if n not in constants and (n.endswith(("ptr", "state")) or n in ("T", "S", "stride"))
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": 4} | (options[0] if options else {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "k.cubin"
        cubin.write_bytes(made.asm["cubin"])
        command = [tool, "-res-usage", "-sass", cubin]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", done.stdout).groups())
    length = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", done.stdout, re.MULTILINE))
    accesses = sorted(set(re.findall(r"\b(?:LDG|STG)\.\S*", done.stdout)))
    print(json.dumps([case, registers, stack, length, made.metadata.shared, accesses]))
"""
TILE = {"ASM": True, "G": 4, "W": 64, "VEC": 2}
MX = {"RULE": "mx_ceil"}
H32 = {"HADAMARD": "fixed32"}
NORM = {
    "HIDDEN": 4096,
    "RESIDUAL": True,
    "SCALED": False,
    "Y_RULE": "mx_ceil",
    "Y_COL": "e4m3",
    "ASM": True,
    "G": 4,
    "W": 64,
}
PLAIN = {"RULE": "none", "ROW": "bf16", "SR": False, "COL": "bf16", "HADAMARD": "none"}
VIEWS = {"ROW": "e5m2", "SR": True, "COL": "e5m2"} | MX
SILU = {"F": 14336, "GU": 14336} | TILE
ROPE = {"TOKEN_STRIDE": 2048, "N": 4096, "HEADS": 32, "PER_PROGRAM": 8, "ROTATE": True, "ASM": True, "G": 4}
ROPE |= {"OUTLIERS": False}
SUM = {"ADD": True, "ALIGNED": True, "BLOCK": 4096}
SCALED, PLAIN_ROWS = {"SCALED": True}, {"SCALED": False, "VEC": 2}
ROW_SCALES = {"HEADS": 32, "KV_HEADS": 8, "R": 16, "ASM": True, "WIDEST": 24}
ROPE_JOINT = {"T": 8192, "HEADS": 32, "KV_HEADS": 8, "ASM": True, "G": 2}
SWIGLU = {"T": 8192, "F": 14336, "GU": 14336, "H_RULE": "mx_ceil", "H_COL": "e4m3", "ASM": True}
SWIGLU |= {"G": 2, "J": 2, "PER": 4}
OUTLIERS = {"OUTLIERS": True, "ROW": "bf16", "COL": "none"}
CASES = [
    ("scaled sum", "scaled_sum", "scaled_sum_kernel", SUM | {"RANK": 1, "W": 2}),
    ("scaled sum of 8", "scaled_sum", "scaled_sum_kernel", SUM | {"RANK": 3, "W": 8}),
    ("silu forward", "fused_silu", "silu_forward_kernel", SILU | MX | {"CARRIER": "e5m2"}),
    (
        "silu gradients",
        "fused_silu",
        "silu_gradients_kernel",
        SILU | MX | H32 | {"H_COL": "e4m3", "P": 8} | SCALED,
    ),
    ("unscale", "row_scale", "unscale_kernel", {"STRIDE": 2048, "R": 16, "ASM": True}),
    ("silu single", "fused_silu", "silu_backward_kernel", SILU | VIEWS | H32 | {"H_COL": "e4m3"}),
    (
        "norm forward",
        "fused_norm",
        "norm_forward_kernel",
        {"HIDDEN": 4096, "RESIDUAL": True, "CARRIER": "e5m2", "ASM": True, "R": 2, "W": 2048} | MX,
    ),
    ("norm backward", "fused_norm", "norm_backward_kernel", NORM | PLAIN | {"Y_HADAMARD": "fixed32"}),
    (
        "norm single",
        "fused_norm",
        "norm_backward_kernel",
        NORM | VIEWS | {"Y_HADAMARD": "none", "HADAMARD": "none"},
    ),
    (
        "rope forward",
        "fused_rope",
        "rope_forward_kernel",
        {"N": 6144, "HEADS": 40, "PER_PROGRAM": 8, "ASM": True, "G": 4, "VEC": 2},
    ),
    (
        "norm backward scaled",
        "fused_norm",
        "norm_backward_kernel",
        NORM | PLAIN | {"Y_HADAMARD": "none"} | SCALED,
    ),
    ("row scales", "row_scale", "row_scales_kernel", ROW_SCALES | {"CAPACITY": 0}),
    ("row scales with outliers", "row_scale", "row_scales_kernel", ROW_SCALES | {"CAPACITY": 1024}),
    (
        "products of outliers",
        "row_scale",
        "outlier_gemm_kernel",
        {"K": 6144, "D": 4096, "CAPACITY": 1024, "M": 64, "N": 32, "STEP": 128},
    ),
    (
        "rope single of outliers",
        "fused_rope",
        "rope_backward_kernel",
        ROPE | VIEWS | H32 | PLAIN_ROWS | OUTLIERS,
    ),
    ("rope backward", "fused_rope", "rope_backward_kernel", ROPE | PLAIN | PLAIN_ROWS),
    ("rope single unscaled", "fused_rope", "rope_backward_kernel", ROPE | VIEWS | H32 | PLAIN_ROWS),
    ("rope single", "fused_rope", "rope_backward_kernel", ROPE | VIEWS | H32 | SCALED | {"VEC": 2}),
    ("rope joint", "fused_rope_joint", "rope_joint_kernel", ROPE_JOINT | VIEWS | SCALED, {"maxnreg": 128}),
    ("swiglu", "fused_swiglu", "swiglu_backward_kernel", SWIGLU | VIEWS | SCALED, {"maxnreg": 96}),
]


def test_fused_kernels_compile_for_hopper() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(CASES)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert [m[0] for m in made] == [c[0] for c in CASES]
    for case, registers, stack, length, shared, accesses in made:
        # a product has its operands there, two programs of it to a multiprocessor
        most = 113 if case.startswith("products") else 64
        assert registers <= 255 and shared <= most * 1024, case
        # beyond 8000 instructions (128 KB) a kernel falls out of the instruction cache
        assert length < 8000, (case, length)
        if "single" not in case and not case.startswith("norm backward"):
            assert stack == 0, f"{case}: {stack} bytes of spills at {registers} registers"
        if case.startswith("scaled sum"):
            # numbers and addresses of the vectors are 64 bits each, everything else moves by 128
            assert accesses and all(re.search(r"\.(64|128)\b", access) for access in accesses), accesses


NUMBERS = r"""
import importlib, json, pkgutil
import triton
from fp4core import kernels
found = []
for module in pkgutil.walk_packages(kernels.__path__, "fp4core.kernels."):
    for name, value in vars(importlib.import_module(module.name)).items():
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
            numbers = [p for p in value.params if p.name.endswith("producer")]
            found += [(name, p.name, p.do_not_specialize) for p in numbers]
print(json.dumps(found))
"""


def test_no_kernel_is_compiled_for_one_producer() -> None:
    """Triton would make a version of its own for producer 1, a Python number there that has no type."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", NUMBERS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len({kernel for kernel, _, _ in found}) >= 4
    assert [(kernel, name) for kernel, name, left_alone in found if not left_alone] == []
