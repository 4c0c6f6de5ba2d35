"""What a child process runs: fp4core commands, their exit code as the process's own."""

import os
import sys

from fp4core.__main__ import main

Work = tuple[list[str], dict[str, str]]


def run_commands(work: list[Work], output: str) -> None:
    """Run each `python -m fp4core ARGUMENTS` under its environment, output in a file; stop at an error."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    code = 0
    for arguments, environment in work:
        os.environ.update(environment)
        code = main(arguments)
        if code:
            break
    sys.exit(code)
