"""Documents to shards: every document in order and in the ledger, the same bytes when interrupted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from fp4core.__main__ import main
from fp4core.train import build_shards as module
from fp4core.train import documents, tokens
from fp4core.train.build_shards import ShardJob, build_shards
from fp4core.train.shards import TokenStream
from fp4core.train.tokens import END_OF_TEXT
from tests.inputs.conftest import Collections, text, write_lines, write_parquet


def job(collections: Collections, out: Path, **more) -> ShardJob:
    return ShardJob((collections.web,), collections.tokenizer, out, **{"shard_tokens": 2000, **more})


def contents(out: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(out.iterdir())}


def rows(out: Path) -> list[dict]:
    return [r for p in sorted(out.glob("*.documents.parquet")) for r in pq.read_table(p).to_pylist()]


@pytest.fixture(scope="module")
def built(collections, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("built") / "shards"
    build_shards(job(collections, out), note=lambda line: None)
    return out


def test_every_document_is_there_in_order_and_ends(collections, built):
    record = json.loads((built / "shards.json").read_text())
    paths = sorted(built.glob("*.arrow"))
    assert len(paths) == len(record["shards"]) > 3
    stream = TokenStream(paths, tokenizer_sha256=record["settings"]["tokenizer_sha256"], sequence=16)
    tokenizer = Tokenizer.from_file(str(collections.tokenizer / "tokenizer.json"))
    expected = [text(n) for n in range(160)] + [text(3)] + [text(n) for n in range(150, 240)]
    ids = stream.read(0, stream.tokens)
    ends = np.flatnonzero(ids == tokenizer.token_to_id(END_OF_TEXT))
    pieces = np.split(ids, ends + 1)
    assert [tokenizer.decode(p[:-1].tolist()) for p in pieces[:-1]] == expected
    assert len(pieces[-1]) == 0
    assert record["tokens"] == stream.tokens and record["documents"] == len(expected) == 251
    assert record["empty"] == 2
    assert stream.document_starts().tolist() == [0, *(ends[:-1] + 1).tolist()]


def test_ledger_has_every_document_once_with_its_place(built):
    ledger = rows(built)
    assert len(ledger) == 253
    for row in ledger[:100]:
        assert (row["source"], row["sha256"]) == (
            "web/a.parquet",
            hashlib.sha256(text(row["row"]).encode()).digest(),
        )
    assert [(r["source"], r["row"], r["tokens"]) for r in ledger if r["why"] == "empty"] == [
        ("web/b/c.parquet", 60, 0),
        ("web/b/c.parquet", 61, 0),
    ]
    record = json.loads((built / "shards.json").read_text())
    assert sum(r["tokens"] for r in ledger) == record["tokens"]


def test_shards_end_with_the_document_that_fills_them(built):
    record = json.loads((built / "shards.json").read_text())
    for entry in record["shards"][:-1]:
        last = pq.read_table(built / f"{entry['name']}.documents.parquet")["tokens"].to_pylist()[-1]
        assert entry["tokens"] - last < 2000 <= entry["tokens"]


def test_second_build_has_nothing_to_do(collections, built):
    before, lines = contents(built), []
    build_shards(job(collections, built), note=lines.append)
    assert contents(built) == before and lines == [f"build-shards: {built} is up to date"]


@pytest.mark.parametrize("at", [1, 60, 140, 200, 250])
def test_interrupted_build_goes_on_to_the_same_bytes(collections, built, tmp_path, monkeypatch, at):
    read, seen = documents.read_documents, [0]

    def failing(*arguments, **options):
        for document in read(*arguments, **options):
            seen[0] += 1
            if seen[0] == at:
                raise KeyboardInterrupt
            yield document

    out = tmp_path / "shards"
    monkeypatch.setattr(module, "read_documents", failing)
    monkeypatch.setattr(tokens, "_ENCODE_CHARACTERS", 1500)
    with pytest.raises(KeyboardInterrupt):
        build_shards(job(collections, out), note=lambda line: None)
    assert not (out / "shards.json").exists()
    build_shards(job(collections, out), note=lambda line: None)
    assert contents(out) == contents(built)


def test_other_settings_never_continue_a_build(collections, built, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"shards\.json: a build with another shard tokens \(there 2000"):
        build_shards(job(collections, built, shard_tokens=4000), note=lambda line: None)
    monkeypatch.setattr(module, "read_documents", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build_shards(job(collections, tmp_path / "out"), note=lambda line: None)
    with pytest.raises(ValueError, match=r"\.progress\.json: a build with another sources"):
        other = ShardJob((collections.code,), collections.tokenizer, tmp_path / "out", shard_tokens=2000)
        build_shards(other, note=lambda line: None)


def test_special_tokens_inside_a_text_are_text(collections, tmp_path):
    write_lines(tmp_path / "d.jsonl", [f"before {END_OF_TEXT} after"])
    out = tmp_path / "out"
    build_shards(ShardJob((tmp_path / "d.jsonl",), collections.tokenizer, out), note=lambda line: None)
    stream = TokenStream([out / "shard-00000.arrow"], tokenizer_sha256=None, sequence=2)  # type: ignore[arg-type]
    assert (stream.read(0, stream.tokens) == 0).sum() == 1


def test_only_left_out_documents_leave_a_ledger_and_no_shard(collections, tmp_path):
    write_parquet(tmp_path / "d" / "d.parquet", [text(1), "", ""])
    out = tmp_path / "out"
    small = ShardJob((tmp_path / "d",), collections.tokenizer, out, shard_tokens=1)
    build_shards(small, note=lambda line: None)
    assert sorted(p.name for p in out.iterdir()) == [
        "shard-00000.arrow",
        "shard-00000.documents.parquet",
        "shard-00001.documents.parquet",
        "shards.json",
    ]
    assert [r["why"] for r in rows(out)] == [None, "empty", "empty"]


def _no_column(folder):
    write_parquet(folder / "x.parquet", ["a"])
    return ["--field", "body"], r"x\.parquet: no column 'body'; it has id, text; name the column .* --field"


def _broken_parquet(folder):
    (folder / "x.parquet").write_bytes(b"PAR1 nothing")
    return [], r"x\.parquet: not a whole Parquet file"


def _broken_line(folder):
    (folder / "x.jsonl").write_text('{"text": "a"}\n{"text": \n')
    return [], r"x\.jsonl, row 1: no JSON lines"


def _no_key(folder):
    (folder / "x.jsonl").write_text('{"content": "a"}\n')
    return [], r"x\.jsonl, row 0: got keys content, needed an object whose 'text' is text"


def _surrogate(folder):
    (folder / "x.jsonl").write_text('{"text": "\\ud800"}\n')
    return [], r"x\.jsonl, row 0: no valid Unicode text"


def _nothing(folder):
    (folder / "x.csv").write_text("a")
    return [], r"no document file here; needed \.parquet"


def _no_text(folder):
    write_lines(folder / "x.jsonl", [""])
    return [], "not one document with text"


def _no_end(folder):
    write_lines(folder / "x.jsonl", ["a"])
    return ["--end-of-text", "<end>"], "--end-of-text '<end>': the tokenizer has no such token"


@pytest.mark.parametrize(
    "case", [_no_column, _broken_parquet, _broken_line, _no_key, _surrogate, _nothing, _no_text, _no_end]
)
def test_wrong_input_is_one_line(collections, tmp_path, capsys, case):
    folder = tmp_path / "documents"
    folder.mkdir()
    more, said = case(folder)
    out = tmp_path / "out"
    code = main(
        ["build-shards", str(folder), "--tokenizer", str(collections.tokenizer), "--out", str(out), *more]
    )
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ") and error.count("\n") == 1
    import re

    assert re.search(said, error), error
    assert not (out / "shards.json").exists()
