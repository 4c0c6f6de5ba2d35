"""The data stage: text -> tokenizer.json, train.arrow, validation.arrow and data.json with every hash.

The directory is built beside its place and put there by a rename. Making it again with the same settings
and sources does nothing. `open_source` is where bound corpora join: whatever it returns is written by the
same code.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fp4core.recipe import Study, missing_inputs

from . import tokens
from .corpus import Corpus, embedded_corpus
from .records import envelope, read_json, sha256_bytes, sha256_file, tree_hash, write_json
from .shards import DATA_SCHEMA, check_data


def open_source(study: Study) -> Corpus:
    """The study's text. ValueError lists what is missing when the study needs bound inputs."""
    if study.data.source == "embedded":
        return embedded_corpus(study.data.validation_documents)
    missing = missing_inputs(study)
    if missing:
        raise ValueError(f"study {study.study} needs inputs that are not bound: " + "; ".join(missing))
    raise ValueError(
        f"study {study.study}: tokenising bound inputs is not part of this version; use smoke or h200"
    )


def prepare_data(study: Study, out: Path, *, note: Callable[[str], None] = print) -> Path:
    """Make the data directory of a study unless it is there already; returns the path of data.json."""
    out, stage = Path(out), study.stage_hash("data")
    path = out / "data.json"
    if path.is_file() and read_json(path).get("stage_hash") == stage:
        check_data(out)
        note(f"data: {out} is up to date ({stage})")
        return path
    corpus = open_source(study)
    work = out.with_name(f".{out.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        record = _build(study, corpus, work, note=note)
        write_json(work / "data.json", record)
        if out.exists():
            shutil.rmtree(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    note(f"data: wrote {out} ({stage})")
    return path


def _build(study: Study, corpus: Corpus, work: Path, *, note: Callable[[str], None]) -> dict[str, Any]:
    vocab, sequence = study.model.vocab, study.train.sequence
    note(f"data: training a byte-level BPE of {vocab} on {len(corpus.training)} documents of {corpus.name}")
    tokenizer = tokens.train_tokenizer((d.text for d in corpus.training), vocab)
    serialised = tokens.tokenizer_bytes(tokenizer)
    (work / "tokenizer.json").write_bytes(serialised)
    shared = {"tokenizer_sha256": sha256_bytes(serialised), "vocab": vocab, "source": corpus.name}
    note(f"data: encoding {len(corpus.training)} training and {len(corpus.validation)} validation documents")
    encoded = tokens.encode(tokenizer, corpus.training, vocab)
    counts = tokens.write_shard(work / "train.arrow", encoded, **shared)
    stream = np.concatenate(list(tokens.encode(tokenizer, corpus.validation, vocab)))
    rows = tokens.pack_validation(stream, sequences=study.validation.sequences, length=sequence + 1)
    tokens.write_validation(work / "validation.arrow", rows, **shared)
    names = ("tokenizer.json", "train.arrow", "validation.arrow")
    files = {n: {"bytes": (work / n).stat().st_size, "sha256": sha256_file(work / n)} for n in names}
    head = envelope(
        DATA_SCHEMA,
        study=study.study,
        route=None,
        seed=None,
        recipe_hash="",
        stage_hash=study.stage_hash("data"),
        device={"name": "", "kind": "cpu"},
        backend="",
        inputs={corpus.name: corpus.sha256},
    )
    note(
        f"data: {counts['tokens']:,} training tokens, {rows.shape[0]} validation sequences of {rows.shape[1]}"
    )
    return {
        **head,
        "source": corpus.name,
        "source_sha256": corpus.sha256,
        "tokenizer": {"sha256": shared["tokenizer_sha256"], "vocab": vocab, "end_of_text": 0},
        "training": {"shards": ["train.arrow"], **counts},
        "validation": {
            "sequences": rows.shape[0],
            "length": rows.shape[1],
            "tokens": rows.shape[0] * (rows.shape[1] - 1),
            "stream_sha256": tokens.stream_sha256(rows),
            "unigram_entropy": _unigram_entropy(rows[:, 1:], vocab),
        },
        "data_sha256": tree_hash((n, f["sha256"]) for n, f in files.items()),
        "files": files,
    }


def _unigram_entropy(targets: np.ndarray, vocab: int) -> float:
    """Entropy of the targets' own unigram distribution in nats: the best that knows no context."""
    p = np.bincount(targets.reshape(-1).astype(np.int64), minlength=vocab) / targets.size
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())
