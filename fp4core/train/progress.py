"""What someone who watches a run sees: a bar on a terminal, else plain lines; run.log gets the lines too."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType

from fp4core.records import utc_now

LINE_SECONDS = 10.0


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
