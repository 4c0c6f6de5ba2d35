"""The packed path of the producers compiles for sm_90 without a GPU, to the instructions that make it fast.

In a process of its own: kernels imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

SCRIPT = r"""
import subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fp4core.kernels._dual import dual_kernel as kernel

constants = dict(
    K=4096, PLACES=4096, ROW_STRIDE=1024, ROW="mx_ceil", ROW_CARRIER="e5m2", ROW_SR=False, COL="mx_ceil",
    SCALED=False, COL_CARRIER="e4m3", COL_HADAMARD="none", ROW_SQUARE=False, COL_SQUARE=False, SHARED=False,
    COL_SR=False, COL_KEPT=False, TAIL=False, FP32=False, MASKED=False, ASM=True, G=4, T=32,
    ROW_T=0, W=64, VEC=2,
)
constants.update(eval(sys.argv[1]))
types = {f"{view}_{what}_ptr": "*fp32" for view in ("row", "col") for what in ("amax", "outer")}
types["sr_ptr"] = "*i64"
signature = {}
for name in kernel.arg_names:
    pointer = name.endswith(("ptr", "state"))
    signature[name] = "constexpr" if name in constants else types.get(name, "*i32" if pointer else "i32")
attributes = {
    (i,): [["tt.divisibility", 16]]
    for i, n in enumerate(kernel.arg_names)
    if n.endswith(("ptr", "state")) or n in ("M", "COL_STRIDE")
}
source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
with tempfile.TemporaryDirectory() as folder:
    cubin = Path(folder) / "k.cubin"
    cubin.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([tool, "-res-usage", "-sass", cubin], capture_output=True, text=True, check=True)
print(done.stdout)
"""
CASES = {
    "mx": ({}, ("HFMA2", "BF16_V2", "VIMNMX.U16x2"), 2400),
    "mx_sr": ({"ROW_SR": True, "ROW_T": 8}, ("IDP", "SHFL", "IMAD.WIDE"), 2400),
    "mx_scaled": ({"ROW_SR": True, "ROW_T": 8, "SCALED": True}, ("IDP", "SHFL", "HMUL2.BF16"), 2600),
    "cta": (
        {"ROW": "nv_cta", "COL": "nv_cta", "ROW_CARRIER": "bf16", "COL_CARRIER": "bf16", "COL_KEPT": True,
         "COL_HADAMARD": "fixed16", "ROW_STRIDE": 2048, "T": 16, "ROW_T": 8},
        ("F2FP", "MUFU.RCP", "LDG.E.EL.64"), 7000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_packed_kernels_compile_for_hopper(case: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    changes, instructions, longest = CASES[case]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, repr(changes)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for instruction in instructions:
        assert instruction in done.stdout, f"no {instruction}"
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", done.stdout).groups())
    assert stack == 0, f"{stack} bytes of spills at {registers} registers"
    # kernels beyond 8000 instructions fall out of the instruction cache
    assert len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", done.stdout, re.MULTILINE)) < longest
