"""A run of several ranks as one process group, so that a drill can end all of it with one signal.

    python -m fp4core.bench.drill_ranks N MODULE ARGUMENTS...      N times `python -m MODULE ARGUMENTS...`

Like torchrun, but that no rank leads a session of its own. Signals go to the whole group and are left to the
ranks; the exit code is that of the first rank that failed, else of rank 0.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def main(argv: list[str]) -> int:
    """N MODULE ARGUMENTS..."""
    size, module, arguments = int(argv[0]), argv[1], argv[2:]
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place["LOCAL_WORLD_SIZE"] = str(size)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]
    codes = [rank.wait() for rank in ranks]
    return next((code for code in codes if code not in (0, 75)), codes[0])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
