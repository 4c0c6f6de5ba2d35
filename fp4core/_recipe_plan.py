"""What a study runs and where every result lies: the one place that the workflow's rules ask.

Heavy stages leave a marker each, ``results/STUDY/done/STAGE/...-KEY.json``; logs and checkpoints are never a
rule's output, because Snakemake deletes outputs before and after a failed job.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any, Literal

from fp4core._recipe_inputs import Inputs
from fp4core._recipe_load import entry
from fp4core._recipe_route import Recipe, digest
from fp4core._recipe_study import Study


@dataclasses.dataclass(frozen=True)
class WorkflowConfig:
    """``--config`` of the workflow."""

    study: str = entry("smoke", doc="name in recipes/studies, or a path")
    from_logs: str | None = entry(
        None, doc="results directory to redraw from; nothing is trained or measured"
    )
    recipes: str | None = entry(None, doc="folder with routes/ and studies/ instead of recipes/")
    results: str = entry("results", doc="where results/STUDY is made")
    inputs: str = entry("inputs.yaml", doc="bindings of local files")
    published: str | None = entry(
        None, doc="study=published: directory with any of the author's public files (default: the binding)"
    )

    def told(self, wildcards: Any, output: Any) -> str:
        """What every command line is told of the study, as a rule's ``params``, quoted for a shell.

        Snakemake does not compare a param that is a function of ``output``: another spelling of the
        same study reruns nothing. What can change a number is in the marker's name (``Plan.key``).
        """
        return shlex.join(["--study", self.study, *self._recipes()])

    def told_recipes(self, wildcards: Any, output: Any) -> str:
        """Where the recipes are, for commands that take no study."""
        return shlex.join(self._recipes())

    def told_inputs(self, wildcards: Any, output: Any) -> str:
        """The file of bindings, for the stages that read bound files; hashes are part of ``Plan.key``."""
        return shlex.join(["--inputs", self.inputs])

    def _recipes(self) -> list[str]:
        return ["--recipes", self.recipes] if self.recipes else []


@dataclasses.dataclass(frozen=True)
class Segment:
    """One training job: up to ``end``, leaving the checkpoints ``cuts``."""

    end: int
    cuts: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"step-{self.end:08d}"


TABLES = (
    "table01_prior_work",
    "table02_format_contracts",
    "table03_base_recipe",
    "table04_recipe_ledger",
    "table05_rounding_policy",
    "table06_throughput",
    "table07_endpoint_loss",
    "table08_downstream",
    "table09_production",
    "table10_output_head",
    "table11_boundary_budget",
    "table12_dgrad_error",
)
FIGURES = (
    "fig01_scale_rounding",
    "fig02_execution_routes",
    "fig03_cta_scaling",
    "fig04_operand_map",
    "fig05_weight_2d",
    "fig06_fusion_schedule",
    "fig07_training_loss",
    "fig08_training_loss_zoom",
    "fig09_validation_nll",
    "fig10_downstream_delta",
    "fig11_speed_quality",
    "fig12_dgrad_error",
)

# one schema each in schemas/tidy (a test keeps them equal)
TIDY = (
    "boundary.csv",
    "dgrad.csv",
    "downstream.csv",
    "downstream_items.parquet",
    "endpoint.csv",
    "execution_routes.csv",
    "formats.csv",
    "losses.parquet",
    "meta.csv",
    "operands.csv",
    "output_head.csv",
    "production.csv",
    "routes.csv",
    "runs.csv",
    "scale_rounding.csv",
    "scaling_domains.csv",
    "throughput.csv",
    "training.csv",
    "validation.csv",
    "validation_sequences.parquet",
    "weight_2d.csv",
)

# stages that run once per study, on its first seed where they need one
SINGLE = ("data", "dgrad", "output_head", "boundary", "traces")
Stage = Literal[
    "data", "train", "probe", "validation", "downstream", "dgrad", "output_head", "boundary", "traces"
]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Paths and rerun keys of one study; ``results`` is ``results/STUDY``."""

    study: Study
    recipes: dict[str, Recipe]
    results: str
    inputs: Inputs | None = None

    def told(self, wildcards: Any, output: Any) -> str:
        """The results directory, as a rule's ``params`` that is not compared (see WorkflowConfig.told)."""
        return shlex.quote(self.results)

    @property
    def partial(self) -> str:
        """Option of the drawing commands: a study of one's own is drawn whole or not at all."""
        return ""

    @property
    def accelerator(self) -> int:
        """How much of this machine's accelerator a job holds: all of it, in a study that wants one."""
        return int(self.study.train.device == "cuda")

    @property
    def first_seed(self) -> int:
        """The seed of everything that is measured once: probes, diagnostics and screens."""
        return self.study.seeds[0]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Training jobs of one run, in order."""
        cuts = self.study.all_cuts
        if self.study.train.segments == "one":
            return (Segment(cuts[-1], cuts),)
        return tuple(Segment(cut, (cut,)) for cut in cuts)

    def segment(self, step: int) -> Segment:
        """The segment that leaves the checkpoint of ``step``."""
        return next(s for s in self.segments if step in s.cuts)

    def until(self, name: str) -> int:
        """Last step of the segment called ``name``."""
        return next(s.end for s in self.segments if s.name == name)

    def cuts(self, name: str) -> str:
        """Cuts of the segment called ``name``, as a command line lists them."""
        return ",".join(str(cut) for s in self.segments if s.name == name for cut in s.cuts)

    def train_before(self, route: str, seed: int | str, name: str) -> list[str]:
        """Marker of the training job that the one called ``name`` goes on from; empty for the first."""
        names = [s.name for s in self.segments]
        return [self.done("train", route, seed, before) for before in names[: names.index(name)][-1:]]

    def train_of(self, route: str, seed: int | str, step: int) -> str:
        """Marker of the training job that leaves the checkpoint of ``step``."""
        return self.done("train", route, seed, self.segment(step).name)

    def key(self, stage: str, route: str = "") -> str:
        """Hash of what can change the numbers of a heavy job, 12 hex digits; part of its marker's name.

        Recipes count by content, studies by the stage's fields, bound inputs by their SHA-256. A changed
        number is then another file, so that nothing rests on times or on Snakemake's own memory: a fresh
        clone beside old results, or results copied in any order, runs nothing again.
        """
        if stage == "boundary":
            recipes: Any = {name: recipe.hash for name, recipe in self.recipes.items()}
        else:
            recipes = self.recipes[route].hash if route else None
        bound = None
        if self.inputs is not None and stage != "boundary":
            kinds = ["tokenizer", "corpus", "validation", *(["evaluation"] if stage == "downstream" else [])]
            bindings = {kind: getattr(self.inputs, kind) for kind in kinds}
            bound = {kind: binding.sha256 for kind, binding in bindings.items() if binding}
        return digest([self.study.stage_hash(stage), recipes, bound])

    def done(self, stage: Stage, route: str = "", seed: int | str = "", segment: str = "") -> str:
        """Path of a stage's marker."""
        folder = f"{self.results}/done/{stage}"
        if stage == "traces":
            return f"{folder}.json"
        if stage in SINGLE:
            owner = {"dgrad": self.study.dgrad.route, "output_head": self.study.output_head.route}
            return f"{folder}-{self.key(stage, owner.get(stage, ''))}.json"
        return f"{folder}/{route}/s{seed}{f'/{segment}' if segment else ''}-{self.key(stage, route)}.json"

    def marker(self, stage: Stage, segment: str = "") -> str:
        """``done`` with the wildcards of a rule's output; ``segment`` is "{segment}" where it has them."""
        tail = f"/{segment}" if segment else ""
        return f"{self.results}/done/{stage}/{{route}}/s{{seed}}{tail}-{{key}}.json"

    def stale(self, wildcards: Any, output: Any) -> str:
        """Pattern of a job's markers under any key, for ``rm -f``: one is valid at a time.

        Without this, going back to an earlier recipe would find its old marker beside the newer logs.
        """
        path = Path(output[0])
        return f"{shlex.quote(str(path.parent))}/{path.stem.rpartition('-')[0]}-*.json"

    def route_done(self, route: str) -> list[str]:
        """Every marker that belongs to ``route`` alone."""
        markers = [self.done("probe", route, self.first_seed)]
        for seed in self.study.seeds:
            for segment in self.segments:
                markers += [self.done(s, route, seed, segment.name) for s in ("train", "validation")]
            markers.append(self.done("downstream", route, seed))
        return markers

    def all_done(self) -> list[str]:
        """Every marker of the study."""
        return [m for r in self.recipes for m in self.route_done(r)] + [self.done(s) for s in SINGLE]

    def tables_key(self) -> str:
        """Hash of everything that tables show of the configuration, labels and order included."""
        return digest(
            [dataclasses.asdict(self.study), [dataclasses.asdict(r) for r in self.recipes.values()]]
        )

    def tidy_files(self) -> list[str]:
        """What ``collect`` writes: a file per schema in schemas/tidy."""
        return [f"{self.results}/tidy/{name}" for name in TIDY]

    def logs_in(self, logs: str) -> list[str]:
        """``log_files`` with their directory."""
        return [f"{logs}/{name}" for name in self.log_files(logs)]

    @staticmethod
    def drawing_code(root: str | Path) -> list[str]:
        """Sources whose edit redraws tables and figures: cheap, so they are plain inputs."""
        folder = Path(root) / "figures"
        found = [p for kind in ("*.py", "*.csv", "templates/*") for p in folder.rglob(kind) if p.is_file()]
        return sorted(os.path.relpath(p) for p in found)

    def table_files(self) -> list[str]:
        return [f"{self.results}/tables/{name}.{kind}" for name in TABLES for kind in ("csv", "md", "tex")]

    def figure_files(self) -> list[str]:
        return [f"{self.results}/figures/{name}.{kind}" for name in FIGURES for kind in ("pdf", "svg", "png")]

    def log_files(self, logs: str | Path | None = None) -> list[str]:
        """Every record that tables and figures are drawn from, relative to the results directory.

        A run in ``logs`` that ended with non-finite numbers is a result: it has a failure.json instead of
        a summary, and nothing of the checkpoints after it.
        """
        first = self.first_seed
        files = ["data/data.json", f"output_head/s{first}.json", "boundary/budget.json"]
        probed = f"runs/{self.study.dgrad.route}/s{first}"
        end = _failed_at(Path(logs) / probed) if logs else None
        if end is None or self.study.dgrad.step < end:
            files.append(f"dgrad/s{first}.json")
        for route in self.recipes:
            files.append(f"probes/{route}/s{first}.json")
            for seed in self.study.seeds:
                run = f"runs/{route}/s{seed}"
                end = _failed_at(Path(logs) / run) if logs else None
                ending = "summary.json" if end is None else "failure.json"
                files += [f"{run}/{name}" for name in ("manifest.json", "metrics.parquet", ending)]
                cuts = [cut for cut in self.study.all_cuts if end is None or cut < end]
                files += [f"validation/{route}/s{seed}/step-{cut:08d}.json" for cut in cuts]
                if self.study.downstream.step in cuts:
                    files += [f"downstream/{route}/s{seed}.{kind}" for kind in ("json", "items.parquet")]
        traces = ("scale_rounding", "scaling_domains", "weight_2d", "execution_routes")
        return files + [f"traces/{name}.csv" for name in traces]

    def missing_logs(self, logs: str | Path) -> list[str]:
        """The ``log_files`` that ``logs`` does not hold."""
        return [name for name in self.log_files(logs) if not (Path(logs) / name).is_file()]


