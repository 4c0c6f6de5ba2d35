"""metrics.parquet: one row per logged step, readable while the run goes on.

The file is rewritten whole and put in place by a rename (a 160B-token run logs under four thousand rows),
so a reader always sees a complete file. `resume(step)` drops the rows after the checkpoint that the run
goes on from: no step is missing and none is doubled.

Columns: step (int64) · loss (mean nats per token of the global batch) · grad_norm (before clipping) · lr ·
tokens (seen so far, int64) · tokens_per_s (all devices) · seconds (of the step) · memory_gib (peak of the
slowest rank's device, resident set on a CPU) · time_utc (seconds since 1970) · replays (int64: steps of the
run so far that were made again because an operand did not fit its carrier; a step has one row all the same).
"""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fp4core.records import write_atomic

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("loss", pa.float64()),
        ("grad_norm", pa.float64()),
        ("lr", pa.float64()),
        ("tokens", pa.int64()),
        ("tokens_per_s", pa.float64()),
        ("seconds", pa.float64()),
        ("memory_gib", pa.float64()),
        ("time_utc", pa.float64()),
        ("replays", pa.int64()),
    ]
)
FLUSH_SECONDS = 5.0


class Metrics:
    """Rows of one run; `path` None keeps them in memory only (ranks other than the first, probes)."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._flushed = time.monotonic()
        self._dirty = False

    def resume(self, step: int) -> None:
        """Read the rows up to `step`; later ones belong to work that is about to be done again."""
        if self.path is not None and self.path.is_file():
            table = pq.read_table(self.path, schema=SCHEMA)
            self.rows = [row for row in table.to_pylist() if row["step"] <= step]
        self._dirty = True

    def add(self, **row: Any) -> None:
        """Append a row; the file is refreshed at most every few seconds."""
        if self.rows and row["step"] <= self.rows[-1]["step"]:
            raise ValueError(f"metrics: step {row['step']} after step {self.rows[-1]['step']}")
        self.rows.append(row)
        self._dirty = True
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Put every row on disk."""
        if self.path is not None and self._dirty:
            sink = io.BytesIO()
            pq.write_table(pa.Table.from_pylist(self.rows, schema=SCHEMA), sink)
            write_atomic(self.path, sink.getvalue())
        self._dirty = False
        self._flushed = time.monotonic()
