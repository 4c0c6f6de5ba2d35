"""Why a run may stop before its target: a signal, or the end of the time it was given."""

from __future__ import annotations

import signal
import time
from types import FrameType

import psutil


def process_age() -> float:
    """Seconds since this process was started: imports count against a job's time limit."""
    return time.time() - psutil.Process().create_time()


class StopWish:
    """Remembers SIGTERM, SIGUSR1 or a first Ctrl-C; a second Ctrl-C interrupts at once.

    `max_seconds` is the age at which the process should be gone, checkpoint included.
    """

    def __init__(self, max_seconds: float | None) -> None:
        self.reason: str | None = None
        self._limit = max_seconds
        self._old: dict[int, object] = {}

    def __enter__(self) -> StopWish:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = f"got {signal.Signals(number).name}"
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self, *, step_seconds: float, save_seconds: float) -> bool:
        """True when the run should stop now: no time is left for another step and a checkpoint."""
        if self.reason is None and self._limit is not None:
            need = 1.5 * (step_seconds + save_seconds)
            if process_age() + need > self._limit:
                self.reason = f"the time budget of {self._limit:g} s is used up"
        return self.reason is not None
