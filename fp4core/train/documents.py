"""A user's document collections as one stream: Parquet files and JSON lines, in a fixed order, never loaded
whole.

A document's place is (file, row): the row of a Parquet file, the line of a .jsonl file, both from 0. Files
come in the order of their names, so that the same collection gives the same stream on any machine.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_BATCH = 512


@dataclass(frozen=True)
class Text:
    """One document: file name inside its collection, row, text and the SHA-256 of the text's UTF-8 bytes.

    `done`: bytes of the file up to here, roughly, for a progress bar.
    """

    source: str
    row: int
    text: str
    sha256: bytes
    done: int = 0


def find_files(paths: list[Path]) -> dict[str, Path]:
    """Name -> file of every document file among `paths` (files or directories), in order of the names.

    ValueError for a path without document files, and when two files would have the same name.
    """
    found: dict[str, Path] = {}
    for root in paths:
        if "://" in str(root):
            raise ValueError(f"{root}: a URL, needed a local file or directory")
        if not root.exists():
            raise ValueError(f"{root}: no such file or directory")
        files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
        mine = {p.relative_to(root.parent).as_posix(): p for p in files if p.name.endswith(SUFFIXES)}
        if not mine:
            raise ValueError(f"{root}: no document file here; needed {', '.join(SUFFIXES)}")
        twice = sorted(mine.keys() & found.keys())
        if twice:
            raise ValueError(f"{twice[0]} occurs under two of the given paths; give a common parent instead")
        found |= mine
    return dict(sorted(found.items()))


def read_documents(name: str, path: Path, *, field: str, first_row: int = 0) -> Iterator[Text]:
    """Documents of one file from `first_row` on. ValueError names file and row of what cannot be read."""
    rows = _parquet if path.suffix == ".parquet" else _lines
    for row, text, done in rows(path, field, first_row):
        try:
            digest = hashlib.sha256(text.encode()).digest()
        except UnicodeEncodeError as error:
            raise ValueError(f"{path}, row {row}: no valid Unicode text ({error.reason}); mend it") from None
        yield Text(name, row, text, digest, done)


def _parquet(path: Path, field: str, first_row: int) -> Iterator[tuple[int, str, int]]:
    try:
        size = path.stat().st_size
        with pq.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise ValueError(
                    f"{path}: no column {field!r}; it has {', '.join(file.schema_arrow.names)}; name the "
                    "column of the text with --field"
                )
            kind = file.schema_arrow.field(field).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise ValueError(f"{path}: column {field!r} holds {kind}, needed text")
            row, rows = 0, file.metadata.num_rows
            for group in range(file.num_row_groups):
                inside = file.metadata.row_group(group).num_rows
                if row + inside <= first_row:
                    row += inside
                    continue
                for batch in file.iter_batches(_BATCH, row_groups=[group], columns=[field]):
                    for text in batch.column(0).to_pylist():
                        if row >= first_row:
                            yield row, text or "", size * (row + 1) // rows
                        row += 1
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole Parquet file ({error})") from None


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _lines(path: Path, field: str, first_row: int) -> Iterator[tuple[int, str, int]]:
    row = -1
    try:
        with _open(path) as file:
            place = getattr(file, "fileobj", file).tell  # of a .gz: among its compressed bytes
            for row, line in enumerate(file):
                if row < first_row or not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict) or not isinstance(record.get(field), str):
                    got = f"keys {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
                    raise ValueError(
                        f"{path}, row {row}: got {got}, needed an object whose {field!r} is text; name the "
                        "key of the text with --field"
                    )
                yield row, record[field], place()
    except (json.JSONDecodeError, UnicodeDecodeError, EOFError, OSError) as error:
        raise ValueError(f"{path}, row {max(row, 0)}: no JSON lines ({error})") from None
