"""What someone who watches a run sees: a bar on a terminal, else plain lines; run.log gets the lines too."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from fp4core.records import utc_now

LINE_SECONDS = 10.0


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Reading:
    """How far a text has been turned into tokens: a bar on a terminal, else a line every few seconds."""

    def __init__(self, title: str, *, total: int, note: Callable[[str], None], unit: str = "B") -> None:
        """`total` text in `unit`."""
        self.title, self.total, self._note = title, total, note
        self._told = self._began = time.monotonic()
        self._first: int | None = None
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=title, unit=unit, unit_scale=True, dynamic_ncols=True)

    def at(self, done: int, tokens: int) -> None:
        """`done` of the total has been read, `tokens` were made of it."""
        if self._first is None:  # a build that goes on starts in the middle
            self._first, self._began = done, time.monotonic()
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
            self._bar.update(done - self._bar.n)
        elif now - self._told > LINE_SECONDS and done > self._first:
            self._told = now
            left = (now - self._began) * (self.total - done) / (done - self._first)
            share = done / max(1, self.total)
            self._note(f"{self.title}: {share:.1%} · {tokens:,} tokens · ETA {duration(left)}")

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


class Progress:
    """Progress of one run of `total` steps; silent on every rank but the first."""

    def __init__(self, *, title: str, total: int, first: int, log: Path | None, quiet: bool = False) -> None:
        self.title, self.total, self._quiet = title, total, quiet
        self._log = None if log is None or quiet else open(log, "a")  # noqa: SIM115 (closed in __exit__)
        self._started, self._first, self._shown = time.monotonic(), first, -LINE_SECONDS
        self._bar = None
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=first, desc=title, unit="step", dynamic_ncols=True)

    def step(
        self, step: int, *, loss: float, tokens_per_s: float, mfu: float | None, last: bool = False
    ) -> None:
        """Show a finished step."""
        if self._quiet:
            return
        text = f"loss {loss:.4f} · {tokens_per_s:,.0f} tokens/s" + (
            "" if mfu is None else f" · MFU {mfu:.1%}"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        now = time.monotonic()
        if now - self._shown < LINE_SECONDS and not last:
            return
        self._shown = now
        pace = (now - self._started) / max(1, step - self._first)
        line = f"{self.title} step {step}/{self.total} · {text} · ETA {duration(pace * (self.total - step))}"
        self._write(line, show=self._bar is None)

    def note(self, line: str) -> None:
        """One plain line, everywhere."""
        if not self._quiet:
            self._write(f"{self.title} {line}", show=True)

    def _write(self, line: str, *, show: bool) -> None:
        if show and self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif show:
            print(line, flush=True)
        if self._log is not None:
            print(utc_now(), line, file=self._log, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._log is not None:
            self._log.close()
