"""Small files that a run leaves behind: written whole or not at all, and each naming where it came from.

Nothing here imports torch, so the command line can see that a run is finished without paying for it.
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PACKAGES = ("fp4core", "torch", "triton", "numpy", "pyarrow", "tokenizers", "safetensors")


class StopEarly(Exception):
    """The run stopped before its target and can go on; the command line exits with 75."""


class RunError(Exception):
    """A run cannot go on (non-finite loss, full disk, ...); the command line exits with 1."""


class EchoedError(ValueError):
    """Another rank's error, which that rank reports."""


def sha256_bytes(data: bytes) -> str:
    """SHA-256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes as 64 hex digits, read in one-MiB pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    """Write a record atomically, keys in the order given, one per line."""
    write_atomic(path, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a record; ValueError names the file when it is no JSON object."""
    try:
        record = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: not valid JSON ({error}); delete it or restore it from its source"
        ) from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}: holds a {type(record).__name__}, needed a JSON object")
    return record


def write_marker(path: Path, record: Path, *, recipe_hash: str | None, stage_hash: str) -> None:
    """Write the completion marker of `record`: what the workflow declares instead of the record itself."""
    marker = {"record": str(record), "sha256": sha256_file(record)}
    write_json(path, {**marker, "recipe_hash": recipe_hash, "stage_hash": stage_hash})


def package_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that can change a number."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def code_identity() -> dict[str, Any]:
    """Commit of the checkout that this code runs from and whether it was edited; None where unknown."""
    root = Path(__file__).resolve().parents[2]

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
    inputs: dict[str, str],
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


def tree_hash(items: Iterable[tuple[str, str]]) -> str:
    """One SHA-256 over (name, sha256) pairs, independent of their order."""
    lines = sorted(f"{digest}  {name}\n" for name, digest in items)
    return sha256_bytes("".join(lines).encode())
