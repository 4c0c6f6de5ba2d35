"""The fixed validation stream: distinct, mixed to the token, shuffled by hash, packed, never trained on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from fp4core.__main__ import main
from fp4core.train import build_validation as module
from fp4core.train.build_shards import ShardJob, build_shards
from fp4core.train.build_validation import ValidationJob, build_validation, quotas
from fp4core.train.documents import find_files, read_documents
from tests.inputs.conftest import Collections, text, write_lines, write_parquet

SEQUENCES, LENGTH = 12, 257
TOTAL = SEQUENCES * LENGTH


def job(collections: Collections, out: Path, **more) -> ValidationJob:
    mix = ((82.0, collections.web), (18.0, collections.code))
    defaults = {"mix": mix, "tokenizer": collections.tokenizer, "out": out}
    return ValidationJob(**{**defaults, "sequences": SEQUENCES, "length": LENGTH, **more})


def quiet(line: str) -> None:
    pass


def contents(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(out.iterdir())}


@pytest.fixture(scope="module")
def built(collections, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("built") / "validation"
    build_validation(job(collections, out), note=quiet)
    return out


def obvious(collections: Collections) -> tuple[list[int], list[tuple[bytes, int]]]:
    """The stream by the plainest reading of its definition: all documents in memory, sorted."""
    tokenizer = Tokenizer.from_file(str(collections.tokenizer / "tokenizer.json"))
    taken: set[bytes] = set()
    everything = []
    for path, quota in zip((collections.web, collections.code), quotas([82, 18], TOTAL)):
        texts = {
            d.sha256: d.text
            for name, file in find_files([path]).items()
            for d in read_documents(name, file, field="text")
            if d.text and d.sha256 not in taken
        }
        key = {h: hashlib.sha256(b"fp4core validation 0 " + h).digest() for h in texts}
        used = 0
        for digest in sorted(texts, key=key.__getitem__):
            if used == quota:
                break
            ids = [*tokenizer.encode(texts[digest]).ids, 0][: quota - used]
            ids[-1] = 0
            used += len(ids)
            everything.append((key[digest], digest, ids))
            taken.add(digest)
        assert used == quota
    everything.sort()
    return [i for *_, ids in everything for i in ids], [(d, len(ids)) for _, d, ids in everything]


def test_stream_and_ledger_are_the_definition(collections, built):
    ids, ledger = obvious(collections)
    table = pa.ipc.open_file(str(built / "validation.arrow")).read_all()
    rows = table["tokens"].combine_chunks().flatten().to_numpy().reshape(SEQUENCES, LENGTH)
    np.testing.assert_array_equal(rows, np.array(ids).reshape(SEQUENCES, LENGTH))
    have = pq.read_table(built / "validation.documents.parquet").to_pylist()
    assert [(r["sha256"], r["tokens"]) for r in have] == ledger
    assert len({r["sha256"] for r in have}) == len(have)


def test_mix_holds_to_the_token(built):
    have = pq.read_table(built / "validation.documents.parquet").to_pylist()
    web = sum(r["tokens"] for r in have if r["source"].startswith("web/"))
    assert [web, TOTAL - web] == quotas([82, 18], TOTAL)
    assert abs(web / TOTAL - 0.82) < 1 / TOTAL
    assert sum(r["tokens"] for r in have) == TOTAL


def test_quotas_add_up():
    assert quotas([82, 18], 768 * 8193) == [5159624, 1132600]
    assert quotas([1, 1, 1], 10) == [4, 3, 3]


def test_files_and_their_order_do_not_matter(collections, built, tmp_path):
    texts = [
        d.text
        for name, path in find_files([collections.web]).items()
        for d in read_documents(name, path, field="text")
    ]
    write_lines(tmp_path / "web" / "all.jsonl", [*reversed(texts)])
    mix = ((82.0, tmp_path / "web"), (18.0, collections.code))
    build_validation(job(collections, tmp_path / "out", mix=mix), note=quiet)
    assert contents(tmp_path / "out")["validation.arrow"] == contents(built)["validation.arrow"]


def test_seed_chooses_another_stream(collections, built, tmp_path):
    build_validation(job(collections, tmp_path / "out", seed=1), note=quiet)
    assert contents(tmp_path / "out")["validation.arrow"] != contents(built)["validation.arrow"]


@pytest.mark.parametrize("at", [5, 130, 200, 300, 330])
def test_interrupted_build_goes_on_to_the_same_bytes(collections, built, tmp_path, monkeypatch, at):
    read, seen = module.read_documents, [0]

    def failing(*arguments, **options):
        for document in read(*arguments, **options):
            seen[0] += 1
            if seen[0] == at:
                raise KeyboardInterrupt
            yield document

    out, lines = tmp_path / "out", []
    monkeypatch.setattr(module, "read_documents", failing)
    with pytest.raises(KeyboardInterrupt):
        build_validation(job(collections, out), note=quiet, save_seconds=0)
    build_validation(job(collections, out), note=lines.append, save_seconds=0)
    assert contents(out) == contents(built)
    assert any("goes on after" in line for line in lines) == (at > 100)


def test_memory_holds_the_chosen_tokens_and_one_document(collections, tmp_path, monkeypatch):
    most, add = [0], module._Collection.add

    def watched(self, document, ids):
        add(self, document, ids)
        most[0] = max(most[0], self.tokens - self.quota)

    monkeypatch.setattr(module._Collection, "add", watched)
    build_validation(job(collections, tmp_path / "out", sequences=2), note=quiet)
    assert 0 <= most[0] < 400  # the longest document


def test_refuses_documents_that_were_trained_on(collections, built, tmp_path, capsys):
    shards = tmp_path / "shards"
    write_parquet(tmp_path / "train" / "t.parquet", [text(n) for n in (5000, 5001)])
    build_shards(ShardJob((tmp_path / "train",), collections.tokenizer, shards), note=quiet)
    build_validation(job(collections, tmp_path / "fine", training=(shards,)), note=quiet)
    chosen = pq.read_table(built / "validation.documents.parquet").to_pylist()[3]
    number = next(n for n in range(2000) if hashlib.sha256(text(n).encode()).digest() == chosen["sha256"])
    write_parquet(tmp_path / "train" / "u.parquet", [text(number)])
    known = tmp_path / "known"
    build_shards(ShardJob((tmp_path / "train",), collections.tokenizer, known), note=quiet)
    arguments = [
        "build-validation",
        "--tokenizer",
        str(collections.tokenizer),
        "--out",
        str(tmp_path / "out"),
    ]
    arguments += ["--mix", "82", str(collections.web), "--mix", "18", str(collections.code)]
    arguments += ["--sequences", str(SEQUENCES), "--length", str(LENGTH), "--training", str(known)]
    assert main([*arguments, "--inputs", str(tmp_path / "none.yaml")]) == 2
    error = capsys.readouterr().err
    assert f"1 of {json.loads((built / 'validation.json').read_text())['documents']} documents occur" in error
    assert chosen["sha256"].hex() in error and "shard-00000.documents.parquet" in error
    assert not (tmp_path / "out" / "validation.arrow").exists()
    # shards built without them are accepted
    clean = tmp_path / "clean"
    job_ = ShardJob((tmp_path / "train",), collections.tokenizer, clean, exclude=(built,))
    build_shards(job_, note=quiet)
    assert json.loads((clean / "shards.json").read_text())["excluded"] == 1
    build_validation(job(collections, tmp_path / "out", training=(clean,)), note=quiet)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"sequences": 400},
            r"web: [\d,]+ tokens of distinct documents, needed 84,296 \(82 parts of 400 x 257",
        ),
        ({"sequences": 1}, "1 sequences of 257 tokens: needed at least 2 of 2"),
        ({"mix": ((0.0, Path("x")),)}, "--mix: needed one or more collections, each with a weight above 0"),
        ({"training": (Path("."),)}, r"--training \.: no ledger of documents here"),
        ({"tokenizer": Path("nowhere")}, "nowhere: no such tokenizer"),
    ],
    ids=["too few documents", "too small", "no weight", "no ledger", "no tokenizer"],
)
def test_wrong_settings(collections, tmp_path, more, said):
    with pytest.raises(ValueError, match=said):
        build_validation(job(collections, tmp_path / "out", **more), note=quiet)
    assert not (tmp_path / "out" / "validation.json").exists()


def test_other_settings_never_replace_a_stream(collections, built):
    before = contents(built)
    with pytest.raises(ValueError, match=r"validation\.json: another stream is there"):
        build_validation(job(collections, built, seed=3), note=quiet)
    assert contents(built) == before
