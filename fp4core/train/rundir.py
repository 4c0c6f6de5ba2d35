"""The directory of one run: who it belongs to, whether it is finished, and where an older one goes.

    runs/<route>/s<seed>/manifest.json       written at the start; a resume adds itself to `starts`
                         metrics.parquet     rows of the logged steps
                         checkpoints/step-*  see checkpoint.py
                         run.log             progress lines
                         failure.json        training ended in non-finite numbers: a result, like a summary
                         summary.json        last, atomically: the run is complete

A run belongs to (recipe hash, stage hash, data hash). Another identity never continues or overwrites it: the
old directory moves to archive/<route>/s<seed>-<its recipe hash>/ first. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fp4core.recipe import Recipe, Study, to_dict
from fp4core.records import read_json, sha256_file, utc_now, write_json

MANIFEST_SCHEMA = "fp4core.run"
SUMMARY_SCHEMA = "fp4core.summary"
FAILURE_SCHEMA = "fp4core.failure"


@dataclass(frozen=True)
class Identity:
    """What must be equal for two processes to work on the same run."""

    recipe_hash: str
    stage_hash: str
    data_sha256: str

    def differences(self, record: dict[str, Any]) -> list[str]:
        """One phrase per field in which a stored record is of another run."""
        found = []
        for name, mine in vars(self).items():
            if record.get(name) != mine:
                found.append(f"{name.replace('_', ' ')} {record.get(name)}, needed {mine}")
        return found


@dataclass(frozen=True)
class RunDir:
    """The run of (study, recipe, seed) under `results`."""

    results: Path
    study: Study
    recipe: Recipe
    seed: int

    @property
    def path(self) -> Path:
        return self.results / "runs" / self.recipe.route / f"s{self.seed}"

    @property
    def data(self) -> Path:
        return self.results / "data"

    def file(self, name: str) -> Path:
        return self.path / name

    def identity(self) -> Identity:
        """Identity that the study, the recipe and the data directory ask for. ValueError without data."""
        data = self.data / "data.json"
        if not data.is_file():
            raise ValueError(f"{data}: no data here; run `python -m fp4core data --out {self.data}` first")
        record = read_json(data)
        if record.get("stage_hash") != self.study.stage_hash("data"):
            raise ValueError(
                f"{data}: made for data settings {record.get('stage_hash')}, study {self.study.study} needs "
                f"{self.study.stage_hash('data')}; run `python -m fp4core data` again"
            )
        return Identity(self.recipe.hash, self.study.stage_hash("train"), record["data_sha256"])

    def finished(self) -> bool:
        """True when this very run is complete."""
        summary = self.file("summary.json")
        return summary.is_file() and not self.identity().differences(read_json(summary))

    def reached(self, until: int | None) -> Path | None:
        """The record that proves `until` (None: the end) for this very run, None when there is work to do."""
        if self.finished() and until in (None, self.study.train.steps):
            return self.file("summary.json")
        if until is not None and until in self.study.all_cuts and until < self.study.train.steps:
            path = self.file(f"checkpoints/step-{until:08d}/checkpoint.json")
            if path.is_file() and not self.identity().differences(read_json(path)):
                return path
        return None

    def diverged(self, until: int | None) -> dict[str, Any] | None:
        """failure.json of this very run when it ended at or before `until` (None: the end), else None."""
        path = self.file("failure.json")
        if not path.is_file() or self.identity().differences(record := read_json(path)):
            return None
        return record if record["step"] <= (until or self.study.train.steps) else None

    def settle(self, identity: Identity, *, on_mismatch: Literal["archive", "refuse"]) -> str | None:
        """Make sure that what lies in the directory belongs to `identity`.

        An older run of another identity is archived (returns a line that says so) or refused (ValueError).
        """
        manifest = self.file("manifest.json")
        if not manifest.is_file():
            return None
        record = read_json(manifest)
        differences = identity.differences(record)
        if not differences:
            return None
        if on_mismatch == "refuse":
            raise ValueError(
                f"{self.path}: holds a run with another {'; another '.join(differences)}; "
                "archive it with --on-mismatch archive or choose another --results"
            )
        target = self._archive_place(str(record.get("recipe_hash")))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.path.rename(target)
        return f"archived the old run ({'; '.join(differences)}) as {target}"

    def _archive_place(self, old_hash: str) -> Path:
        base = self.results / "archive" / self.recipe.route
        target, number = base / f"s{self.seed}-{old_hash}" / "run", 1
        while target.exists():
            number += 1
            target = base / f"s{self.seed}-{old_hash}-{number}" / "run"
        return target

    def write_manifest(self, head: dict[str, Any], identity: Identity, extra: dict[str, Any]) -> None:
        """Write the manifest of a new run, or add this start to that of an old one."""
        path = self.file("manifest.json")
        start = {
            key: head[key]
            for key in ("date_utc", "device", "backend", "versions", "commit", "dirty", "command")
        }
        if path.is_file():
            record = read_json(path)
            record["starts"] = [*record["starts"], {**start, **extra}]
        else:
            record = {
                **head,
                **vars(identity),
                "recipe": to_dict(self.recipe),
                "study_settings": to_dict(self.study),
                "bindings": read_json(self.data / "data.json").get("bindings", {}),
                "starts": [{**start, **extra}],
            }
        write_json(path, record)

    def write_failure(self, head: dict[str, Any], identity: Identity, found: dict[str, Any]) -> Path:
        """Write failure.json: the run has ended in non-finite numbers; `found` says where and how."""
        path = self.file("failure.json")
        metrics = {"metrics_sha256": sha256_file(self.file("metrics.parquet"))}
        write_json(path, {**head, **vars(identity), "status": "diverged", **found, **metrics})
        return path

    def failure_message(self, record: dict[str, Any]) -> str:
        """What the record of a diverged run says, in one line."""
        return (
            f"{self.path}: step {record['step']} gave loss {record['loss']}, gradient norm "
            f"{record['grad_norm']}; first bad tensor: {record['first_bad_tensor']}; "
            f"last good checkpoint: {record['last_good_checkpoint']}"
        )

    def write_summary(self, head: dict[str, Any], identity: Identity, extra: dict[str, Any]) -> Path:
        """Write summary.json: the run is complete and nothing in it changes any more."""
        checkpoints = {
            path.parent.name: sha256_file(path)
            for path in sorted(self.path.glob("checkpoints/step-*/checkpoint.json"))
        }
        path = self.file("summary.json")
        write_json(
            path,
            {
                **head,
                **vars(identity),
                "status": "complete",
                "finished_utc": utc_now(),
                **extra,
                "metrics_sha256": sha256_file(self.file("metrics.parquet")),
                "checkpoints": checkpoints,
            },
        )
        return path
