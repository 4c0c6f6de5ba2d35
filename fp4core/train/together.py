"""Errors of a run of several processes: one clear line, and nobody left waiting."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from .distributed import World, is_lost_rank, is_out_of_memory, memory_line
from .errors import EchoedError, RunError


@contextlib.contextmanager
def together(world: World) -> Iterator[None]:
    """An error of the first rank is every rank's error, so that no rank waits for one that has left."""
    failure = None
    try:
        yield
    except (ValueError, OSError) as error:
        failure = error
    message = world.broadcast({"error": None if failure is None else str(failure)})["error"]
    if failure is not None:
        raise failure
    if message is not None:
        raise EchoedError(message)


@contextlib.contextmanager
def one_line_errors(world: World) -> Iterator[None]:
    """Turn a full disk, exhausted memory and a lost rank into one line each that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunError(
            f"disk is full ({error.filename or 'while writing'}); free space and run the same command again: "
            "it goes on from the last complete checkpoint"
        ) from error
    except RuntimeError as error:
        if is_out_of_memory(error):
            said = memory_line(error) or type(error).__name__
            raise RunError(
                f"out of device memory ({said}); on more ranks, or (for BF16 weights) with keep_gathered: "
                "false, the same command goes on from the last complete checkpoint; a smaller "
                "train.local_batch or train.activation_checkpoint: full begins the run again (the old one is "
                "archived)"
            ) from error
        if world.size == 1 or not is_lost_rank(error):
            raise
        raise RunError(
            f"another process of the run is gone ({str(error).splitlines()[0]}); see its own output, "
            "then run the same command again: it goes on from the last complete checkpoint"
        ) from error
