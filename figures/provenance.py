"""Where the numbers come from: the records of a results directory and the SHA-256 of every input of the
report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
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
    "traces/*.json",
)
# tidy table -> the records that it is collected from; tables of recipes and formats have none
MADE_OF = {
    "losses": "runs/*/s*/summary.json",
    "endpoint": "runs/*/s*/summary.json",
    "throughput": "probes/*/*.json",
    "validation": "validation/*/*/step-*.json",
    "downstream": "downstream/*/*.json",
    "dgrad": "dgrad/*.json",
    "boundary": "boundary/*.json",
    "scale_rounding": "traces/*.json",
    "execution_routes": "traces/*.json",
    "scaling_domains": "traces/*.json",
    "weight_2d": "traces/*.json",
}
MOST_SHOWN = 64 * 1024


@dataclass(frozen=True)
class Record:
    """One file: path below its directory, bytes, SHA-256, the command that wrote it where it says so, and
    for run manifests the parsed content."""

    path: str
    size: int
    sha256: str
    content: dict | None = None
    command: str = ""

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
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise schema.TidyError(f"{path} is not valid JSON: {error}") from None
            content = content if isinstance(content, dict) else {}
            name, size = path.relative_to(results).as_posix(), path.stat().st_size
            shown = content if path.name == "manifest.json" and size <= MOST_SHOWN else None
            found.append(Record(name, size, digest(path), shown, str(content.get("command") or "")))
    return found


def commands(found: list[Record], tables: Iterable[str]) -> list[tuple[str, int]]:
    """(command, records it stands for) of every stage behind ``tables``: the first record's command of each
    kind, since the others differ in route and seed alone."""
    told = []
    for pattern in dict.fromkeys(MADE_OF[name] for name in tables if name in MADE_OF):
        mine = [record for record in found if fnmatch(record.path, pattern) and record.command]
        if mine:
            told.append((mine[0].command, len(mine)))
    return told


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
