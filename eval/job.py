"""What one evaluation works on: a study, a route, a seed, and their files under results/<study>/."""

from __future__ import annotations

import argparse
import platform
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4core import recipe as recipes
from fp4core import records


@dataclass(frozen=True)
class Job:
    """Paths and identities. Every method that reads a file checks that it belongs to this study.

    `bound_run` is the verified directory of a run trained elsewhere, instead of the one under `results`.
    """

    study: recipes.Study
    recipe: recipes.Recipe
    seed: int
    results: Path
    bound_run: Path | None = None

    @property
    def route(self) -> str:
        return self.recipe.route

    @property
    def place(self) -> str:
        """Where this run stands below each stage's folder."""
        return f"{self.route}/s{self.seed}"

    @property
    def run_dir(self) -> Path:
        return self.bound_run or self.results / "runs" / self.place

    def manifest(self) -> dict[str, Any]:
        """The run's manifest. ValueError when it is missing or of another recipe or training setting."""
        path = self.run_dir / "manifest.json"
        if not path.is_file():
            raise ValueError(f"{path}: no run of {self.route} with seed {self.seed} here; train it first")
        manifest = records.read_json(path)
        expected = {"recipe_hash": self.recipe.hash, "stage_hash": self.study.stage_hash("train")}
        for key, value in expected.items():
            if manifest.get(key) != value:
                raise ValueError(
                    f"{path}: {key} is {manifest.get(key)}, the study's is {value}; "
                    "the run was trained under another configuration, train the route again"
                )
        if manifest.get("data_sha256") != self.data()["data_sha256"]:
            raise ValueError(
                f"{path}: trained on data {manifest.get('data_sha256')}, data.json says "
                f"{self.data()['data_sha256']}; train the route again or restore its data"
            )
        return manifest

    def checkpoint(self, step: int) -> Checkpoint:
        """The checkpoint of `step`, its hash taken from the record that was written with it."""
        path = self.run_dir / "checkpoints" / f"step-{step:08d}"
        record = path / "checkpoint.json"
        if not record.is_file():
            have = sorted(p.name for p in path.parent.glob("step-*")) if path.parent.is_dir() else []
            raise ValueError(
                f"{path}: no whole checkpoint of step {step} (found: {', '.join(have) or 'none'}); "
                "train on to that step"
            )
        files = {name: entry["sha256"] for name, entry in records.read_json(record)["files"].items()}
        return Checkpoint(path, step, files)

    def failure(self) -> dict[str, Any] | None:
        """The record of a run that ended in non-finite numbers; None for any other run."""
        path = self.run_dir / "failure.json"
        if (self.run_dir / "summary.json").is_file() or not path.is_file():
            return None
        return records.read_json(path)

    def reached(self, steps: list[int]) -> tuple[list[int], str | None]:
        """(the steps before a diverged run's end, what is skipped and why); any other run has them all."""
        failure = self.failure()
        lost = [step for step in steps if failure and step >= failure["step"]]
        if not lost:
            return steps, None
        return [step for step in steps if step not in lost], (
            f"{self.route} seed {self.seed}: training ended in non-finite numbers at step {failure['step']}; "
            f"skipped: {', '.join(f'step {step}' for step in lost)}"
        )

    def skip(self, step: int, done: Path | None, stage: str) -> bool:
        """True when a diverged run has no checkpoint of `step`; the marker, if one is asked for, says so.

        ValueError without a marker: whoever asks by hand wants that step.
        """
        self.manifest()
        _, note = self.reached([step])
        if note is None:
            return False
        if done is None:
            raise ValueError(note)
        print(f"{stage}: {note}", flush=True)
        records.write_marker(
            done,
            self.run_dir / "failure.json",
            recipe_hash=self.recipe.hash,
            stage_hash=self.study.stage_hash(stage),
            note=note,
        )
        return True

    def data(self) -> dict[str, Any]:
        """data.json of the study's data directory."""
        path = self.results / "data" / "data.json"
        if not path.is_file():
            raise ValueError(f"{path}: no data here; run `python -m fp4core data` first")
        return records.read_json(path)

    def data_file(self, name: str) -> tuple[Path, str]:
        """A file of the data directory and its SHA-256, once its bytes are checked against data.json."""
        path = self.results / "data" / name
        expected = self.data()["files"].get(name, {}).get("sha256")
        if expected is None or not path.is_file():
            raise ValueError(f"{path}: missing or not listed in data.json; make the data directory again")
        found = records.sha256_file(path)
        if found != expected:
            raise ValueError(
                f"{path}: sha256 expected {expected}, found {found}; make the data directory again"
            )
        return path, found

    def envelope(
        self, schema: str, stage: str, *, device: dict[str, str], backend: str, inputs: dict[str, Any]
    ) -> dict:
        """The record's head, see `records.envelope`."""
        return records.envelope(
            schema,
            study=self.study.study,
            route=self.route,
            seed=self.seed,
            recipe_hash=self.recipe.hash,
            stage_hash=self.study.stage_hash(stage),
            device=device,
            backend=backend,
            inputs=inputs,
        )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory and the SHA-256 of each of its files as recorded by the trainer."""

    path: Path
    step: int
    files: dict[str, str]

    @property
    def sha256(self) -> str:
        """One hash over all files."""
        return records.tree_sha256(self.files)

    def verify(self) -> None:
        """Read every byte; ValueError names the first file that is not as it was written."""
        for name, expected in self.files.items():
            path = self.path / name
            found = records.sha256_file(path) if path.is_file() else "nothing"
            if found != expected:
                raise ValueError(f"{path}: sha256 expected {expected}, found {found}; restore the checkpoint")

    def weights(self) -> tuple[recipes.ModelConfig, dict[str, Any]]:
        """(ModelConfig, state dict of the FP32 master weights on the CPU), after `verify`."""
        from fp4core.model import load_weights

        self.verify()
        with warnings.catch_warnings():  # one process reads alone, on purpose
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return load_weights(self.path)


def add_arguments(parser: argparse.ArgumentParser, *, route: bool = True) -> None:
    """--study --route --seed --results --recipes --done, as every stage takes them."""
    parser.add_argument("--study", required=True, help="name or path of a study")
    if route:
        parser.add_argument("--route", required=True, help="slug of the route")
    parser.add_argument("--seed", required=True, type=int)
    parser.add_argument("--results", required=True, type=Path, help="results/<study>")
    parser.add_argument("--recipes", type=Path, help="folder with routes/ and studies/ (default: recipes)")
    parser.add_argument("--done", type=Path, help="completion marker to write")
    if route:
        parser.add_argument(
            "--checkpoint",
            type=Path,
            metavar="INPUTS",
            help="evaluate the checkpoint that this file of bindings binds, not a run under --results",
        )


def from_arguments(arguments: argparse.Namespace, route: str | None = None) -> Job:
    """The job that the command line names; `route` where the study chooses it."""
    study = recipes.load_study(arguments.study, arguments.recipes)
    recipe = recipes.load_recipe(route or arguments.route, arguments.recipes)
    bound = _bound_run(arguments.checkpoint, recipe) if getattr(arguments, "checkpoint", None) else None
    return Job(study, recipe, arguments.seed, arguments.results, bound)


def _bound_run(inputs: Path, recipe: recipes.Recipe) -> Path:
    """The run's directory that `inputs` binds, every byte of its checkpoint verified."""
    found = recipes.verify_binding("checkpoint", inputs)
    binding = recipes.load_inputs(inputs).checkpoint
    if binding.route != recipe.route:
        raise ValueError(f"{inputs}: binds a checkpoint of {binding.route}, --route says {recipe.route}")
    return found.directory


def parse_steps(text: str, cuts: list[int]) -> list[int]:
    """Ascending steps from "a,b,c"; ValueError unless each is a cut of the study."""
    parts = [part.strip() for part in text.split(",")]
    bad = [part for part in parts if not part.isdigit() or int(part) not in cuts]
    if bad:
        raise ValueError(f"--steps: got {bad[0]!r}, needed steps of the study: {', '.join(map(str, cuts))}")
    return sorted({int(part) for part in parts})


def pick_device(study: recipes.Study) -> tuple[str, dict[str, str]]:
    """(torch device, {name, kind} for records) as the study's train.device asks for."""
    import torch

    wanted = study.train.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("train.device is cuda, this machine has no CUDA GPU; run on one or set device: auto")
    if wanted != "cpu" and torch.cuda.is_available():
        return "cuda", {"name": torch.cuda.get_device_name(), "kind": "cuda"}
    torch.set_num_threads(study.train.threads)
    return "cpu", {"name": _cpu_name(), "kind": "cpu"}


def _cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
