"""Every native product, and producers of each kind, compiled for sm_100a, sm_103a and sm_90 without a GPU.

In a process of its own, because kernels here are interpreted and because a compiler may abort. `python -m
fp4core.kernels.native.aot` compiles all of them (two minutes); this is the part that finds most mistakes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from fp4core.kernels.native import aot
from fp4core.ops.native_linear import encodings
from fp4core.recipe import list_routes, load_recipe, operands

ROOT = Path(__file__).parents[2]
COUNTED = json.loads((ROOT / "fp4core/bench/producer_instructions.json").read_text())["instructions"]


def compiled(*arguments: str) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fp4core.kernels.native.aot", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def within_the_chip(rows: list[dict]) -> None:
    for row in rows:
        assert row["problems"] == [], row
        assert row["stack_bytes"] == 0 and row["registers"] <= 255, row
        assert row["shared_bytes"] <= 227 * 1024 and row["tmem_columns"] <= 512, row


@pytest.mark.slow
@pytest.mark.parametrize("target", ["100", "103"])
def test_products_use_fp4_tensor_cores_within_the_chip(target: str) -> None:
    rows = compiled("--target", target, "--only", "gemm")
    within_the_chip(rows)
    kinds = {row["kernel"]: row["instructions"] for row in rows}
    assert len(kinds) == 8
    for kernel, instructions in kinds.items():
        kind = (
            "mxf4nvf4.block_scale.scale_vec::4X" if "mxf4nvf4" in kernel else "mxf4.block_scale.scale_vec::2X"
        )
        assert instructions == [f"tcgen05.mma.cta_group::1.kind::{kind}"], kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "only"),
    [("100", "hybrid-dy-h32"), ("100", "te-dy"), ("103", "cta-dy-h16"), ("103", "mxfp4-w")],
)
def test_producers_fit_and_convert_in_hardware(target: str, only: str) -> None:
    rows = compiled("--target", target, "--only", f"producer-{only}")
    assert rows
    within_the_chip(rows)
    for row in rows:
        # both views of te-dy are stochastic, which is software
        wanted = [] if only == "te-dy" else ["cvt.rn.satfinite.e2m1x2.f32"]
        assert row["instructions"] == wanted, row
        if target == "100" and triton.__version__.startswith("3.6."):
            # what the cost model counts; `aot --target 100` gives the new number
            assert row["sass_instructions"] == COUNTED[row["kernel"].removeprefix("producer-")], row


def test_what_a_chip_cannot_take_is_a_problem() -> None:
    build = next(aot.gemms(100))
    ptx = " ".join(build.needs)
    fits = {"registers": 255, "stack_bytes": 0, "shared_bytes": 227 * 1024, "tmem_columns": 512, "warps": 8}
    assert aot._problems(build, ptx, fits) == []
    for name, value, text in (
        ("registers", 256, "registers 256, at most 255"),
        ("stack_bytes", 8, "stack_bytes 8, at most 0"),  # a spilled register
        ("shared_bytes", 227 * 1024 + 1, "at most 232448"),
        ("tmem_columns", 513, "at most 512"),
        ("warps", 12, "registers of 12 warps 98304, at most 65536"),
    ):
        found = aot._problems(build, ptx, {**fits, name: value})
        assert len(found) == 1 and text in found[0]
    assert aot._problems(build, "", fits) == [f"no {need} in the PTX" for need in build.needs]


@pytest.mark.slow
@pytest.mark.parametrize("only", ["gemm", "producer-te-dy", "producer-hybrid-dy-h32"])
def test_the_same_sources_compile_where_they_are_emulated(only: str) -> None:
    """sm_90 in software: what ``test_native_gpu`` runs there."""
    rows = compiled("--target", "90", "--only", only)
    within_the_chip(rows)
    assert len(rows) == (2 if only == "gemm" else 1)
    for row in rows:
        assert row["instructions"] == [] and row["tmem_columns"] == 0, row


def test_no_product_with_e4m3_scales_is_listed_without_fp4_units() -> None:
    """Its compiler would abort the process."""
    listed = list(aot.gemms(aot.WITHOUT_FP4))
    assert len(listed) == 2 and len(list(aot.gemms(100))) == 8
    types = [t for build in listed for t in build.signature.values()]
    assert not any("fp8e4nv" in t for t in types)
    assert {build.constants["VEC"] for build in listed} == {32}


def test_the_list_of_builds_covers_every_route() -> None:
    known = {(str(row), str(col)) for row, col in aot.PAIRS.values()}
    for route in list_routes():
        for group in load_recipe(route).groups:
            if any("ue5m3" in str(operand) for _, _, operand in operands(group.linear)):
                continue  # no FP4 Tensor Core takes its block scales
            for row, col in encodings(group.linear):
                assert (str(row), str(col)) in known, (route, row, col)
