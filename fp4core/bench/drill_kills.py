"""Ways to interrupt a run of the resume drill, and the run that suffers them.

    step         kill -9 at a random moment after the start has made a checkpoint of its own
    write        kill -9 while a checkpoint is half on disk: the start's first, or one of the two after it
    async write  the same under asynchronous checkpoints
    sigterm      SIGTERM at a random moment: the run must write a checkpoint and exit with 75
    budget       a time limit of seconds: the same
    evaluation   kill -9 during `python -m eval validate` of the finished run: at a random moment, or once the
                 first of its cuts is scored

After each the same command starts again.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import time
from typing import Any

import psutil

from fp4core.bench.drill_lab import Bench

KINDS = ("step", "write", "async write", "sigterm", "budget", "evaluation")
_STOPPED = 75
_SPREAD = 0.5  # seconds
_GONE = 60.0  # seconds that a killed process may take to give its memory back


def plan(kills: int, kinds: tuple[str, ...], rng: random.Random) -> list[str]:
    """`kills` interruptions, every kind as often as the others, in a random order; evaluation comes last."""
    chosen = [kinds[number % len(kinds)] for number in range(kills)]
    rng.shuffle(chosen)
    return sorted(chosen, key=lambda kind: kind == "evaluation")


class Broken:
    """One route's run under interruptions; `poll` drives it until `ended`."""

    def __init__(
        self, bench: Bench, route: str, kinds: list[str], rng: random.Random, evaluation_s: float
    ) -> None:
        """`evaluation_s`: how long an evaluation takes, roughly; later ones are killed inside that time."""
        self.bench, self.route, self.evaluation_s = bench, route, evaluation_s
        self.waiting, self.rng = list(kinds), rng
        self.made: list[dict[str, Any]] = []
        self.missed: list[str] = []
        self.trained = self.ended = False
        self.error: str | None = None
        self._evaluate = "evaluation" in kinds
        self._next()

    def poll(self) -> None:
        """Interrupt, start again, or see that it is done."""
        code = self.process.poll()
        if code is None:
            if self.kind is not None and self._now():
                self._interrupt()
        elif code == _STOPPED and self.kind in ("sigterm", "budget"):
            self._made()
        elif code != 0:
            self.error, self.ended = f"ended with {code} under {self.kind or 'no interruption'}", True
        elif self.trained:
            if self.kind is not None:
                self.missed.append(self.kind)
            self.ended = not self.waiting
            if self.waiting:
                self._next()
        else:
            self.trained = True
            late = [kind for kind in (self.kind, *self.waiting) if kind not in (None, "evaluation")]
            self.missed += late
            self.waiting = [kind for kind in self.waiting if kind == "evaluation"]
            self.ended = not self._evaluate
            if self._evaluate:
                self._next()

    def kill(self) -> None:
        """End the process in flight at the end of the drill's time."""
        if self.process.poll() is None:
            _kill(self.process)
            self.error = self.error or "time limit"

    def _next(self) -> None:
        takes = bool(self.waiting) and (self.waiting[0] == "evaluation") == self.trained
        self.kind = self.waiting.pop(0) if takes else None
        self.known = self.bench.checkpoints("broken", self.route)
        self.scored = len(self.bench.records("broken", self.route))
        # whole checkpoints of this start before the one whose writing is interrupted
        self.after = min(self.rng.randrange(3), self._left() - 1)
        self.began, self.due = time.time(), None
        self.process = self._start()

    def _left(self) -> int:
        """Checkpoints that the run still has to write, at least 1."""
        train = self.bench.study.train
        newest = max((int(name.removeprefix("step-")) for name in self.known), default=0)
        return max(1, (train.steps - newest) // train.checkpoint_every)

    def _start(self) -> subprocess.Popen[bytes]:
        if self.trained:
            self.due = self.began + self.rng.uniform(0.3, 0.95) * self.evaluation_s
            return self.bench.evaluate("broken", self.route)
        more = ["--max-seconds", f"{self.rng.uniform(1.0, 8.0):.1f}"] if self.kind == "budget" else []
        return self.bench.start("broken", self.route, *more, beside=self.kind == "async write")

    def _now(self) -> bool:
        if self.kind == "budget":
            return False
        if self.kind == "evaluation" and len(self.bench.records("broken", self.route)) > self.scored:
            return True
        if self.kind in ("write", "async write"):
            whole = len(self.bench.checkpoints("broken", self.route) - self.known)
            half = self.bench.half_written("broken", self.route)
            return whole >= self.after and any(self._is_new(path) for path in half)
        if self.due is None and self.bench.checkpoints("broken", self.route) - self.known:
            self.due = time.time() + self.rng.uniform(0.0, _SPREAD)
        return self.due is not None and time.time() >= self.due

    def _is_new(self, path: Any) -> bool:
        """Not what an earlier kill left behind."""
        try:
            return path.stat().st_mtime > self.began and any(path.iterdir())
        except OSError:
            return False

    def _interrupt(self) -> None:
        if self.kind == "sigterm":
            os.killpg(self.process.pid, signal.SIGTERM)
            self.due = math.inf  # once; how it ends is seen by `poll`, within the drill's time
            return
        _kill(self.process)
        self._made()

    def _made(self) -> None:
        half = self.bench.half_written("broken", self.route)
        newest = max(self.bench.checkpoints("broken", self.route), default="none")
        self.made.append({"kind": self.kind, "newest": newest, "half_written": bool(half)})
        print(f"[drill] {self.route}: {self.kind}, newest whole {newest}, starts again", flush=True)
        self._next()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """kill -9 to every process of the run, and wait until the last has let go of its lock."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until = time.time() + _GONE
    while time.time() < until and any(_lives(other, process.pid) for other in psutil.process_iter()):
        time.sleep(0.01)


def _lives(other: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(other.pid) == group and other.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ProcessLookupError):
        return False