def _failed_at(run: Path) -> int | None:
    """Step at which a run ended with non-finite numbers; None when it did not, or that is unreadable."""
    if (run / "summary.json").is_file() or not (run / "failure.json").is_file():
        return None
    try:
        step = json.loads((run / "failure.json").read_text(encoding="utf-8"))["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def incomplete_runs(logs: str | Path, missing: list[str]) -> list[str]:
    """One phrase per run that was begun and has no summary: where it is and how far it got."""
    found = []
    for name in missing:
        run = Path(logs) / Path(name).parent
        if Path(name).name == "summary.json" and (run / "manifest.json").is_file():
            steps = [p.name.removeprefix("step-") for p in run.glob("checkpoints/step-*") if p.is_dir()]
            last = max((int(step) for step in steps if step.isdigit()), default=None)
            where = Path(name).parent.as_posix()
            found.append(f"{where}, last checkpoint {last}" if last is not None else where)
    return found


def missing_logs_message(logs: str, missing: list[str], shown: int = 20) -> str:
    """One message for all missing logs; runs that are merely not finished are named first."""
    begun = "".join(f"\n  incomplete run: {run}" for run in incomplete_runs(logs, missing))
    more = f"\n  ... and {len(missing) - shown} more" if len(missing) > shown else ""
    lines = "".join(f"\n  {name}" for name in missing[:shown])
    return (
        f"from_logs={logs}: {len(missing)} logs are missing and nothing is run in their place; "
        f"complete the run they come from, or choose its study (--config study=NAME):{begun}{lines}{more}"
    )


def find_commands(root: str | Path) -> None:
    """Rules run ``python -m ...`` of this interpreter and this checkout, whatever the caller's PATH is."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), f"{root}/workflow/scripts"])
    first = {"PATH": programs, "PYTHONPATH": root}
    for name, folder in first.items():
        parts = [str(folder), *filter(None, [os.environ.get(name)])]
        os.environ[name] = os.pathsep.join(parts)
