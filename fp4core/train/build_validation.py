"""`fp4core build-validation`: document collections -> the fixed validation stream of a study.

    key(document) = SHA-256(seed, SHA-256(text))            # the hash shuffle: a fixed random order
    collection i  = its distinct documents by ascending key until weight_i of the tokens are there
    stream        = all chosen documents by ascending key, packed into `sequences` rows of `length` tokens

Documents are known by the SHA-256 of their text: a copy is counted once, within and across collections. The
last document of a collection is cut so that the mix holds to the token; it still ends with end-of-text. What
is chosen depends on the documents alone, not on files or their order. One pass keeps at most the chosen
tokens in memory; only documents that may still be chosen are tokenised. An interrupted build goes on after
the last whole file.

    OUT/validation.arrow · validation.documents.parquet (in stream order) · validation.json (written last)
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fp4core.records import read_json, sha256_bytes, sha256_file, write_atomic, write_json

from .bound import end_of_text
from .build_shards import encode, load_tokenizer
from .documents import Text, find_files, read_documents
from .ledger import Ledger, known_in, ledgers
from .lock import run_lock
from .tokens import stream_sha256, token_dtype, write_validation

SCHEMA = {"name": "fp4core.validation_stream", "version": 1}
_SAVE_SECONDS = 20.0
_NOTE_SECONDS = 10.0


@dataclass(frozen=True)
class ValidationJob:
    """What to build: (weight, path) per collection; shards in `training` must not hold its documents."""

    mix: tuple[tuple[float, Path], ...]
    tokenizer: Path
    out: Path
    sequences: int = 768
    length: int = 8193
    seed: int = 0
    field: str = "text"
    end_of_text: str | None = None
    training: tuple[Path, ...] = ()


@dataclass(order=True)
class _Chosen:
    """A document that may be part of the stream; ordered by descending key, for a heap."""

    minus_key: int
    sha256: bytes = field(compare=False)
    source: str = field(compare=False)
    row: int = field(compare=False)
    ids: np.ndarray = field(compare=False)


class _Collection:
    """The distinct documents of smallest key that together reach `quota` tokens."""

    def __init__(self, quota: int, seed: int, taken: frozenset[bytes]) -> None:
        self.quota, self.taken = quota, taken
        self._salt = f"fp4core validation {seed} ".encode()
        self.heap: list[_Chosen] = []
        self.members: set[bytes] = set()
        self.tokens = self.seen = self.copies = 0

    def key(self, sha256: bytes) -> int:
        return int.from_bytes(hashlib.sha256(self._salt + sha256).digest(), "big")

    def wants(self, document: Text) -> bool:
        """Whether the document could still be chosen; counts it."""
        self.seen += 1
        if document.sha256 in self.taken or document.sha256 in self.members:
            self.copies += 1
            return False
        full = self.tokens >= self.quota
        return bool(document.text) and not (full and -self.key(document.sha256) < self.heap[0].minus_key)

    def add(self, document: Text, ids: np.ndarray) -> None:
        """Take a document that `wants` let through; drop those of larger keys that are no longer needed."""
        if document.sha256 in self.members:  # a copy in the same group of texts
            self.copies += 1
            return
        one = _Chosen(-self.key(document.sha256), document.sha256, document.source, document.row, ids)
        heapq.heappush(self.heap, one)
        self.members.add(document.sha256)
        self.tokens += len(ids)
        while self.tokens - len(self.heap[0].ids) >= self.quota:
            gone = heapq.heappop(self.heap)
            self.members.discard(gone.sha256)
            self.tokens -= len(gone.ids)

    def chosen(self, end: int) -> list[_Chosen]:
        """The documents by ascending key, the last cut to fill the quota exactly."""
        kept = sorted(self.heap, reverse=True)
        over = self.tokens - self.quota
        if over:
            last = kept[-1]
            last.ids = last.ids[: len(last.ids) - over].copy()
            last.ids[-1] = end
        return kept


def quotas(weights: list[float], total: int) -> list[int]:
    """Tokens per collection: shares of `total` by weight, the rest to the largest remainders."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(x) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def build_validation(
    job: ValidationJob, *, note: Callable[[str], None] = print, save_seconds: float = _SAVE_SECONDS
) -> Path:
    """Build the stream of `job`; returns the path of validation.json. ValueError says what is wrong."""
    if not job.mix or any(not weight > 0 for weight, _ in job.mix):
        raise ValueError("--mix: needed one or more collections, each with a weight above 0")
    if job.sequences < 2 or job.length < 2:
        raise ValueError(f"{job.sequences} sequences of {job.length} tokens: needed at least 2 of 2")
    tokenizer, tokenizer_sha256 = load_tokenizer(job.tokenizer)
    name, end = end_of_text(tokenizer, job.end_of_text)
    files = [find_files([path]) for _, path in job.mix]
    counts = quotas([weight for weight, _ in job.mix], job.sequences * job.length)
    settings = {
        "tokenizer_sha256": tokenizer_sha256,
        "vocab": tokenizer.get_vocab_size(),
        "end_of_text": name,
        "sequences": job.sequences,
        "length": job.length,
        "seed": job.seed,
        "field": job.field,
        "mix": [weight for weight, _ in job.mix],
        "sources": [{source: path.stat().st_size for source, path in one.items()} for one in files],
    }
    unknown = [str(d) for d in job.training if not ledgers(d)]
    if unknown:
        raise ValueError(f"--training {unknown[0]}: no ledger of documents here, so nothing can be checked")
    job.out.mkdir(parents=True, exist_ok=True)
    path = job.out / "validation.json"
    with run_lock(job.out):
        if path.is_file():
            if read_json(path).get("settings") != settings:
                raise ValueError(f"{path}: another stream is there; choose another --out or remove it")
            note(f"build-validation: {job.out} is up to date")
            return path
        state = _State(job.out / ".state.arrow", sha256_bytes(json.dumps(settings).encode()), save_seconds)
        collections = _collect(job, files, counts, state, tokenizer, end, note)
        write_json(path, _write(job, settings, collections, end, note))
        state.path.unlink(missing_ok=True)
    return path


