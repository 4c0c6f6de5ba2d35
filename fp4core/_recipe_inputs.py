"""``inputs.yaml``: local files the project may not ship, bound by SHA-256.

A file of bindings is read and checked, what a study still lacks is listed, and a binding's bytes are verified
where a stage uses them. ``fp4core bind`` writes the file.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from fp4core._recipe_files import BoundFiles, bound_directory, check_name, inside, verify_files
from fp4core._recipe_load import ConfigError, build, entry, fail, read_yaml
from fp4core._recipe_study import Study

_SHA256 = "[0-9a-f]{64}"
_HASHES = {"doc": "file, relative to directory -> SHA-256", "pattern": _SHA256}

KINDS = ("tokenizer", "corpus", "validation", "evaluation", "checkpoint", "published")

# kind -> what it is, in the words of the message that asks for it
WANTED = {
    "tokenizer": "the tokenizer's directory (tokenizer.json)",
    "corpus": "the training corpus: shards of tokens",
    "validation": "the fixed validation stream",
    "evaluation": "the evaluation data: MMLU, HellaSwag, WinoGrande, ARC-Challenge",
}

# kind -> where it comes from, for whoever has none yet
SOURCES = {
    "tokenizer": "a tokenizer.json of the model's family, from whoever licenses it to you",
    "corpus": "made from your documents by: python -m fp4core build-shards",
    "validation": "made from your documents by: python -m fp4core build-validation",
    "evaluation": "TASK/SPLIT.parquet of the public data sets, with a subject column for mmlu",
}


@dataclasses.dataclass(frozen=True)
class Binding:
    """A directory and the hash of every file in it that is used."""

    directory: str = entry(doc="local path")
    sha256: dict[str, str] = dataclasses.field(metadata=_HASHES)


@dataclasses.dataclass(frozen=True)
class CheckpointBinding:
    """A checkpoint trained elsewhere, to be evaluated here."""

    directory: str = entry(doc="local path")
    manifest: str = entry(doc="the run's manifest.json, relative to directory")
    route: str = entry(doc="the route it was trained with")
    step: int = entry(min=0)
    sha256: dict[str, str] = dataclasses.field(default_factory=dict, metadata=_HASHES)


@dataclasses.dataclass(frozen=True)
class PublishedBinding:
    """The authors' public data: any subset of it, known by its SHA-256 sums."""

    directory: str = entry(doc="local path")
    sha256: dict[str, str] = dataclasses.field(default_factory=dict, metadata=_HASHES)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Bindings of local files; ``fp4core bind KIND PATH`` fills them in."""

    version: Literal[1] = entry(doc="of this file's schema")
    tokenizer: Binding | None = entry(None, doc=WANTED["tokenizer"])
    corpus: Binding | None = entry(None, doc=WANTED["corpus"])
    validation: Binding | None = entry(None, doc=WANTED["validation"])
    evaluation: Binding | None = entry(None, doc=WANTED["evaluation"])
    checkpoint: CheckpointBinding | None = entry(None, doc="a checkpoint trained elsewhere")
    published: PublishedBinding | None = entry(None, doc="the authors' public data")


def load_inputs(path: str | Path) -> Inputs:
    """The bindings in ``path``. Raises ConfigError with one line per mistake."""
    return inputs_from_dict(read_yaml(Path(path)), str(path))


def inputs_from_dict(data: Any, where: str = "inputs") -> Inputs:
    """Checked bindings from parsed YAML: no URL, no file name that leaves its directory."""
    inputs = build(Inputs, data, where)
    for kind in KINDS:
        binding = getattr(inputs, kind)
        if binding is None:
            continue
        if "://" in binding.directory:
            fail(where, f"{kind}.directory", f"got {binding.directory!r}, needed a local path, not a URL")
        if kind in WANTED and not binding.sha256:
            fail(where, f"{kind}.sha256", f"got no file, needed at least one; run: fp4core bind {kind} PATH")
        names = {f"sha256.{name}": name for name in binding.sha256}
        if isinstance(binding, CheckpointBinding):
            names["manifest"] = binding.manifest
        for key, name in names.items():
            if wrong := check_name(name):
                fail(where, f"{kind}.{key}", f"got a path that {wrong}")
    return inputs


def verify_binding(
    kind: str, path: str | Path = "inputs.yaml", *, part: tuple[int, int] = (0, 1)
) -> BoundFiles:
    """The files that ``path`` binds as ``kind``, every byte compared with its SHA-256.

    ``part`` = (r, n) reads only the r-th of n shares, for n processes that verify together. ConfigError
    names the file, what was expected and what was found, or says that nothing is bound.
    """
    path = Path(path)
    binding = getattr(load_inputs(path), kind) if path.is_file() else None
    if binding is None:
        fail(str(path), kind, f"nothing is bound; run: fp4core bind {kind} PATH")
    directory = bound_directory(binding.directory, path)
    verify_files(kind, directory, binding.sha256, part=part)
    return BoundFiles(kind, directory, dict(sorted(binding.sha256.items())))


def missing_inputs(study: Study, path: str | Path = "inputs.yaml") -> list[str]:
    """One line per binding that ``study`` needs and ``path`` does not have; empty when it can start.

    A file that exists but is wrong raises ConfigError. Whether bytes match their hashes is checked at use.
    """
    if study.data.source == "embedded":
        return []
    path = Path(path)
    inputs = load_inputs(path) if path.is_file() else Inputs(version=1)
    lines = []
    for kind, what in WANTED.items():
        binding = getattr(inputs, kind)
        if binding is None:
            lines.append(f"{kind}: {what}; {SOURCES[kind]}; bind it: fp4core bind {kind} PATH")
            continue
        directory, gone = bound_directory(binding.directory, path), []
        for name in binding.sha256:
            try:
                inside(directory, name)
            except ConfigError as error:
                gone.append(str(error))
        if gone:
            more = f" (and {len(gone) - 1} more files)" if len(gone) > 1 else ""
            lines.append(f"{kind}: {gone[0]}{more}")
    return lines
