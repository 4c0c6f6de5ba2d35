"""`fp4core bind`: which files of a directory a kind of input is, whether they are sound, and their hashes.

Every kind is looked into before it is bound (a tokenizer loads, shards are whole and of one tokenizer, tables
have the columns that are read), so that a mistake shows now and not in the first job. inputs.yaml is replaced
atomically under a lock; other kinds stay as they were.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from fp4core._recipe_files import HashCache, hash_files, inside, write_text
from fp4core._recipe_inputs import KINDS
from fp4core.recipe import Inputs, inputs_from_dict, load_inputs, nearest, to_dict
from fp4core.records import read_json

from .shards import open_shard

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
# benchmark -> (splits that must be there, columns that every split must have)
EVALUATION = {
    "mmlu": (("test", "dev"), ("question", "choices", "answer", "subject")),
    "hellaswag": (("validation",), ("activity_label", "ctx", "endings", "label")),
    "winogrande": (("validation",), ("sentence", "option1", "option2", "answer")),
    "arc_challenge": (("test",), ("id", "question", "choices", "answerKey")),
}
SPLITS = ("test", "dev", "validation", "train")
_HEADER = "# Local files bound by SHA-256, written by: fp4core bind KIND PATH (schemas/inputs.schema.json)\n"


def bind(
    kind: str,
    path: str | Path,
    *,
    inputs: Path = Path("inputs.yaml"),
    route: str | None = None,
    step: int | None = None,
    note: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Bind `path` as `kind` in the file `inputs`; returns the binding as plain data.

    `route` and `step` belong to a checkpoint. ValueError says what is wrong with the path or the files;
    the old bindings are then untouched.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: allowed: {', '.join(KINDS)}{nearest(kind, KINDS)}")
    if "://" in str(path):
        raise ValueError(f"{path}: a URL, needed a local path; fetch the files first")
    if kind != "checkpoint" and (route is not None or step is not None):
        raise ValueError(f"--route and --step belong to `bind checkpoint`, not to {kind}")
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or directory")
    if inputs.is_file():
        load_inputs(inputs)  # a broken file is refused before hours of hashing
    directory, names, extra = _FINDERS[kind](path, route, step)
    names = [name for name in names if inside(directory, name)]
    cache = HashCache.open(inputs.with_name(".inputs.cache.json"))
    hashes = hash_files(directory, names, cache=cache, title=f"binding {kind}")
    binding = {"directory": _portable(directory, inputs), **extra, "sha256": hashes}
    with _locked(inputs.parent):
        bound = to_dict(load_inputs(inputs)) if inputs.is_file() else to_dict(Inputs(version=1))
        bound = {key: value for key, value in {**bound, kind: binding}.items() if value is not None}
        inputs_from_dict(bound, str(inputs))
        write_text(inputs, _HEADER + yaml.safe_dump(bound, sort_keys=False, width=120))
        cache.save()
    size = sum((directory / name).stat().st_size for name in hashes)
    note(f"bound {kind}: {len(hashes)} files, {size / 1e6:,.1f} MB of {directory} in {inputs}")
    return binding


def _portable(directory: Path, inputs: Path) -> str:
    """Relative to inputs.yaml where it lies below, so that both can move together."""
    base = inputs.parent.absolute()
    directory = directory.absolute()
    return directory.relative_to(base).as_posix() if directory.is_relative_to(base) else str(directory)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two `bind` commands at once would lose one of the bindings."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


Found = tuple[Path, list[str], dict[str, Any]]


def _folder(path: Path, needs: str) -> Path:
    if not path.is_dir():
        raise ValueError(f"{path}: a file, needed the directory that holds {needs}")
    return path


def _tokenizer(path: Path, route: str | None, step: int | None) -> Found:
    from tokenizers import Tokenizer

    directory = path if path.is_dir() else path.parent
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{directory}: no tokenizer.json; a tokenizer of another kind is converted with "
            "transformers: AutoTokenizer.from_pretrained(...).save_pretrained(DIR)"
        )
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{file}: no tokenizer that can be loaded ({error})") from None
    return directory, [name for name in TOKENIZER_FILES if (directory / name).is_file()], {}


def _shards(directory: Path, kind: str, files: list[Path], build: str) -> None:
    """All are whole shards of `kind` and of one tokenizer."""
    if not files:
        raise ValueError(f"{directory}: no {kind} shards here; make them with: python -m fp4core {build}")
    first: bytes | None = None
    for file in files:
        reader = open_shard(file, kind=kind, tokenizer_sha256=None)
        mine = reader.schema.metadata.get(b"tokenizer_sha256", b"")
        first = mine if first is None else first
        if mine != first:
            raise ValueError(
                f"{file}: made by tokenizer {mine.decode()}, {files[0].name} by {first.decode()}; "
                "bind shards of one tokenizer"
            )


def _corpus(path: Path, route: str | None, step: int | None) -> Found:
    directory = _folder(path, "the training shards")
    shards = sorted(directory.glob("*.arrow"))
    _shards(directory, "train", shards, "build-shards")
    others = sorted([*directory.glob("*.documents.parquet"), *directory.glob("shards.json")])
    return directory, [file.name for file in (*shards, *others)], {}


def _validation(path: Path, route: str | None, step: int | None) -> Found:
    directory = _folder(path, "validation.arrow")
    file = directory / "validation.arrow"
    _shards(directory, "validation", [file] if file.is_file() else [], "build-validation")
    others = [directory / name for name in ("validation.documents.parquet", "validation.json")]
    return directory, [f.name for f in (file, *others) if f.is_file()], {}


def _evaluation(path: Path, route: str | None, step: int | None) -> Found:
    directory = _folder(path, "TASK/SPLIT.parquet")
    names, lacking = [], []
    for task, (needed, columns) in EVALUATION.items():
        for split in SPLITS:
            name = f"{task}/{split}.parquet"
            if not (directory / name).is_file():
                lacking += [name] if split in needed else []
                continue
            try:
                have = pq.read_schema(directory / name).names
            except (pa.ArrowInvalid, OSError) as error:
                raise ValueError(f"{directory / name}: not a Parquet file ({error})") from None
            absent = [column for column in columns if column not in have]
            if absent:
                raise ValueError(
                    f"{directory / name}: no column {absent[0]!r}; got {', '.join(have)}, "
                    f"needed {', '.join(columns)}"
                )
            names.append(name)
    if lacking:
        raise ValueError(
            f"{directory}: lacks {', '.join(lacking)}; needed the public data sets, one Parquet file per "
            "split (mmlu: all subjects in one file, with a subject column)"
        )
    return directory, names, {}


def _checkpoint(path: Path, route: str | None, step: int | None) -> Found:
    directory = _folder(path, "a run: manifest.json and checkpoints/step-*")
    if (directory / "checkpoint.json").is_file() and directory.parent.name == "checkpoints":
        if step is None and directory.name.removeprefix("step-").isdigit():
            step = int(directory.name.removeprefix("step-"))
        directory = directory.parent.parent
    manifest = directory / "manifest.json"
    if not manifest.is_file():
        raise ValueError(f"{directory}: no manifest.json; give a run's directory, runs/ROUTE/sSEED")
    trained = read_json(manifest).get("route")
    if route is not None and route != trained:
        raise ValueError(f"{manifest}: a run of route {trained!r}, --route says {route!r}")
    have = sorted(directory.glob("checkpoints/step-*/checkpoint.json"))
    steps = {int(file.parent.name.removeprefix("step-")): file for file in have}
    if step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{directory}: --step {step}, needed one of its checkpoints: {listed}")
    folder = f"checkpoints/{steps[step].parent.name}"
    files = [f"{folder}/{name}" for name in read_json(steps[step])["files"]]
    extra = {"manifest": "manifest.json", "route": str(trained), "step": step}
    return directory, ["manifest.json", f"{folder}/checkpoint.json", *files], extra


def _published(path: Path, route: str | None, step: int | None) -> Found:
    directory = _folder(path, "the author's CSV files")
    names = sorted(file.name for file in directory.glob("*.csv"))
    if not names:
        raise ValueError(f"{directory}: no CSV file here; needed any of the author's public data files")
    return directory, names, {}


_FINDERS: dict[str, Callable[[Path, str | None, int | None], Found]] = {
    "tokenizer": _tokenizer,
    "corpus": _corpus,
    "validation": _validation,
    "evaluation": _evaluation,
    "checkpoint": _checkpoint,
    "published": _published,
}
