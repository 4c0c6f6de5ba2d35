"""What every benchmark shares: timing, the copy rate, the environment, tables and records.

Times are of CUDA graphs: a graph holds several calls, so that the host's launch cost stays out; the result is
the median over replays, per call. Sizes are chosen so that the data is several times the L2 cache.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def require_gpu() -> torch.device:
    """The CUDA device. Raises ValueError where there is none."""
    if not torch.cuda.is_available():
        raise ValueError(
            "bench: got a machine without a CUDA GPU; needed one (timings on a CPU say nothing here)"
        )
    return torch.device("cuda", torch.cuda.current_device())


def time_ms(fn: Callable[[], Any], *, calls: int = 8, replays: int = 5, graph: bool = True) -> float:
    """Milliseconds of one call of ``fn``: median over ``replays`` of a graph of ``calls`` calls.

    With ``graph=False`` (functions that cannot be captured) the calls are queued behind a busy wait instead.
    """
    fn()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(calls):
                fn()
        run: Callable[[], Any] = captured.replay
        run()
    else:

        def run() -> None:
            torch.cuda._sleep(2_000_000)
            start.record()
            for _ in range(calls):
                fn()

    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / calls)
    return statistics.median(times)


def copy_tbps(total_bytes: int, device: torch.device) -> float:
    """TB/s of a device copy that moves ``total_bytes`` (half read, half written)."""
    source = torch.randint(0, 255, (total_bytes // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return total_bytes / time_ms(lambda: target.copy_(source)) / 1e9


def commit() -> str | None:
    """Short commit of the working tree, with "+" where it has changes; None outside a repository."""
    root = Path(__file__).parents[2]
    try:
        head = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "-uno", "fp4core"],
            capture_output=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def _module() -> str:
    """Name of the module that this process runs, as `python -m` takes it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = "fp4core.bench" if spec is None else spec.name.removesuffix(".__main__")
    return name if name.startswith("fp4core") else "fp4core.bench"


def environment() -> dict[str, Any]:
    """Device, versions, date and command of this process."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    import triton

    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join(["python -m", _module(), *sys.argv[1:]]),
    }


def write_record(name: str, rows: Sequence[dict[str, Any]], out: Path, **more: Any) -> Path:
    """Write ``{name, environment, rows, ...}`` as JSON, atomically; returns the path."""
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {"benchmark": name, "environment": environment(), **more, "rows": list(rows)}
    temporary = out.with_suffix(out.suffix + ".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, out)
    return out


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Rows as aligned text."""

    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)

    cells = [list(columns), *([cell(r.get(c)) for c in columns] for r in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(v.ljust(w) for v, w in zip(line, widths)).rstrip() for line in cells)
