"""Small document collections, a tokenizer and shards made of them, once per session."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp4core.train import tokens

WORDS = ("scale", "block", "tensor", "amax", "round", "code", "tile", "stripe", "outer", "chunk", "gradient")


def text(number: int) -> str:
    """Text of document `number`: always the same, unlike every other."""
    rng = random.Random(number)
    return f"Document {number}. " + " ".join(rng.choices(WORDS, k=rng.randint(5, 120)))


def write_parquet(path: Path, texts: list[str | None], group: int = 20) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=group)


def write_lines(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)


@dataclass
class Collections:
    """web: 240 documents in Parquet and JSON lines, with copies; code: 80 documents in compressed lines."""

    root: Path
    tokenizer: Path
    web: Path
    code: Path


@pytest.fixture(scope="session")
def collections(tmp_path_factory: pytest.TempPathFactory) -> Collections:
    root = tmp_path_factory.mktemp("collections")
    web, code = root / "web", root / "code"
    write_parquet(web / "a.parquet", [text(n) for n in range(100)])
    write_parquet(web / "b" / "c.parquet", [text(n) for n in range(100, 160)] + ["", None] + [text(3)])
    write_lines(web / "z.jsonl", [text(n) for n in range(150, 240)])  # the first ten again
    write_lines(code / "one.jsonl.gz", [text(n) for n in range(1000, 1080)] + [text(7), text(1000)])
    folder = root / "tokenizer"
    folder.mkdir()
    tokenizer = tokens.train_tokenizer((text(n) for n in range(400)), 300)
    (folder / "tokenizer.json").write_bytes(tokens.tokenizer_bytes(tokenizer))
    return Collections(root, folder, web, code)
