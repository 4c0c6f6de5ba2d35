"""What a GPU did during one step, by kind of kernel: what explains a rate.

``record`` runs a function under torch's profiler (GPU activity alone, which costs a step about 1%), and
``kinds`` reads the trace. A kind's milliseconds are the sum over its kernels; ``alone`` is the time in which
nothing but that kind ran, so for ``communication`` it is what no computation hides; ``idle`` is the rest of
the time between the first kernel's start and the last one's end.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

# The first kind whose word is in a kernel's name takes it; names are those of cuBLAS, cuDNN, NCCL, torch.
KINDS = (
    ("communication", ("nccl", "scaled_sum_kernel")),
    ("compiled", ("triton_",)),
    ("attention", ("cudnn", "flash", "fmha", "sdpa")),
    (
        "boundaries",
        (
            *("dual_kernel", "silu_", "swiglu_", "norm_forward", "norm_backward", "rope_"),
            *("row_scales", "unscale_kernel"),
            *("_chunk_kernel", "_outer_kernel"),
        ),
    ),
    ("products", ("nvjet", "gemm", "cutlass", "splitk")),
    ("optimizer", ("adam", "lpnorm")),
    ("copies", ("memcpy", "memset", "copy", "cat", "fill")),
)


def kind(name: str) -> str:
    """Kind of a kernel by its name; "other" for one that no word fits."""
    lower = name.lower()
    return next((kind for kind, words in KINDS if any(word in lower for word in words)), "other")


def record(work: Callable[[], Any]) -> dict[str, Any]:
    """``kinds`` of what ``work`` did on the current GPU, finished before and after."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            work()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return kinds(json.loads(path.read_text())["traceEvents"])


def kinds(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds by kind, of the complete GPU events of a trace in Chrome's format.

    Returns: {"span_ms", "idle_ms", "kinds": {kind: {"ms", "alone_ms", "kernels"}}, "longest": the 20 names
        with the most time as [name, ms, kernels], "gaps": the 12 longest times in which nothing ran as [ms,
        ms after the first kernel's start, name of the kernel that ended before, of the one that came next]}.
    """
    spans: list[tuple[float, float, str]] = []
    names: dict[str, list[float]] = {}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        start, length = float(event["ts"]), float(event["dur"])
        spans.append((start, start + length, event["name"]))
        names.setdefault(event["name"], []).append(length)
    if not spans:
        raise ValueError("trace: got no GPU activity; needed a step on a GPU")
    found: dict[str, dict[str, Any]] = {}
    for start, end, name in spans:
        entry = found.setdefault(kind(name), {"ms": 0.0, "alone_ms": 0.0, "kernels": 0})
        entry["ms"] += (end - start) / 1e3
        entry["kernels"] += 1
    idle = 0.0
    running: dict[str, int] = {}
    gaps: list[tuple[float, float, str, str]] = []
    changes = sorted([(s, 1, n) for s, _, n in spans] + [(e, -1, n) for _, e, n in spans])
    before, last = changes[0][0], ""
    for at, change, name in changes:
        live = [w for w, count in running.items() if count]
        if len(live) == 1:
            found[live[0]]["alone_ms"] += (at - before) / 1e3
        elif not live and at > before:
            idle += (at - before) / 1e3
            gaps.append((at - before, before - changes[0][0], last, name))
        what = kind(name)
        running[what] = running.get(what, 0) + change
        before, last = at, name
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:20]
    return {
        "span_ms": (changes[-1][0] - changes[0][0]) / 1e3,
        "idle_ms": idle,
        "kinds": dict(sorted(found.items(), key=lambda item: -item[1]["ms"])),
        "longest": [[name[:80], sum(times) / 1e3, len(times)] for name, times in longest],
        "gaps": [[ms / 1e3, at / 1e3, a[:60], b[:60]] for ms, at, a, b in sorted(gaps, reverse=True)[:12]],
    }
