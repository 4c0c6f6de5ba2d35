"""Every kernel that a route launches on a Hopper GPU, under any plan, compiles; see ``compile_launches``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MX = {
    "norm_forward_kernel": 4,
    "silu_forward_kernel": 4,
    "silu_gradients_kernel": 4,
    "silu_backward_kernel": 6,  # with a BF16 carrier; with a rotation as well, below
    "rope_forward_kernel": 1,
    "rope_backward_kernel": 24,
    "rope_joint_kernel": 8,
    "swiglu_backward_kernel": 8,
    "dual_kernel": 40,
}
NV = {"_chunk_kernel": 5, "_outer_kernel": 6, "dual_kernel": 40}


@pytest.mark.parametrize(
    ("routes", "least"),
    [
        (("mxfp4_sr", "mxfp4_sr_h32"), MX | {"silu_backward_kernel": 18}),
        (("nvfp4_cta", "nvfp4_cta_h16", "nvfp4_global", "te_nvfp4", "te_nvfp4_bf16x4", "ue5m3"), NV),
        (("operand_hybrid_h16", "operand_hybrid_h32"), {"silu_gradients_kernel": 2}),
        (("depth_hybrid_global_27_5",), MX | {"_outer_kernel": 1}),  # both families in one model
    ],
)
def test_every_launch_compiles(routes: tuple[str, ...], least: dict[str, int]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_launches", *routes],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    variants = json.loads(done.stdout.splitlines()[-1])["kernels"]
    for kernel, count in least.items():
        assert variants.get(kernel, 0) >= count, variants
