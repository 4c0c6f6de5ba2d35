"""What a child process runs: one fp4core command, its exit code as the process's own."""

import os
import sys

from fp4core.__main__ import main


def run_command(arguments: list[str], output: str) -> None:
    """Run `python -m fp4core ARGUMENTS` in this process, its output in a file; leave with its exit code."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.exit(main(arguments))
