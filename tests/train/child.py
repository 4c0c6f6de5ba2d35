"""What a child process runs: fp4core commands, their exit code as the process's own."""

import errno
import os
import sys
import time
from pathlib import Path
from typing import IO

from fp4core.__main__ import main

Work = tuple[list[str], dict[str, str]]


def run_commands(work: list[Work], output: str, disk: str | None = None) -> None:
    """Run each `python -m fp4core ARGUMENTS` under its environment, output in a file; stop at an error.

    `disk` stands in for another file system under the checkpoints: "slow" or "full".
    """
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    code = 0
    for arguments, environment in work:
        os.environ.update(environment)
        if disk is not None:
            from fp4core.train import shard_files

            shard_files.open_file = {"slow": slow_disk, "full": full_disk}[disk]
        code = main(arguments)
        if code:
            break
    sys.exit(code)


def slow_disk(path: Path) -> IO[bytes]:
    """A file whose beginning is on disk for a while before the rest is."""
    path.write_bytes(b"half")
    time.sleep(0.2)
    return open(path, "wb", buffering=0)


def full_disk(path: Path) -> IO[bytes]:
    """Full from step 3 on."""
    if "step-00000002" not in str(path):
        raise OSError(errno.ENOSPC, "No space left on device", path.name)
    return open(path, "wb", buffering=0)
