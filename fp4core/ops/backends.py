"""Which implementations this machine can run, and why not the others.

- ``reference``: plain torch, any device; the oracle.
- ``carrier``: Triton producers and BF16 or FP8 GEMMs that hold every FP4 operand exactly (CUDA, sm_80+).
- ``native``: FP4 Tensor Cores through ``tl.dot_scaled`` (sm_100, sm_103).
- ``te``: Transformer Engine's own NVFP4 recipe (sm_100+).

All give the same codes and scales, bit for bit.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fp4core.ops import te_support

NAMES = ("reference", "carrier", "native", "te")


@dataclass(frozen=True)
class Backend:
    """One backend on this machine.

    Attributes:
        name: one of ``NAMES``.
        available: whether it can run here.
        reason: why, or why not and what it would need.
        device: the device it would use, e.g. "cpu" or "NVIDIA H200 (sm_90)"; "" when there is none.
    """

    name: str
    available: bool
    reason: str
    device: str


def _gpu() -> tuple[str, int]:
    """(description, compute capability as 10 x major + minor) of the current GPU, or ("", 0)."""
    if not torch.cuda.is_available() or torch.version.hip:
        return "", 0
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (sm_{major}{minor})", 10 * major + minor


def _kernel_problem(name: str) -> str:
    if importlib.util.find_spec(f"fp4core.kernels.{name}") is None:
        return f"this version of fp4core has no {name} kernels"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'fp4core[gpu]')"
    return ""


def backends() -> dict[str, Backend]:
    """All backends by name, in the order of ``NAMES``."""
    gpu, capability = _gpu()
    no_gpu = "no CUDA GPU is visible to torch"
    found = {
        "reference": Backend(
            "reference", True, "plain torch runs on any device", f"cpu, {gpu}" if gpu else "cpu"
        )
    }

    def add(
        name: str, lowest: int, supported: tuple[int, ...] | None, needs: str, problem: str, why: str
    ) -> None:
        fits = capability >= lowest and (supported is None or capability in supported)
        if not gpu:
            reason = f"{no_gpu}; needs {needs}"
        elif not fits:
            reason = f"{gpu} lacks what it needs: {needs}"
        else:
            reason = problem or why
        found[name] = Backend(name, bool(gpu) and fits and not problem, reason, gpu)

    carriers = "exact FP8 and BF16 carriers" if capability >= 89 else "exact BF16 carriers"
    add("carrier", 80, None, "CUDA sm_80 or later", _kernel_problem("carrier"), carriers)
    never = "FP4 Tensor Cores; this project has never run them on hardware"
    add(
        "native",
        100,
        (100, 103),
        "tcgen05 FP4 Tensor Cores (sm_100, sm_103)",
        _kernel_problem("native"),
        never,
    )
    te = te_support.problem() if capability >= 100 else te_support.version_problem()
    add("te", 100, None, "Transformer Engine >= 2.8 on sm_100 or later", te, "Transformer Engine's own NVFP4")
    return found


def resolve(backend: str, device: torch.device, function: str) -> tuple[str, Callable | None]:
    """The backend's name and its implementation of ``function`` ("quantize" or "matmul").

    None stands for the reference. ``auto`` on a GPU takes the carriers if they offer the function, else the
    reference. ``fp4core.kernels.<backend>`` offers plain functions:
    ``quantize(x2d, fmt, *, axis, hadamard, key, held_amax) -> (codes, block_scale, outer_scale)``, codes
    packed along the contraction axis, codes and scales in the orientation of the view; and
    ``matmul(a, b, *, dtype)``.

    Raises:
        ValueError: unknown backend, or one that cannot run here or on the tensor's device.
    """
    if backend not in ("auto", *NAMES):
        raise ValueError(f"backend: got {backend!r}; needed 'auto' or one of {', '.join(NAMES)}")
    if backend == "reference" or (backend == "auto" and device.type != "cuda"):
        return "reference", None
    wanted = backend if backend != "auto" else "carrier"
    state = backends()[wanted]
    implementation = None
    if state.available and device.type == "cuda" and wanted != "te":
        implementation = getattr(importlib.import_module(f"fp4core.kernels.{wanted}"), function, None)
    if implementation is not None:
        return wanted, implementation
    if backend == "auto":
        return "reference", None
    if not state.available:
        why = state.reason
    elif device.type != "cuda":
        why = f"the tensor is on {device}, needed a CUDA tensor"
    else:
        why = f"it offers no stand-alone {function}; use backend='reference'"
    raise ValueError(f"backend {backend!r} cannot {function} here: {why}")
