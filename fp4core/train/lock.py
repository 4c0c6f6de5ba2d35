"""One process at a time owns a run directory.

Workflow engines submit a job twice after their own crash; two writers in one run would interleave
checkpoints. The lock is advisory (`flock`), is held by the open file and so vanishes with the process,
however it ends. The lock file stands beside the run directory, since the directory itself may be archived.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of `run_dir` for the length of the block.

    Raises ValueError, naming the holder, when another process has it.
    """
    run_dir = Path(run_dir)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    path = run_dir.with_name(f".{run_dir.name}.lock")
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ValueError(
                f"{run_dir}: another process owns this run ({holder}); wait for it to end or stop it, "
                "two writers would spoil the checkpoints"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
