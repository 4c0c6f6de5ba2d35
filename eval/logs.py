"""The logs of one study, read and checked: every record against the study and recipes of today.

Each check that fails adds one line to `problems`; nothing is repaired, guessed or skipped in silence. A run
that ended with non-finite numbers is a result (status "diverged"), a run that simply is not finished is a
problem. Only the results directory is read, so it may have been copied from another machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4core import records
from fp4core.recipe import Recipe, Study

Record = dict[str, Any]


@dataclass
class Run:
    """One trajectory: its manifest, its summary (None when it diverged), and where it stopped."""

    manifest: Record
    summary: Record | None
    failure: Record | None
    metrics: Path

    @property
    def status(self) -> str:
        return "complete" if self.summary else "diverged"

    def reaches(self, step: int) -> bool:
        """Whether the run got past `step`, so that a checkpoint of it must exist."""
        return self.failure is None or step < self.failure["step"]


@dataclass
class Logs:
    """All records of a study. Keys are (route, seed), for validation (route, seed, step)."""

    root: Path
    study: Study
    recipes: dict[str, Recipe]
    head_recipe: Recipe  # body of the output-head screen, which need not be a route of the study
    problems: list[str] = field(default_factory=list)
    data: Record = field(default_factory=dict)
    runs: dict[tuple[str, int], Run] = field(default_factory=dict)
    probes: dict[tuple[str, int], Record] = field(default_factory=dict)
    validation: dict[tuple[str, int, int], Record] = field(default_factory=dict)
    downstream: dict[tuple[str, int], Record] = field(default_factory=dict)
    single: dict[str, Record] = field(default_factory=dict)
    traces: dict[str, bytes] = field(default_factory=dict)

    def read(self) -> None:
        """Read everything that the study asks for and check it."""
        first = self.study.seeds[0]
        self.data = self._record("data/data.json", "fp4core.data", "data") or {}
        for route in self.recipes:
            record = self._record(f"probes/{route}/s{first}.json", "fp4core.probe", "probe", route, first)
            if record:
                self.probes[route, first] = record
            for seed in self.study.seeds:
                self._read_run(route, seed)
        heads = {
            "dgrad": (f"dgrad/s{first}.json", self.study.dgrad.route, first),
            "output_head": (f"output_head/s{first}.json", self.study.output_head.route, first),
            "boundary": ("boundary/budget.json", None, None),
        }
        for stage, (name, route, seed) in heads.items():
            run = self.runs.get((route, seed)) if stage == "dgrad" else None
            if run and not run.reaches(self.study.dgrad.step):
                continue
            record = self._record(name, f"fp4core.{stage}", stage, route, seed)
            if record:
                self.single[stage] = record
        self._read_traces()
        self._compare_downstream()

    def _read_run(self, route: str, seed: int) -> None:
        place = f"{route}/s{seed}"
        folder = self.root / "runs" / place
        manifest = self._record(f"runs/{place}/manifest.json", "fp4core.run", "train", route, seed)
        if manifest is None:
            return
        if manifest.get("data_sha256") != self.data.get("data_sha256"):
            self.problems.append(f"runs/{place}: trained on other data than data/data.json describes")
        summary = failure = None
        if (folder / "summary.json").is_file():
            summary = self._record(f"runs/{place}/summary.json", "fp4core.summary", "train", route, seed)
        elif (folder / "failure.json").is_file():
            failure = self._record(f"runs/{place}/failure.json", "fp4core.failure", "train", route, seed)
        else:
            self.problems.append(f"runs/{place}: incomplete, the run has no summary.json; go on training it")
        metrics = folder / "metrics.parquet"
        if not metrics.is_file():
            self.problems.append(f"runs/{place}/metrics.parquet: missing")
        elif (ended := summary or failure) and records.sha256_file(metrics) != ended.get("metrics_sha256"):
            described = "summary.json" if summary else "failure.json"
            self.problems.append(f"runs/{place}/metrics.parquet: not the file that {described} describes")
        if not metrics.is_file() or not (summary or failure):
            return
        run = self.runs[route, seed] = Run(manifest, summary, failure, metrics)
        for step in self.study.all_cuts:
            if run.reaches(step):
                self._read_validation(route, seed, step)
        if run.reaches(self.study.downstream.step):
            self._read_downstream(route, seed)

    def _read_validation(self, route: str, seed: int, step: int) -> None:
        name = f"validation/{route}/s{seed}/step-{step:08d}.json"
        record = self._record(name, "fp4core.validation", "validation", route, seed)
        if record is None:
            return
        if record["inputs"].get("stream_sha256") != self.data.get("validation", {}).get("stream_sha256"):
            self.problems.append(f"{name}: scored on another stream than data/data.json describes")
        self._check_weights(name, record, f"{route}/s{seed}", step)
        self.validation[route, seed, step] = record

    def _read_downstream(self, route: str, seed: int) -> None:
        name = f"downstream/{route}/s{seed}.json"
        record = self._record(name, "fp4core.downstream", "downstream", route, seed)
        if record is None:
            return
        if record.get("gate", {}).get("passed") is not True:
            self.problems.append(
                f"{name}: scored without a passed export gate, its numbers are not comparable"
            )
        gate = self.root / "export" / route / f"s{seed}" / "gate.json"
        if gate.is_file() and records.sha256_file(gate) != record["inputs"].get("gate_sha256"):
            self.problems.append(
                f"{name}: the gate it was scored behind is not export/{route}/s{seed}/gate.json"
            )
        items = self.root / "downstream" / route / f"s{seed}.items.parquet"
        if not items.is_file():
            self.problems.append(f"downstream/{route}/{items.name}: missing")
        elif records.sha256_file(items) != record.get("items_sha256"):
            self.problems.append(f"downstream/{route}/{items.name}: not the file that {name} describes")
        else:
            self._check_weights(name, record, f"{route}/s{seed}", self.study.downstream.step)
            self.downstream[route, seed] = record

    def _check_weights(self, name: str, record: Record, place: str, step: int) -> None:
        """The checkpoint that was scored is the run's, where its record is among the logs."""
        path = self.root / "runs" / place / "checkpoints" / f"step-{step:08d}" / "checkpoint.json"
        if path.is_file():
            files = {file: entry["sha256"] for file, entry in records.read_json(path)["files"].items()}
            if records.tree_sha256(files) != record["inputs"].get("checkpoint_sha256"):
                self.problems.append(
                    f"{name}: scored another checkpoint than runs/{place} holds at step {step}"
                )

    def _compare_downstream(self) -> None:
        """Scores are compared item by item: every route must have been asked the same in the same way."""
        have = list(self.downstream.items())
        for (route, seed), record in have[1:]:
            for key in ("task_hashes", "settings", "evaluation_files"):
                if record.get(key) != have[0][1].get(key):
                    other = "/s".join(map(str, have[0][0]))
                    self.problems.append(
                        f"downstream/{route}/s{seed}.json: {key} differ from those of {other}"
                    )

    def _read_traces(self) -> None:
        record = self._record("traces/traces.json", "fp4core.traces", None)
        for name, expected in (record or {}).get("files", {}).items():
            path = self.root / "traces" / name
            data = path.read_bytes() if path.is_file() else b""
            if records.sha256_bytes(data) != expected:
                self.problems.append(f"traces/{name}: missing or not the file that traces.json describes")
            self.traces[name] = data

    def _record(
        self, name: str, schema: str, stage: str | None, route: str | None = None, seed: int | None = None
    ) -> Record | None:
        """The record `name` when it is of this study, stage, recipe and seed; else None and a problem."""
        path = self.root / name
        if not path.is_file():
            self.problems.append(f"{name}: missing")
            return None
        try:
            record = records.read_json(path)
        except ValueError as error:
            self.problems.append(str(error).replace(f"{self.root}/", ""))
            return None
        expected: dict[str, Any] = {}
        if stage is not None:
            expected = {"study": self.study.study, "stage_hash": self.study.stage_hash(stage)}
        if route is not None:
            recipe = self.head_recipe if stage == "output_head" else self.recipes[route]
            expected |= {"route": route, "seed": seed, "recipe_hash": recipe.hash}
        wrong = [
            f"{key} {record.get(key)}, now {value}"
            for key, value in expected.items()
            if record.get(key) != value
        ]
        if (record.get("schema") or {}) != {"name": schema, "version": 1}:
            wrong.insert(0, f"schema {record.get('schema')}, needed {schema} version 1")
        if wrong:
            self.problems.append(f"{name}: {'; '.join(wrong)}")
            return None
        return record


def read(root: Path, study: Study, recipes: dict[str, Recipe], head_recipe: Recipe) -> Logs:
    """Checked logs. ValueError lists every problem, one a line."""
    if not root.is_dir():
        raise ValueError(f"{root}: no such results directory")
    logs = Logs(root, study, recipes, head_recipe)
    logs.read()
    if logs.problems:
        lines = "".join(f"\n  {line}" for line in logs.problems)
        raise ValueError(
            f"{root}: {len(logs.problems)} problems, no table was written; run the stages that are missing, "
            f"or choose the study that these logs belong to:{lines}"
        )
    return logs
