"""`python -m fp4core train`: see fp4core.train.run. Runs under torchrun as it is."""

from __future__ import annotations

import os
from pathlib import Path

from fp4core.records import write_marker

from ..rundir import RunDir
from .options import parser, resolve_recipe, resolve_study


def main(argv: list[str]) -> int:
    """Train one route and seed to the end of the study, or to --until."""
    options = parser("train", "Train one route; an interrupted run goes on by itself.", route=True)
    options.add_argument("--results", type=Path, required=True, help="results directory of the study")
    options.add_argument("--until", type=int, metavar="STEP", help="end this segment after STEP")
    options.add_argument(
        "--max-seconds", type=float, metavar="T", help="stop, resumable, before this process is T old"
    )
    options.add_argument(
        "--on-mismatch",
        choices=("archive", "refuse"),
        default="archive",
        help="what to do with a run of another recipe, study or data that lies in the same place",
    )
    arguments = options.parse_args(argv)
    study, recipe = resolve_study(arguments), resolve_recipe(arguments)
    run = RunDir(arguments.results, study, recipe, arguments.seed)
    record = run.reached(arguments.until)
    if record is None:
        record = _train(run, arguments.until, arguments.max_seconds, arguments.on_mismatch)
    else:
        print(f"{recipe.route} s{arguments.seed}: nothing to do, {record} is there", flush=True)
    if arguments.done and os.environ.get("RANK", "0") == "0":
        write_marker(arguments.done, record, recipe_hash=recipe.hash, stage_hash=study.stage_hash("train"))
    return 0


def _train(run: RunDir, until: int | None, max_seconds: float | None, on_mismatch: str) -> Path:
    from ..distributed import joined
    from ..run import Request, train

    with joined(run.study.train.device) as world:
        return train(Request(run, until, max_seconds, on_mismatch), world=world)
