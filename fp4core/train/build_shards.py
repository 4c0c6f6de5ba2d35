"""`fp4core build-shards`: document collections -> training token shards and a ledger of every document.

    OUT/shard-00000.arrow               tokens, see tokens.py
        shard-00000.documents.parquet   see ledger.py
        shards.json                     written last: settings, counts and every file's SHA-256

One pass in bounded memory. A shard ends with the first document that fills it, so shards depend on the
documents and settings alone. An interrupted build goes on after the last whole shard (.progress.json) and
leaves the bytes that an unbroken one leaves.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4core.records import read_json, sha256_bytes, sha256_file, write_json

from .bound import end_of_text
from .documents import Text, find_files, read_documents
from .ledger import SUFFIX, Ledger, held
from .lock import run_lock
from .progress import Reading
from .tokens import encode_all, token_dtype, write_shard

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SCHEMA = {"name": "fp4core.shards", "version": 1}
SHARD_TOKENS = 1 << 28


@dataclass(frozen=True)
class ShardJob:
    """What to build. `exclude` are directories of validation streams whose documents are left out."""

    documents: tuple[Path, ...]
    tokenizer: Path
    out: Path
    field: str = "text"
    end_of_text: str | None = None
    shard_tokens: int = SHARD_TOKENS
    exclude: tuple[Path, ...] = ()


def load_tokenizer(path: Path) -> tuple[Tokenizer, str]:
    """The tokenizer in a directory or file and the SHA-256 of its tokenizer.json."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file}: no such tokenizer; needed a directory that holds tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{file}: no tokenizer that can be loaded ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is text, not the end of it
    return tokenizer, sha256_file(file)


def encode(tokenizer: Tokenizer, documents: Iterator[Text], end: int) -> Iterator[tuple[Text, np.ndarray]]:
    """(document, token ids with `end` last), see `encode_all`; empty texts give no tokens."""
    dtype = token_dtype(tokenizer.get_vocab_size())
    for document, ids in encode_all(tokenizer, documents):
        yield document, np.array([*ids, end] if document.text else [], dtype=dtype)


def build_shards(job: ShardJob, *, note: Callable[[str], None] = print) -> Path:
    """Build the shards of `job`, or what is left of them; returns the path of shards.json.

    ValueError for wrong inputs and for a directory that holds another build.
    """
    if job.shard_tokens < 1:
        raise ValueError(f"--shard-tokens {job.shard_tokens}: needed at least 1")
    tokenizer, tokenizer_sha256 = load_tokenizer(job.tokenizer)
    name, end = end_of_text(tokenizer, job.end_of_text)
    files = find_files(list(job.documents))
    excluded = sorted({digest for folder in job.exclude for digest in _excluded(folder)})
    settings = {
        "tokenizer_sha256": tokenizer_sha256,
        "vocab": tokenizer.get_vocab_size(),
        "end_of_text": name,
        "field": job.field,
        "shard_tokens": job.shard_tokens,
        "excluded_sha256": sha256_bytes(b"".join(excluded)),
        "sources": {source: path.stat().st_size for source, path in files.items()},
    }
    job.out.mkdir(parents=True, exist_ok=True)
    with run_lock(job.out):
        done = _finished(job.out / "shards.json", settings)
        if done:
            note(f"build-shards: {job.out} is up to date")
            return done
        return _Builder(job, settings, tokenizer, end, files, frozenset(excluded), note).run()


def _excluded(folder: Path) -> set[bytes]:
    found = held(folder)
    if not found:
        raise ValueError(f"--exclude {folder}: no ledger (*{SUFFIX}) of documents here")
    return found


def _finished(path: Path, settings: dict[str, Any]) -> Path | None:
    if not path.is_file():
        return None
    _same(path, read_json(path).get("settings", {}), settings)
    return path


