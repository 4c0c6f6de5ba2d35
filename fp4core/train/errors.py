"""How a run ends when it does not come to its end."""

from __future__ import annotations

from pathlib import Path


class StopEarly(Exception):
    """The run stopped before its target and can go on; the command line exits with 75."""


class RunError(Exception):
    """A run cannot go on (full disk, out of memory, ...); the command line exits with 1."""


class NonFinite(RunError):
    """A measurement came upon non-finite numbers: there is nothing to measure, and that is its result."""


class Diverged(RunError):
    """Training ended in non-finite numbers: a result, of which `record` (failure.json) is the record."""

    def __init__(self, message: str, record: Path) -> None:
        super().__init__(message)
        self.record = record


class EchoedError(ValueError):
    """Another rank's error, which that rank reports."""


class EchoedRunError(RunError):
    """A run that cannot go on because of another rank, which says why."""
