"""Tokenizer training and token shards.

A shard is one Arrow IPC file that is read through a memory map. It has one column `tokens` (uint16, or
uint32 when the vocabulary needs it) in record batches of at most 2^20 tokens. The schema's metadata hold
`kind`, `version`, `tokenizer_sha256`, `vocab` and `source`; each record batch's own metadata hold
`documents`, the little-endian int64 places (counted from the shard's start) at which documents begin, so a
corpus of any size is written in one pass and in bounded memory. A document ends with the end-of-text token.

The validation stream is a shard whose column is a fixed-size list: one row per sequence of S + 1 tokens.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from fp4core.records import sha256_bytes, sync_directory

from .corpus import Document

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
SHARD_VERSION = "1"
BATCH_TOKENS = 1 << 20
_ENCODE_CHARACTERS = 4 << 20
_AHEAD = 2


def token_dtype(vocab: int) -> np.dtype:
    """Narrowest of uint16 and uint32 that holds every token of the vocabulary."""
    return np.dtype(np.uint16 if vocab <= 1 << 16 else np.uint32)


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE with `vocab` entries; entry 0 is end-of-text. The same texts give the same bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < 257:
        raise ValueError(f"vocabulary of {vocab} is too small: byte-level BPE needs at least 257 entries")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(
            f"the corpus yields {tokenizer.get_vocab_size()} merges and bytes, needed {vocab}; use fewer"
        )
    return tokenizer


def tokenizer_bytes(tokenizer: Tokenizer) -> bytes:
    """The tokenizer.json that is stored, hashed and shipped with exported checkpoints."""
    return (tokenizer.to_str(pretty=True) + "\n").encode()


class _HasText(Protocol):
    @property
    def text(self) -> str: ...


Item = TypeVar("Item", bound=_HasText)


def encode_all(tokenizer: Tokenizer, documents: Iterable[Item]) -> Iterator[tuple[Item, list[int]]]:
    """(document, its token ids) in order: groups of a few MB, each on all cores, the next read meanwhile.

    Holds `_AHEAD` groups beyond the one that is being consumed, however long the documents' stream is.
    """
    source = iter(documents)
    with ThreadPoolExecutor(1, "encode") as pool:
        ahead: deque[tuple[list[Item], Future[Any]]] = deque()
        while True:
            while len(ahead) < _AHEAD and (group := list(_group(source))):
                texts = [document.text for document in group]
                encode = functools.partial(tokenizer.encode_batch_fast, texts, add_special_tokens=False)
                ahead.append((group, pool.submit(encode)))
            if not ahead:
                return
            group, encoded = ahead.popleft()
            for document, encoding in zip(group, encoded.result(), strict=True):
                yield document, encoding.ids


def _group(documents: Iterator[Item]) -> Iterator[Item]:
    size = 0
    while size < _ENCODE_CHARACTERS and (document := next(documents, None)) is not None:
        size += len(document.text) + 1
        yield document


def encode(
    tokenizer: Tokenizer,
    documents: Iterable[Document],
    vocab: int,
    *,
    tell: Callable[[int, int], None] = lambda characters, tokens: None,
) -> Iterator[np.ndarray]:
    """Token ids of each document, end-of-text included; `tell` hears the characters and tokens so far."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    dtype = token_dtype(vocab)
    characters = tokens = 0
    for document, ids in encode_all(tokenizer, documents):
        characters, tokens = characters + len(document.text), tokens + len(ids) + 1
        tell(characters, tokens)
        yield np.array([*ids, end], dtype=dtype)


def _schema(kind: str, column: pa.DataType, *, tokenizer_sha256: str, vocab: int, source: str) -> pa.Schema:
    metadata = {
        "kind": kind,
        "version": SHARD_VERSION,
        "tokenizer_sha256": tokenizer_sha256,
        "vocab": str(vocab),
        "source": source,
    }
    return pa.schema([pa.field("tokens", column, nullable=False)], metadata=metadata)


def write_shard(
    path: Path, documents: Iterable[np.ndarray], *, tokenizer_sha256: str, vocab: int, source: str
) -> dict[str, int]:
    """Write the training shard of `documents` (token arrays); returns its token and document counts."""
    dtype = token_dtype(vocab)
    column = pa.from_numpy_dtype(dtype)
    schema = _schema("train", column, tokenizer_sha256=tokenizer_sha256, vocab=vocab, source=source)
    total = count = 0
    buffer = np.empty(BATCH_TOKENS, dtype)
    used = 0
    starts: list[int] = []
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:

        def flush() -> None:
            nonlocal used, starts
            if used:
                places = np.array(starts, "<i8").tobytes()
                batch = pa.record_batch([pa.array(buffer[:used].copy(), column)], schema=schema)
                writer.write_batch(batch, custom_metadata={"documents": places})
            used, starts = 0, []

        for document in documents:
            starts.append(total)
            count += 1
            rest = document
            while len(rest):
                taken = min(len(rest), BATCH_TOKENS - used)
                buffer[used : used + taken] = rest[:taken]
                used, total, rest = used + taken, total + taken, rest[taken:]
                if used == BATCH_TOKENS:
                    flush()
        flush()
    _flush_to_disk(path)
    return {"tokens": total, "documents": count}


def pack_validation(stream: np.ndarray, *, sequences: int, length: int) -> np.ndarray:
    """Cut a token stream into windows of `length` and take `sequences` of them, evenly spread.

    Even spacing keeps every address in the stream: a contiguous cut would measure a single region.
    Returns [sequences, length]. ValueError when the stream is too short.
    """
    windows = len(stream) // length
    if windows < sequences:
        raise ValueError(
            f"validation text holds {windows} sequences of {length} tokens, needed {sequences}; "
            "ask for fewer sequences or shorter ones"
        )
    chosen = (np.arange(sequences) * windows) // sequences
    return stream[: windows * length].reshape(windows, length)[chosen]


def stream_sha256(sequences: np.ndarray) -> str:
    """Identity of a validation stream: SHA-256 of its tokens as row-major little-endian int32."""
    return sha256_bytes(np.ascontiguousarray(sequences, dtype="<i4").tobytes())


def unigram_entropy(targets: np.ndarray, vocab: int) -> float:
    """Entropy of the targets' own unigram distribution in nats: the best that knows no context."""
    p = np.bincount(targets.reshape(-1).astype(np.int64), minlength=vocab) / targets.size
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def write_validation(path: Path, rows: np.ndarray, *, tokenizer_sha256: str, vocab: int, source: str) -> None:
    """Write [sequences, S + 1] tokens as a fixed-size-list shard; its metadata carry `stream_sha256`."""
    column = pa.list_(pa.from_numpy_dtype(rows.dtype), rows.shape[1])
    schema = _schema("validation", column, tokenizer_sha256=tokenizer_sha256, vocab=vocab, source=source)
    schema = schema.with_metadata({**schema.metadata, "stream_sha256": stream_sha256(rows)})
    values = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([values], schema=schema))
    _flush_to_disk(path)


def _flush_to_disk(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    sync_directory(path.parent)
