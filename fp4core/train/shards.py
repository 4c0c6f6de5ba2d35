"""Reading token shards through a memory map, and cutting the global batch out of them.

Window w of a stream of T tokens is tokens[w·S : w·S + S + 1]: inputs are its first S, targets its last S,
so every token but the first is a target exactly once per epoch. `place` counts sequences from the start of
training; place p of the run with seed s reads window `order.window_at(p, seed=s)`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fp4core._recipe_files import verify_files
from fp4core.records import read_json, sha256_bytes, sha256_file

from .order import window_at

DATA_SCHEMA = "fp4core.data"


class TokenStream:
    """The training tokens of one data directory as one long array that is never loaded whole."""

    def __init__(self, paths: list[Path], *, tokenizer_sha256: str, sequence: int) -> None:
        """Map every shard; ValueError names the first missing, truncated or foreign one."""
        self.sequence = sequence
        self._pieces: list[np.ndarray] = []
        self._starts: list[int] = []
        self._documents: list[np.ndarray] = []
        total = 0
        for path in paths:
            shard_start = total
            reader = open_shard(path, kind="train", tokenizer_sha256=tokenizer_sha256)
            for index in range(reader.num_record_batches):
                batch, custom = _batch(reader, index)
                piece = batch.column(0).to_numpy(zero_copy_only=True)
                places = np.frombuffer((custom or {}).get(b"documents", b""), "<i8")
                self._documents.append(places + shard_start)
                self._pieces.append(piece)
                self._starts.append(total)
                total += len(piece)
        self.tokens = total
        self.windows = max(0, (total - 1) // sequence)
        if self.windows < 1:
            raise ValueError(
                f"training stream holds {total} tokens, needed at least {sequence + 1} for one window"
            )

    def document_starts(self) -> np.ndarray:
        """Places (int64) in the stream at which documents begin."""
        return np.concatenate(self._documents)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start..start+count as int64 [count]."""
        if start < 0 or start + count > self.tokens:
            raise ValueError(f"tokens {start}..{start + count} asked of a stream of {self.tokens}")
        out = np.empty(count, np.int64)
        piece, done = bisect.bisect_right(self._starts, start) - 1, 0
        while done < count:
            offset = start + done - self._starts[piece]
            part = self._pieces[piece][offset : offset + count - done]
            out[done : done + len(part)] = part
            done, piece = done + len(part), piece + 1
        return out

    def window(self, number: int) -> np.ndarray:
        """Window `number` as int64 [S + 1]."""
        return self.read(number * self.sequence, self.sequence + 1)

    def batch(self, first_place: int, count: int, *, seed: int) -> np.ndarray:
        """Sequences at places first_place.. of the run with `seed`, int64 [count, S + 1]."""
        places = range(first_place, first_place + count)
        return np.stack([self.window(window_at(p, windows=self.windows, seed=seed)) for p in places])


def _batch(reader: pa.ipc.RecordBatchFileReader, index: int) -> tuple[pa.RecordBatch, Any]:
    got = reader.get_batch_with_custom_metadata(index)
    return got.batch, got.custom_metadata


def open_shard(path: Path, *, kind: str, tokenizer_sha256: str | None) -> pa.ipc.RecordBatchFileReader:
    """Map an Arrow shard and check its kind and tokenizer; ValueError says what is wrong."""
    remedy = "make the data directory again with `python -m fp4core data`"
    if not Path(path).is_file():
        raise ValueError(f"{path}: shard is missing; {remedy}")
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a whole Arrow shard ({error}); {remedy}") from None
    metadata = {k.decode(): v.decode() for k, v in (reader.schema.metadata or {}).items()}
    if metadata.get("kind") != kind:
        raise ValueError(f"{path}: shard of kind {metadata.get('kind')!r}, needed {kind!r}; {remedy}")
    if tokenizer_sha256 is not None and metadata.get("tokenizer_sha256") != tokenizer_sha256:
        raise ValueError(
            f"{path}: made by tokenizer {metadata.get('tokenizer_sha256')}, "
            f"needed {tokenizer_sha256}; {remedy}"
        )
    return reader


def count_shard(reader: pa.ipc.RecordBatchFileReader) -> dict[str, int]:
    """Rows (tokens of a training shard) and documents of an open shard."""
    tokens = documents = 0
    for index in range(reader.num_record_batches):
        batch, custom = _batch(reader, index)
        tokens += batch.num_rows
        documents += len((custom or {}).get(b"documents", b"")) // 8
    return {"tokens": tokens, "documents": documents}


def check_data(directory: Path, *, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Verify every file of a data directory against data.json and return that record.

    A bound corpus may be large: `share` = (r, n) reads only the r-th of n parts of it, for n processes that
    check it together. ValueError names file, expected and found.
    """
    path = Path(directory) / "data.json"
    if not path.is_file():
        raise ValueError(f"{path}: no data here; run `python -m fp4core data --out {directory}` first")
    record = read_json(path)
    for name, expected in record["files"].items():
        file = Path(directory) / name
        if not file.is_file():
            raise ValueError(f"{file}: missing, but data.json lists it; make the data directory again")
        if file.stat().st_size != expected["bytes"] or sha256_file(file) != expected["sha256"]:
            raise ValueError(
                f"{file}: {file.stat().st_size} bytes, SHA-256 {sha256_file(file)}; "
                f"data.json says {expected['bytes']} bytes, {expected['sha256']}; make it again"
            )
    bound = record.get("bindings", {}).get("corpus")
    if bound:
        shards = {name: bound["sha256"][name] for name in record["training"]["shards"]}
        verify_files("corpus", Path(bound["directory"]), shards, part=share)
    return record


def open_training(directory: Path, record: dict[str, Any], *, sequence: int) -> TokenStream:
    """The training stream of a checked data directory."""
    base = Path(record["training"].get("directory", directory))
    paths = [base / name for name in record["training"]["shards"]]
    return TokenStream(paths, tokenizer_sha256=record["tokenizer"]["sha256"], sequence=sequence)


def read_validation(directory: Path, record: dict[str, Any]) -> np.ndarray:
    """The fixed validation stream, int64 [sequences, S + 1]."""
    path = Path(directory) / "validation.arrow"
    reader = open_shard(path, kind="validation", tokenizer_sha256=record["tokenizer"]["sha256"])
    column = reader.read_all().column("tokens").combine_chunks()
    return column.flatten().to_numpy().astype(np.int64).reshape(len(column), -1)


def tree_hash(items: Iterable[tuple[str, str]]) -> str:
    """One SHA-256 over (name, sha256) pairs, independent of their order: what names a data directory."""
    lines = sorted(f"{digest}  {name}\n" for name, digest in items)
    return sha256_bytes("".join(lines).encode())
