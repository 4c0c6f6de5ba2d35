"""TensorBoard as an option: scalars of every logged step, in the run's own directory.

    runs/<route>/s<seed>/tensorboard/events.out.tfevents.*      one file per start of the run

A start that goes on from step k says so in its file, and TensorBoard then drops what earlier files hold of
later steps: the work that was done again has one point per step.
"""

from __future__ import annotations

import importlib.util
import re
import time
from pathlib import Path
from typing import Any

# column of metrics.parquet (or "mfu") -> tag
_TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "memory_gib": "speed/memory_gib",
    "replays": "speed/replayed_steps",
}
_FLUSH_SECONDS = 10
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")


def need_tensorboard() -> None:
    """ValueError when the package is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "TensorBoard was asked for but is not installed; install it with "
            "`pip install 'tensorboard>=2.20,<3'`, or leave out --tensorboard (train.tensorboard: false)"
        )


class Events:
    """Writes the events of one start; `directory` None writes nothing."""

    def __init__(self, directory: Path | None, *, after: int) -> None:
        """`after`: the step that the run goes on from, 0 at its beginning."""
        self._writer = None
        if directory is not None:
            from torch.utils.tensorboard import SummaryWriter

            _next_second(directory)
            self._writer = SummaryWriter(str(directory), purge_step=after + 1, flush_secs=_FLUSH_SECONDS)

    def add(self, row: dict[str, Any], mfu: float | None) -> None:
        """The scalars of a row of the metrics; what is None (MFU on a CPU) is left out."""
        if self._writer is None:
            return
        for name, value in {**row, "mfu": mfu}.items():
            if name in _TAGS and value is not None:
                self._writer.add_scalar(_TAGS[name], value, row["step"], walltime=row["time_utc"])

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _next_second(directory: Path) -> None:
    """TensorBoard reads files in the order of their names, which begin with the second they were made in."""
    found = (_NAME.match(path.name) for path in directory.glob("events.*"))
    latest = max((int(match[1]) for match in found if match), default=0)
    if 0 <= latest + 1 - time.time() <= 1:
        time.sleep(latest + 1 - time.time() + 0.01)