def _same(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if old.get(key) != value:
            raise ValueError(
                f"{path}: a build with another {key.replace('_', ' ')} (there {_short(old.get(key))}, asked "
                f"{_short(value)}); choose another --out or remove that directory"
            )


def _short(value: Any) -> str:
    return f"{len(value)} files" if isinstance(value, dict) else str(value)


class _Builder:
    def __init__(
        self,
        job: ShardJob,
        settings: dict[str, Any],
        tokenizer: Tokenizer,
        end: int,
        files: dict[str, Path],
        excluded: frozenset[bytes],
        note: Callable[[str], None],
    ) -> None:
        self.job, self.settings, self.tokenizer, self.end = job, settings, tokenizer, end
        self.files, self.excluded, self.note = files, excluded, note
        self.progress = job.out / ".progress.json"
        self.shards: list[dict[str, Any]] = []
        self.counts = {"tokens": 0, "documents": 0, "empty": 0, "excluded": 0}
        self.after: tuple[str, int] | None = None  # place of the last document that is in a shard or ledger
        self.exhausted = False
        sizes = settings["sources"]
        self._before = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0)))
        self._bar = Reading("build-shards", total=sum(sizes.values()), note=note)

    def run(self) -> Path:
        self._resume()
        stream = encode(self.tokenizer, self._documents(), self.end)
        with self._bar:
            while not self.exhausted:
                self._shard(stream)
        if not self.counts["documents"]:
            raise ValueError(f"{', '.join(map(str, self.job.documents))}: not one document with text")
        path = self.job.out / "shards.json"
        write_json(path, self._record())
        self.progress.unlink(missing_ok=True)
        self.note(
            f"build-shards: {self.counts['tokens']:,} tokens of {self.counts['documents']:,} documents in "
            f"{sum(s['tokens'] > 0 for s in self.shards)} shards in {self.job.out}"
        )
        return path

    def _record(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "settings": self.settings,
            "end_of_text": self.settings["end_of_text"],
            **self.counts,
            "shards": self.shards,
        }

    def _resume(self) -> None:
        if not self.progress.is_file():
            if stray := next(self.job.out.glob("*.arrow"), None):
                raise ValueError(
                    f"{stray}: shards of an unknown build are in --out; choose an empty directory"
                )
            write_json(self.progress, {**self._record(), "after": None})
            return
        old = read_json(self.progress)
        _same(self.progress, old["settings"], self.settings)
        self.shards, self.counts = old["shards"], {key: old[key] for key in self.counts}
        self.after = tuple(old["after"]) if old["after"] else None
        if self.after:
            self.note(f"build-shards: going on after {len(self.shards)} shards ({self.after[0]})")

    def _documents(self) -> Iterator[Text]:
        for name, path in self.files.items():
            if self.after and name < self.after[0]:
                continue
            first = self.after[1] + 1 if self.after and name == self.after[0] else 0
            yield from read_documents(name, path, field=self.job.field, first_row=first)

    def _shard(self, stream: Iterator[tuple[Text, np.ndarray]]) -> None:
        name = f"shard-{len(self.shards):05d}"
        names = (f"{name}.arrow", f"{name}{SUFFIX}")
        parts = [self.job.out / f".{file}.part" for file in names]
        counts = dict(self.counts)
        with Ledger(parts[1]) as ledger:
            written = write_shard(
                parts[0],
                self._fill(stream, ledger, counts),
                tokenizer_sha256=self.settings["tokenizer_sha256"],
                vocab=self.settings["vocab"],
                source="build-shards",
            )
        if not ledger.rows:  # the last document filled the shard before
            for part in parts:
                part.unlink()
            return
        entry = {"name": name, **written, "sha256": {}}
        for part, file in zip(parts, names):
            if file.endswith(".arrow") and not written["documents"]:
                part.unlink()  # nothing but left-out documents after the last shard
                continue
            entry["sha256"][file] = sha256_file(part)
            os.replace(part, self.job.out / file)
        self.shards.append(entry)
        self.counts = {**counts, "tokens": self.counts["tokens"] + written["tokens"]}
        self.counts["documents"] += written["documents"]
        write_json(self.progress, {**self._record(), "after": self.after})

    def _fill(
        self, stream: Iterator[tuple[Text, np.ndarray]], ledger: Ledger, counts: dict[str, int]
    ) -> Iterator[np.ndarray]:
        """Token arrays until the shard is full; every document that passes by goes into the ledger."""
        used = 0
        for document, ids in stream:
            why = "excluded" if document.sha256 in self.excluded else None if len(ids) else "empty"
            ledger.add(document.sha256, document.source, document.row, 0 if why else len(ids), why)
            self.after = (document.source, document.row)
            if why:
                counts[why] += 1
                continue
            used += len(ids)
            self._bar.at(self._before[document.source] + document.done, self.counts["tokens"] + used)
            yield ids
            if used >= self.job.shard_tokens:
                return
        self.exhausted = True