def _collect(
    job: ValidationJob,
    files: list[dict[str, Path]],
    counts: list[int],
    state: _State,
    tokenizer: Any,
    end: int,
    note: Callable[[str], None],
) -> list[_Collection]:
    """Every collection, read file by file; goes on where `state` was saved."""
    done: list[_Collection] = []
    noted = time.monotonic()
    for number, (one, quota) in enumerate(zip(files, counts)):
        taken = frozenset(digest for c in done for digest in c.members)
        collection = _Collection(quota, job.seed, taken)
        after = state.restore(number, collection)
        if after:
            note(f"build-validation: collection {number + 1} goes on after {after}")
        for name, path in one.items():
            if after and name <= after:
                continue
            wanted = (d for d in read_documents(name, path, field=job.field) if collection.wants(d))
            for document, ids in encode(tokenizer, wanted, end):
                collection.add(document, ids)
            last = name == list(one)[-1]
            state.save(number, name, collection, last=last)
            if last or time.monotonic() - noted > _NOTE_SECONDS:
                noted = time.monotonic()
                seen, kept = collection.seen, len(collection.heap)
                note(f"build-validation: {name}: {seen:,} documents seen, {kept:,} chosen so far")
        if collection.tokens < quota:
            raise ValueError(
                f"{job.mix[number][1]}: {collection.tokens:,} tokens of distinct documents, needed {quota:,} "
                f"({job.mix[number][0]:g} parts of {job.sequences} x {job.length}); add documents or ask for "
                "fewer sequences"
            )
        done.append(collection)
    return done


