"""Ledgers of documents: one row per document, its SHA-256 first, beside the shards that hold its tokens.

    NAME.documents.parquet   sha256 (32 bytes, of the UTF-8 text) · source (file) · row (0-based) · tokens
                             (in the shard, end of text included; 0: left out) · why it was left out

A document is known by the hash of its text alone, so ledgers of different builders can be compared. Nothing
here loads a training ledger whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        pa.field("sha256", pa.binary(32), nullable=False),
        pa.field("source", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("why", pa.dictionary(pa.int32(), pa.string())),
    ]
)
SUFFIX = ".documents.parquet"
_ROWS = 1 << 16


class Ledger:
    """Writes one ledger, a row group at a time."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        self._rows: list[tuple[bytes, str, int, int, str | None]] = []
        self.rows = 0

    def add(self, sha256: bytes, source: str, row: int, tokens: int, why: str | None = None) -> None:
        self._rows.append((sha256, source, row, tokens, why))
        self.rows += 1
        if len(self._rows) >= _ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            columns = [pa.array(values) for values in zip(*self._rows)]
            arrays = [column.cast(field.type) for column, field in zip(columns, SCHEMA)]
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA))
        self._rows = []

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._flush()
        self._writer.close()


def ledgers(directory: Path) -> list[Path]:
    """Ledgers of a directory of shards, by name."""
    return sorted(Path(directory).glob(f"*{SUFFIX}"))


def hashes(path: Path) -> Iterator[pa.Array]:
    """SHA-256 (binary 32) of the documents whose tokens a shard holds, a row group at a time."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS, columns=["sha256", "tokens"]):
            yield batch.column("sha256").filter(pc.greater(batch.column("tokens"), 0))


def held(directory: Path) -> set[bytes]:
    """SHA-256 of every document of a small directory of shards (a validation stream)."""
    return {value for path in ledgers(directory) for part in hashes(path) for value in part.to_pylist()}


def known_in(documents: set[bytes], directories: Iterable[Path]) -> dict[bytes, Path]:
    """Which of `documents` occur in the shards of `directories`, and in which ledger first."""
    found: dict[bytes, Path] = {}
    if not documents:
        return found
    wanted = pa.array(sorted(documents), pa.binary(32))
    for directory in directories:
        for path in ledgers(directory):
            for part in hashes(path):
                for value in part.filter(pc.is_in(part, value_set=wanted)).to_pylist():
                    found.setdefault(value, path)
    return found


def refuse_overlap(validation: Path, training: Iterable[Path]) -> None:
    """ValueError when a document of the validation stream occurs in training shards that have ledgers."""
    found = known_in(held(validation), training)
    if found:
        value, path = min(found.items())
        raise ValueError(
            f"{len(found)} documents of the validation stream {validation} occur in training shards (first: "
            f"sha256 {value.hex()} in {path}); build the shards again with --exclude {validation}, or the "
            "stream from other documents"
        )
