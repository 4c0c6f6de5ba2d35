"""Where the numbers come from: the records of a results directory and the SHA-256 of every input of the
report."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from figures import schema

RECORDS = (
    "runs/*/s*/manifest.json",
    "runs/*/s*/summary.json",
    "data/data.json",
    "probes/*/*.json",
    "validation/*/*/*.json",
    "export/*/*/gate.json",
    "downstream/*/*.json",
    "dgrad/*.json",
    "output_head/*.json",
    "boundary/*.json",
)
MOST_SHOWN = 64 * 1024


@dataclass(frozen=True)
class Record:
    """One file: path below its directory, bytes, SHA-256, and for run manifests the parsed content."""

    path: str
    size: int
    sha256: str
    content: dict | None = None

    @property
    def pretty(self) -> str:
        return json.dumps(self.content, indent=2, sort_keys=True, ensure_ascii=False) if self.content else ""


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def records(results: Path) -> list[Record]:
    """Every record below ``results``, by path; manifests with their content. Archived runs are left out."""
    found = []
    for pattern in RECORDS:
        for path in sorted(results.glob(pattern)):
            content = None
            if path.name == "manifest.json" and path.stat().st_size <= MOST_SHOWN:
                try:
                    content = json.loads(path.read_text(encoding="utf-8"))
                except ValueError as error:
                    raise schema.TidyError(f"{path} is not valid JSON: {error}") from None
            name = path.relative_to(results).as_posix()
            found.append(
                Record(
                    name, path.stat().st_size, digest(path), content if isinstance(content, dict) else None
                )
            )
    return found


def tidy_files(directory: Path) -> list[Record]:
    """The tidy tables that exist, with their hashes."""
    paths = [directory / schema.file_of(name) for name in schema.names()]
    return [Record(path.name, path.stat().st_size, digest(path)) for path in paths if path.is_file()]


def run_facts(manifest: Record) -> dict[str, str]:
    """The facts of a run manifest that a reader looks for first."""
    content = manifest.content or {}
    device = content.get("device") or {}
    facts = {
        "route": content.get("route", ""),
        "seed": content.get("seed", ""),
        "recipe": content.get("recipe_hash", ""),
        "commit": str(content.get("commit") or "")[:12] + (" (modified)" if content.get("dirty") else ""),
        "device": device.get("name", "") if isinstance(device, dict) else device,
        "backend": content.get("backend", ""),
        "date": content.get("date_utc", ""),
    }
    return {key: str(value) for key, value in facts.items()}
