"""Where files lie and who may import whom (left may import right, nothing else)."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# layer -> layers that it may import; a layer is a top-level package or a part of fp4core
MAY_IMPORT = {
    "formats": set(),
    "recipe": {"formats"},
    "records": set(),
    "reference": {"formats", "recipe"},
    "kernels": {"formats", "recipe"},
    "ops": {"reference", "kernels", "formats", "recipe"},
    "model": {"ops", "reference", "kernels", "formats", "recipe"},
    "train": {"model", "ops", "reference", "kernels", "formats", "recipe", "records", "root"},
    "bench": {
        "main",
        "train",
        "model",
        "ops",
        "reference",
        "kernels",
        "formats",
        "recipe",
        "records",
        "root",
    },
    "main": {"train", "bench", "recipe"},
    "root": {"ops", "formats"},
    "eval": {"model", "formats", "recipe", "records", "root"},
    "figures": set(),
}
# what a layer may load of the outside world, where that is a promise
NEVER = {
    "recipe": {"torch", "numpy", "pandas"},
    "formats": {"torch", "pandas"},
    "records": {"torch", "numpy", "pandas"},
    "figures": {"torch", "transformers", "lm_eval"},
    "workflow": {"torch", "numpy", "pandas"},
}
TOP = {
    *(".ci", ".gitignore", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile"),
    *("README.md", "Snakefile", "docs", "environment.yml", "eval", "figures", "fp4core", "local"),
    *("pyproject.toml", "recipes", "requirements-nodeps.txt", "requirements-pretrained.txt"),
    *("requirements.txt", "schemas", "slurm", "tests", "workflow"),
}
TEXT = {".py", ".smk", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ".csv", ".cff", ""}


@cache
def tracked() -> tuple[Path, ...]:
    """Files of the repository, without what git ignores; outside git, everything but caches."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        return tuple(p for name in listed.stdout.splitlines() if (p := Path(name)) and (ROOT / p).is_file())
    skip = {".venv", ".git", "results", ".snakemake", "__pycache__"}
    found = (p.relative_to(ROOT) for p in ROOT.rglob("*") if p.is_file())
    return tuple(p for p in found if not skip & set(p.parts))


def python_files() -> list[Path]:
    return [p for p in tracked() if p.suffix == ".py" and p.parts[0] in ("fp4core", "eval", "figures")]


def layer(path: Path) -> str:
    """Layer of a file of ours."""
    if path.parts[0] != "fp4core":
        return path.parts[0]
    if len(path.parts) > 2:
        return path.parts[1]
    return {"__init__": "root", "__main__": "main"}.get(
        path.stem, path.stem.split("_")[1 if path.stem[0] == "_" else 0]
    )


def imports(path: Path) -> set[str]:
    """Absolute module names that a file imports anywhere, lazily too."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*path.parent.parts[: len(path.parent.parts) - node.level + 1]])
                if node.level
                else ""
            )
            module = ".".join(filter(None, [base, node.module]))
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def target(module: str) -> str | None:
    """Layer that an imported name belongs to; None for others' packages."""
    parts = module.split(".")
    if parts[0] in ("eval", "figures", "tests"):
        return parts[0]
    if parts[0] != "fp4core":
        return None
    name = parts[1].lstrip("_").split("_")[0] if len(parts) > 1 else ""
    return name if name in MAY_IMPORT else "root"


@pytest.mark.parametrize("path", python_files(), ids=str)
def test_imports_go_one_way(path):
    own = layer(path)
    assert own in MAY_IMPORT, f"{path}: no layer of the design"
    found = imports(path)
    wrong = {m: target(m) for m in found if target(m) not in {None, own, *MAY_IMPORT[own]}}
    assert not wrong, f"{path} ({own}) may import {sorted(MAY_IMPORT[own])}, got {wrong}"
    outside = {m.split(".")[0] for m in found} & NEVER.get(own, set())
    assert not outside, f"{path} ({own}) must not import {sorted(outside)}"


def test_kernels_and_reference_never_meet():
    assert "kernels" not in MAY_IMPORT["reference"] and "reference" not in MAY_IMPORT["kernels"]


def test_workflow_imports_the_recipe_module_only():
    for path in [Path("Snakefile"), *(p for p in tracked() if p.suffix == ".smk")]:
        text = (ROOT / path).read_text(encoding="utf-8")
        lines = re.findall(r"^\s*(?:from|import) .*", text, re.MULTILINE)
        ours = [line for line in lines if re.search(r"\b(fp4core|eval|figures)\b", line)]
        assert set(ours) <= {"from fp4core import recipe"}, path
        assert not [line for line in lines if re.search(r"\b(torch|numpy|pandas)\b", line)], path
    for path in tracked():
        if path.parts[:2] == ("workflow", "scripts"):
            assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) < 25, (
                f"{path}: adapters are short"
            )


def test_top_level_is_the_layout():
    assert {p.parts[0] for p in tracked()} <= TOP
    for name in ("slurm", "local"):
        assert (ROOT / name).resolve() == ROOT / "workflow" / "profiles" / name
    stages = {p.stem for p in tracked() if p.parts[:2] == ("workflow", "rules")}
    assert {"data", "train", "probe", "validate", "downstream", "collect", "figures"} <= stages


@pytest.mark.parametrize("path", [p for p in tracked() if p.suffix in (".py", ".smk")], ids=str)
def test_file_is_short(path):
    limit = 200 if path.suffix == ".smk" else 500
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= limit


def test_no_file_names_a_machine_or_an_index():
    machine = re.compile(r"(?<![\w.])/(?:work|root|home|Users|mnt)/\w")
    index = re.compile(
        r"index-url|find-links|pypi\.org/simple|download\.pytorch\.org|files\.pythonhosted\.org"
    )
    bad = []
    for path in tracked():
        if path.suffix in TEXT and path != Path("tests/unit/test_layout.py"):
            text = (ROOT / path).read_text(encoding="utf-8", errors="replace")
            bad += [f"{path}: {m.group()}" for pattern in (machine, index) for m in pattern.finditer(text)]
    assert not bad


@pytest.mark.parametrize("path", [p for p in tracked() if p.name.endswith(".schema.json")], ids=str)
def test_schema_is_closed(path):
    schema = json.loads((ROOT / path).read_text(encoding="utf-8"))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    objects = [schema, *schema.get("$defs", {}).values()]
    assert all(o.get("additionalProperties") is False for o in objects if "properties" in o)


@pytest.mark.parametrize("path", python_files(), ids=str)
def test_public_functions_are_typed(path):
    """Arguments and results of public functions and methods carry types."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    bodies = [tree.body, *(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_")]
    bare = []
    for body in bodies:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            if any(ast.unparse(d).startswith("triton") for d in node.decorator_list):
                continue  # Triton compiles these; their arguments are pointers and constexprs
            a = node.args
            named = [*a.posonlyargs, *a.args, *a.kwonlyargs]
            untyped = [x.arg for x in named if x.annotation is None and x.arg not in ("self", "cls", "ctx")]
            if untyped or node.returns is None:
                bare.append(f"{node.name}({', '.join(untyped)})")
    assert not bare, f"{path}: {bare}"
