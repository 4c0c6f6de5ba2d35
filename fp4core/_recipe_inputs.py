"""``inputs.yaml``: local files the project may not ship, bound by SHA-256. Schema and completeness only.

Hashing and verifying the bytes is ``fp4core bind`` and the stages' own work; here a file of bindings is
read and checked, and what a study still lacks is listed.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from fp4core._recipe_load import build, entry, fail, read_yaml
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


@dataclasses.dataclass(frozen=True)
class Binding:
    """A directory and the hash of every file in it that is used."""

    directory: str = entry(doc="local path")
    sha256: dict[str, str] = dataclasses.field(metadata=_HASHES)


@dataclasses.dataclass(frozen=True)
class CheckpointBinding:
    """A checkpoint trained elsewhere, to be evaluated here."""

    directory: str = entry(doc="local path")
    manifest: str = entry(doc="the run's manifest.json, relative to directory or absolute")
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
        for name in binding.sha256:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                fail(
                    where,
                    f"{kind}.sha256.{name}",
                    "got a path that leaves the directory, needed one inside it",
                )
    return inputs


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
            lines.append(f"{kind}: {what}; bind it: fp4core bind {kind} PATH")
            continue
        base = Path(binding.directory)
        if not base.is_absolute():
            base = path.parent / base
        gone = [name for name in binding.sha256 if not (base / name).is_file()]
        if gone:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            lines.append(f"{kind}: bound file {base / gone[0]}{more} is gone; restore it or bind again")
    return lines
