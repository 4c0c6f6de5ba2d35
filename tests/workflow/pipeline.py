"""The real Snakefile over stub commands, in a directory of its own: whole plans in seconds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml

from fp4core import recipe

ROOT = Path(__file__).resolve().parents[2]
SNAKEMAKE = Path(sys.executable).parent / "snakemake"


def snakemake(*arguments: str, cwd: Path = ROOT, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run Snakemake of this environment; its output is in ``stdout`` (both streams)."""
    command = [str(SNAKEMAKE), *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        check=False,
    )


def planned(output: str) -> Counter[str]:
    """Jobs per rule of a dry run's table; empty when there is nothing to do."""
    table = re.findall(r"^Job stats:\njob +count\n[- ]+\n(.*?)^total", output, re.MULTILINE | re.DOTALL)
    rows = (line.split() for line in table[-1].splitlines()) if table else ()
    return Counter({name: int(count) for name, count in rows})


HEAVY = {"data", "train", "probe", "validate", "downstream", "dgrad", "output_head", "boundary", "traces"}


@dataclass
class Project:
    """A copy of the recipes with stub commands beside it."""

    folder: Path

    def run(self, *arguments: str, config: tuple[str, ...] = (), profile: str = "local"):
        """The repository's Snakefile in this folder: ``snakemake --profile NAME ... -- TARGETS``."""
        return snakemake(
            *("--profile", profile, "-s", ROOT / "Snakefile", "--directory", self.folder, "--cores", "2"),
            *("--config", f"recipes={self.folder / 'recipes'}", "study=tiny", *config, "--"),
            *arguments,
        )

    def plan(self, *arguments: str, config: tuple[str, ...] = ()) -> Counter[str]:
        done = snakemake(
            *("--profile", "local", "-n", "-s", ROOT / "Snakefile", "--directory", self.folder),
            *("--config", f"recipes={self.folder / 'recipes'}", "study=tiny", *config, "--"),
            *arguments,
        )
        assert done.returncode == 0, done.stdout
        return planned(done.stdout)

    def calls(self) -> list[str]:
        """Commands since the last look, as ``package command route``."""
        path = self.folder / "calls.log"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        found = []
        for line in lines:
            route = re.search(r"--route (\S+)", line)
            found.append(" ".join([*line.split()[:2], *([route.group(1)] if route else [])]))
        return sorted(found)

    def route(self, name: str) -> Path:
        return self.folder / "recipes" / "routes" / f"{name}.yaml"

    def study(self) -> Path:
        return self.folder / "recipes" / "studies" / "tiny.yaml"


def make_project(folder: Path, routes: tuple[str, ...]) -> Project:
    """``routes`` of the repository and a ``tiny`` study with two segments."""
    project = Project(folder)
    project.study().parent.mkdir(parents=True)
    project.route("x").parent.mkdir(parents=True)
    for route in routes:
        shutil.copy(ROOT / "recipes" / "routes" / f"{route}.yaml", project.route(route))
    text = (ROOT / "recipes" / "studies" / "smoke.yaml").read_text(encoding="utf-8")
    data = recipe.to_dict(recipe.load_study("smoke"))
    assert "study: smoke" in text
    data.update(study="tiny", description="of the workflow's tests")
    data["train"].update(segments="per_cut", steps=20, cuts=[10, 20], endpoint_step=20, warmup=2, log_every=2)
    data["downstream"]["step"] = data["dgrad"]["step"] = 10
    data["dgrad"]["route"] = data["output_head"]["route"] = "bf16"
    data["probe"]["selected"] = {}
    project.study().write_text(yaml.safe_dump(data), encoding="utf-8")
    for package in ("fp4core", "eval", "figures"):
        (folder / package).mkdir()
        shutil.copy(Path(__file__).parent / "stub.py", folder / package / "__main__.py")
        (folder / package / "__init__.py").touch()
    plan = recipe.make_plan({"study": "tiny", "recipes": str(folder / "recipes")})[1]
    outputs = {"collect": plan.tidy_files(), "tables": plan.table_files(), "plots": plan.figure_files()}
    (folder / "stub.json").write_text(json.dumps({"outputs": outputs}), encoding="utf-8")
    return project