def _write(
    job: ValidationJob,
    settings: dict[str, Any],
    collections: list[_Collection],
    end: int,
    note: Callable[[str], None],
) -> dict[str, Any]:
    parts = [collection.chosen(end) for collection in collections]
    stream = sorted((one for part in parts for one in part), reverse=True)
    found = known_in({one.sha256 for one in stream}, job.training)
    if found:
        digest, ledger = min(found.items())
        raise ValueError(
            f"{len(found)} of {len(stream)} documents occur in training shards (first: sha256 "
            f"{digest.hex()} in {ledger}); take other documents, or build those shards without them"
        )
    dtype = token_dtype(settings["vocab"])
    rows = np.concatenate([one.ids for one in stream]).astype(dtype).reshape(job.sequences, job.length)
    names = ("validation.arrow", "validation.documents.parquet")
    temporary = [job.out / f".{name}.part" for name in names]
    shared = {"tokenizer_sha256": settings["tokenizer_sha256"], "vocab": settings["vocab"]}
    write_validation(temporary[0], rows, **shared, source="build-validation")
    with Ledger(temporary[1]) as ledger_file:
        for one in stream:
            ledger_file.add(one.sha256, one.source, one.row, len(one.ids))
    for part, name in zip(temporary, names):
        os.replace(part, job.out / name)
    note(f"build-validation: {rows.shape[0]} sequences of {rows.shape[1]} from {len(stream):,} documents")
    return {
        "schema": SCHEMA,
        "settings": settings,
        "stream_sha256": stream_sha256(rows),
        "documents": len(stream),
        "collections": [
            {"quota": c.quota, "documents": len(part), "seen": c.seen, "copies": c.copies}
            for c, part in zip(collections, parts)
        ],
        "training_checked": [len(ledgers(d)) for d in job.training],
        "sha256": {name: sha256_file(job.out / name) for name in names},
    }


class _State:
    """The chosen documents so far, in one file that is replaced whole."""

    def __init__(self, path: Path, settings_sha256: str, save_seconds: float) -> None:
        self.path, self._settings, self._every = path, settings_sha256, save_seconds
        self._saved = time.monotonic()
        self._heads: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, list[_Chosen]] = {}

    def save(self, number: int, name: str, collection: _Collection, *, last: bool) -> None:
        """Remember that file `name` is done; at most every few seconds, and at a collection's end."""
        if not last and time.monotonic() - self._saved < self._every:
            return
        self._saved = time.monotonic()
        self._keep(number, {"name": name, "seen": collection.seen, "copies": collection.copies}, collection)
        rows = [
            {"collection": int(k), "sha256": c.sha256, "source": c.source, "row": c.row, "ids": c.ids}
            for k, chosen in self._rows.items()
            for c in chosen
        ]
        metadata = {"settings": self._settings, "collections": json.dumps(self._heads)}
        table = pa.Table.from_pylist(rows, schema=_STATE.with_metadata(metadata))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        write_atomic(self.path, sink.getvalue().to_pybytes())

    def _keep(self, number: int, head: dict[str, Any], collection: _Collection) -> None:
        self._heads[str(number)], self._rows[str(number)] = head, list(collection.heap)

    def restore(self, number: int, collection: _Collection) -> str | None:
        """Fill `collection` as it was saved; the name of the last file that it holds, None without one."""
        if not self.path.is_file():
            return None
        with pa.ipc.open_file(str(self.path)) as reader:
            metadata = {k.decode(): v.decode() for k, v in reader.schema.metadata.items()}
            table = reader.read_all()
        head = json.loads(metadata["collections"]).get(str(number))
        if metadata["settings"] != self._settings or head is None:
            return None
        for row in table.filter(pc.equal(table["collection"], number)).to_pylist():
            document = Text(row["source"], row["row"], "", row["sha256"])
            collection.add(document, np.array(row["ids"], np.uint32))
        collection.seen, collection.copies = head["seen"], head["copies"]
        self._keep(number, head, collection)
        return head["name"]


_STATE = pa.schema(
    [
        ("collection", pa.int32()),
        ("sha256", pa.binary(32)),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("ids", pa.list_(pa.uint32())),
    ]
)
