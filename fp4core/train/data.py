"""The data stage: text -> tokenizer.json, train.arrow, validation.arrow and data.json with every hash.

The directory is built beside its place and put there by a rename. Making it again with the same settings
and sources does nothing. A study whose source is `bound` joins in bound.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fp4core.recipe import Study
from fp4core.records import envelope, read_json, sha256_bytes, sha256_file, write_json

from . import tokens
from .bound import bindings_of, build_bound
from .corpus import Corpus, embedded_corpus
from .progress import Reading
from .shards import DATA_SCHEMA, check_data, tree_hash


def prepare_data(
    study: Study, out: Path, *, inputs: Path = Path("inputs.yaml"), note: Callable[[str], None] = print
) -> Path:
    """Make the data directory of a study unless it is there already; returns the path of data.json.

    `inputs` binds the files of a study whose source is `bound`; ValueError lists what is missing there.
    """
    out, stage = Path(out), study.stage_hash("data")
    path, bound = out / "data.json", study.data.source == "bound"
    old = read_json(path) if path.is_file() else {}
    if old.get("stage_hash") == stage and (not bound or old.get("bindings") == bindings_of(inputs)):
        check_data(out)
        note(f"data: {out} is up to date ({stage})")
        return path
    corpus = None if bound else embedded_corpus(study.data.validation_documents)
    work = out.with_name(f".{out.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        if corpus is None:
            record = build_bound(study, work, inputs, note=note)
            sources = {kind: tree_hash(b["sha256"].items()) for kind, b in record["bindings"].items()}
        else:
            record, sources = _build(study, corpus, work, note=note), {corpus.name: corpus.sha256}
        write_json(work / "data.json", {**_head(study, sources), **record})
        if out.exists():
            shutil.rmtree(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    note(f"data: wrote {out} ({stage})")
    return path


def _head(study: Study, sources: dict[str, str]) -> dict[str, Any]:
    return envelope(
        DATA_SCHEMA,
        study=study.study,
        route=None,
        seed=None,
        recipe_hash=None,
        stage_hash=study.stage_hash("data"),
        device={"name": "", "kind": "cpu"},
        backend="",
        inputs=sources,
    )


def _build(study: Study, corpus: Corpus, work: Path, *, note: Callable[[str], None]) -> dict[str, Any]:
    vocab, sequence = study.model.vocab, study.train.sequence
    note(f"data: training a byte-level BPE of {vocab} on {len(corpus.training)} documents of {corpus.name}")
    tokenizer = tokens.train_tokenizer((d.text for d in corpus.training), vocab)
    serialised = tokens.tokenizer_bytes(tokenizer)
    (work / "tokenizer.json").write_bytes(serialised)
    shared = {"tokenizer_sha256": sha256_bytes(serialised), "vocab": vocab, "source": corpus.name}
    note(f"data: encoding {len(corpus.training)} training and {len(corpus.validation)} validation documents")
    with Reading("data", total=sum(len(d.text) for d in corpus.training), note=note, unit="char") as bar:
        encoded = tokens.encode(tokenizer, corpus.training, vocab, tell=bar.at)
        counts = tokens.write_shard(work / "train.arrow", encoded, **shared)
    stream = np.concatenate(list(tokens.encode(tokenizer, corpus.validation, vocab)))
    rows = tokens.pack_validation(stream, sequences=study.validation.sequences, length=sequence + 1)
    tokens.write_validation(work / "validation.arrow", rows, **shared)
    names = ("tokenizer.json", "train.arrow", "validation.arrow")
    files = {n: {"bytes": (work / n).stat().st_size, "sha256": sha256_file(work / n)} for n in names}
    note(
        f"data: {counts['tokens']:,} training tokens, {rows.shape[0]} validation sequences of {rows.shape[1]}"
    )
    return {
        "source": corpus.name,
        "source_sha256": corpus.sha256,
        "tokenizer": {"sha256": shared["tokenizer_sha256"], "vocab": vocab, "end_of_text": 0},
        "training": {"shards": ["train.arrow"], **counts},
        "validation": {
            "sequences": rows.shape[0],
            "length": rows.shape[1],
            "tokens": rows.shape[0] * (rows.shape[1] - 1),
            "stream_sha256": tokens.stream_sha256(rows),
            "unigram_entropy": tokens.unigram_entropy(rows[:, 1:], vocab),
        },
        "data_sha256": tree_hash((n, f["sha256"]) for n, f in files.items()),
        "files": files,
    }
