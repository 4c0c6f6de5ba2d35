"""Bytes of bound files: hashed in parallel, verified at every use, never taken on trust.

A name in a binding is a plain relative POSIX path. What it resolves to, symlinks included, must lie inside
the bound directory. ``verify_binding`` always reads the bytes. The cache (path, size, mtime, inode to
SHA-256) only spares ``fp4core bind`` a second reading of the same corpus: a stale entry could write a wrong
hash into inputs.yaml, which the first use then refuses, but it can never let wrong bytes pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from fp4core._recipe_load import ConfigError

_PIECE = 1 << 22
_WORKERS = 16
# a file written less than this long before it was hashed may change again under the same time stamp
_SETTLED_NS = 3_000_000_000


def check_name(name: str) -> str | None:
    """What is wrong with a bound file's name; None when it is a plain path inside its directory."""
    if "://" in name:
        return "is a URL, needed a file inside the directory"
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        return "leaves the directory, needed one inside it"
    if not name or name != str(PurePosixPath(name)) or "\\" in name or name == ".":
        return f"is no plain path, needed one like {PurePosixPath(name)}"
    return None


def inside(base: Path, name: str) -> Path:
    """The file ``name`` of directory ``base``. ConfigError when it is absent or lies elsewhere."""
    wrong = check_name(name)
    if wrong:
        raise ConfigError(f"{base}: {name!r} {wrong}")
    path = base / name
    real = path.resolve()
    if not real.is_relative_to(base.resolve()):
        raise ConfigError(
            f"{path}: a symlink that leaves {base} (to {real}); put the file itself there, or bind the "
            "directory that holds it"
        )
    if not path.is_file():
        raise ConfigError(
            f"bound file {path} is {'no file' if path.exists() else 'gone'}; restore it or bind again"
        )
    return path


def sha256_of(path: Path, tick: object = None) -> tuple[str, os.stat_result]:
    """SHA-256 of a file and its state. ConfigError when it changes meanwhile. ``tick(n)`` per n bytes."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            before = os.fstat(file.fileno())
            while piece := file.read(_PIECE):
                digest.update(piece)
                if callable(tick):
                    tick(len(piece))
            after = os.fstat(file.fileno())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); restore it or bind again") from None
    if _identity(before) != _identity(after):
        raise ConfigError(f"{path}: changed while it was read; wait until its writer is done")
    return digest.hexdigest(), after


def _identity(state: os.stat_result) -> tuple[int, int, int]:
    return state.st_size, state.st_mtime_ns, state.st_ino


@dataclass
class HashCache:
    """Hashes of files that ``bind`` has read before. A broken cache file counts as an empty one."""

    path: Path
    entries: dict[str, list] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> HashCache:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            entries = {
                name: [*map(int, item[:3]), str(item[3])]
                for name, item in data["files"].items()
                if data["version"] == 1 and len(item) == 4 and len(item[3]) == 64
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            entries = {}
        return cls(path, entries)

    def get(self, path: Path) -> str | None:
        """The hash of ``path`` if it looks untouched since."""
        entry = self.entries.get(str(path.resolve()))
        return entry[3] if entry and tuple(entry[:3]) == _identity(path.stat()) else None

    def put(self, path: Path, state: os.stat_result, digest: str) -> None:
        """Remember a hash, unless the file is so new that it might change without a new time stamp."""
        if time.time_ns() - state.st_mtime_ns > _SETTLED_NS:
            self.entries[str(path.resolve())] = [*_identity(state), digest]

    def save(self) -> None:
        write_text(self.path, json.dumps({"version": 1, "files": self.entries}, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """A reader of ``path`` sees the old text or all of the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def hash_files(
    base: Path, names: Iterable[str], *, cache: HashCache | None = None, title: str = "hashing"
) -> dict[str, str]:
    """SHA-256 of each file ``names`` of ``base``, sorted by name; threads read them side by side.

    A bar on a terminal shows bytes; elsewhere a line is printed every ten seconds. ConfigError names the
    first file that cannot be read.
    """
    paths = {name: inside(base, name) for name in sorted(names)}
    found = {name: digest for name, path in paths.items() if cache and (digest := cache.get(path))}
    rest = {name: path for name, path in paths.items() if name not in found}
    total = sum(path.stat().st_size for path in rest.values())
    with _bytes_shown(title, total) as tick, ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1)) as pool:
        jobs = {pool.submit(sha256_of, path, tick): name for name, path in rest.items()}
        try:
            for job in as_completed(jobs):
                name = jobs[job]
                digest, state = job.result()
                found[name] = digest
                if cache:
                    cache.put(paths[name], state, digest)
        except BaseException:
            for job in jobs:
                job.cancel()
            raise
    return {name: found[name] for name in sorted(found)}


@contextmanager
def _bytes_shown(title: str, total: int) -> Iterator[object]:
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, desc=title, unit="B", unit_scale=True, dynamic_ncols=True) as bar:
            yield bar.update
        return
    done, shown = [0], [time.monotonic()]

    def tick(count: int) -> None:
        done[0] += count
        if time.monotonic() - shown[0] > 10:
            shown[0] = time.monotonic()
            print(f"{title}: {done[0] / 1e9:.1f} of {total / 1e9:.1f} GB", flush=True)

    yield tick


@dataclass(frozen=True)
class BoundFiles:
    """A binding whose bytes were just verified: absolute directory, name -> SHA-256."""

    kind: str
    directory: Path
    sha256: dict[str, str]

    def path(self, name: str) -> Path:
        """A verified file. ConfigError when the binding does not list it."""
        if name not in self.sha256:
            raise ConfigError(
                f"{self.kind}: the binding lists no {name} (it has {', '.join(self.sha256)}); "
                f"bind it again: fp4core bind {self.kind} PATH"
            )
        return self.directory / name


def bound_directory(directory: str, inputs: Path) -> Path:
    """A binding's directory; a relative one is counted from the folder of inputs.yaml."""
    return (Path(inputs).parent / directory).absolute()


def verify_files(
    kind: str, directory: Path, sha256: dict[str, str], *, part: tuple[int, int] = (0, 1)
) -> None:
    """Read every listed file and compare. ``part`` (r, n): only every n-th file, from the r-th on, by size.

    ConfigError names file, expected and found.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"{kind}: directory {directory} is gone; restore it or run: fp4core bind {kind} PATH"
        )
    sizes = {name: inside(directory, name).stat().st_size for name in sha256}
    mine = sorted(sizes, key=lambda name: (-sizes[name], name))[part[0] :: part[1]]
    found = hash_files(directory, mine, title=f"verifying {kind}")
    wrong = [name for name in sorted(mine) if found[name] != sha256[name]]
    if wrong:
        name = wrong[0]
        more = f" ({len(wrong) - 1} more files differ)" if len(wrong) > 1 else ""
        raise ConfigError(
            f"{kind}: {directory / name}: sha256 expected {sha256[name]}, found {found[name]}{more}; "
            f"restore the bound file, or bind the new one: fp4core bind {kind} PATH"
        )
