"""The data stage of a study with `data.source: bound`: verify what inputs.yaml binds and describe it.

Training shards stay where they are (a corpus may be larger than a results disk); tokenizer.json and
validation.arrow are copied into the data directory, so that evaluation and a copied results directory have
them. data.json holds the bindings with every hash, and from there they go into each run's manifest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fp4core.recipe import BoundFiles, Study, load_inputs, missing_inputs, verify_binding
from fp4core.records import sha256_file

from .ledger import refuse_overlap
from .shards import count_shard, open_shard, tree_hash
from .tokens import stream_sha256, unigram_entropy

KINDS = ("tokenizer", "corpus", "validation")
# the end of a document in the tokenizers that pretraining corpora are made with, best known first
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


def bindings_of(inputs: Path) -> dict[str, Any]:
    """kind -> {directory, sha256} as inputs.yaml has them now; directories absolute. Reads no bound file."""
    bound = load_inputs(inputs) if inputs.is_file() else None
    found = {}
    for kind in KINDS:
        binding = getattr(bound, kind, None)
        if binding is not None:
            directory = (inputs.parent / binding.directory).absolute()
            found[kind] = {"directory": str(directory), "sha256": dict(sorted(binding.sha256.items()))}
    return found


def end_of_text(tokenizer: Any, name: str | None = None) -> tuple[str, int]:
    """(token, id) that ends a document; `name` where the tokenizer's own is not a usual one."""
    for candidate in [name] if name else END_NAMES:
        number = tokenizer.token_to_id(candidate)
        if number is not None:
            return candidate, number
    if name:
        raise ValueError(f"--end-of-text {name!r}: the tokenizer has no such token")
    raise ValueError(
        f"the tokenizer has none of {', '.join(END_NAMES)}; name its end of a document with --end-of-text"
    )


def build_bound(study: Study, work: Path, inputs: Path, *, note: Callable[[str], None]) -> dict[str, Any]:
    """Fill `work` and return what data.json says of it beyond its head. ValueError names what is wrong."""
    missing = missing_inputs(study, inputs)
    if missing:
        raise ValueError(f"study {study.study} needs inputs that are not bound: " + "; ".join(missing))
    bindings = bindings_of(inputs)
    tokenizer, corpus, validation = (verify_binding(kind, inputs) for kind in KINDS)
    note(f"data: {sum(len(b.sha256) for b in (tokenizer, corpus, validation))} bound files verified")
    digest = tokenizer.sha256[tokenizer.path("tokenizer.json").name]
    shards = [name for name in corpus.sha256 if name.endswith(".arrow")]
    counts = {"tokens": 0, "documents": 0}
    for name in shards:
        found = _fits(study, corpus.path(name), "train", digest)
        counts = {key: counts[key] + found[key] for key in counts}
    if not shards:
        raise ValueError(f"corpus: {corpus.directory} binds no *.arrow shard; bind it again")
    refuse_overlap(validation.directory, [corpus.directory])
    rows = _validation(study, validation, digest)
    shutil.copyfile(tokenizer.path("tokenizer.json"), work / "tokenizer.json")
    shutil.copyfile(validation.path("validation.arrow"), work / "validation.arrow")
    expected = {"tokenizer.json": digest, "validation.arrow": validation.sha256["validation.arrow"]}
    files = {}
    for name, sha256 in expected.items():
        if sha256_file(work / name) != sha256:
            raise ValueError(f"{name}: changed between check and copy; wait until its writer is done")
        files[name] = {"bytes": (work / name).stat().st_size, "sha256": sha256}
    token, number = _end(tokenizer, corpus)
    note(f"data: {counts['tokens']:,} training tokens in {len(shards)} shards, {rows.shape[0]} sequences")
    everything = [*expected.items(), *((f"corpus/{name}", corpus.sha256[name]) for name in shards)]
    return {
        "source": "bound",
        "source_sha256": tree_hash((name, corpus.sha256[name]) for name in shards),
        "tokenizer": {"sha256": digest, "vocab": study.model.vocab, "end_of_text": number, "end_name": token},
        "training": {"directory": str(corpus.directory), "shards": shards, **counts},
        "validation": {
            "sequences": rows.shape[0],
            "length": rows.shape[1],
            "tokens": rows.shape[0] * (rows.shape[1] - 1),
            "stream_sha256": stream_sha256(rows),
            "unigram_entropy": unigram_entropy(rows[:, 1:], study.model.vocab),
        },
        "data_sha256": tree_hash(everything),
        "files": files,
        "bindings": bindings,
    }


def _fits(study: Study, path: Path, kind: str, tokenizer_sha256: str) -> dict[str, int]:
    """Counts of a shard once its kind, tokenizer and vocabulary are those of the study."""
    reader = open_shard(path, kind=kind, tokenizer_sha256=tokenizer_sha256)
    vocab = int(reader.schema.metadata[b"vocab"])
    if vocab > study.model.vocab:
        raise ValueError(
            f"{path}: tokens of a vocabulary of {vocab}, study {study.study} has model.vocab "
            f"{study.model.vocab}; bind shards of its tokenizer"
        )
    return count_shard(reader)


def _validation(study: Study, bound: BoundFiles, tokenizer_sha256: str) -> np.ndarray:
    path = bound.path("validation.arrow")
    _fits(study, path, "validation", tokenizer_sha256)
    reader = open_shard(path, kind="validation", tokenizer_sha256=tokenizer_sha256)
    column = reader.read_all().column("tokens").combine_chunks()
    rows = column.flatten().to_numpy().astype(np.int64).reshape(len(column), -1)
    wanted = (study.validation.sequences, study.train.sequence + 1)
    if rows.shape != wanted:
        raise ValueError(
            f"{path}: {rows.shape[0]} sequences of {rows.shape[1]} tokens, study {study.study} needs "
            f"{wanted[0]} of {wanted[1]}; make it with: python -m fp4core build-validation "
            f"--sequences {wanted[0]} --length {wanted[1]}"
        )
    return rows


def _end(tokenizer: BoundFiles, corpus: BoundFiles) -> tuple[str, int]:
    """The end of a document: what build-shards recorded, else a usual name."""
    from tokenizers import Tokenizer

    loaded, name = Tokenizer.from_file(str(tokenizer.path("tokenizer.json"))), None
    if "shards.json" in corpus.sha256:
        name = json.loads(corpus.path("shards.json").read_text(encoding="utf-8")).get("end_of_text")
    return end_of_text(loaded, name)
