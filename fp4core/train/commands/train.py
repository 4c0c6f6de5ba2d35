"""`python -m fp4core train`: see fp4core.train.run. Runs under torchrun as it is.

A trajectory that ends in non-finite numbers is a result. With `--done` its failure.json is what the marker
names, the exit code is 0 and the same command does nothing more: a workflow goes on with the other routes and
no scheduler retries what would end the same way. Without `--done` the exit code is 1, and the same command
tries again from the last good checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fp4core.records import write_marker

from ..errors import Diverged
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
    options.add_argument(
        "--tensorboard", action="store_true", help="also write TensorBoard events (train.tensorboard)"
    )
    arguments = options.parse_args(argv)
    study, recipe = resolve_study(arguments), resolve_recipe(arguments)
    run = RunDir(arguments.results, study, recipe, arguments.seed)
    first, note = os.environ.get("RANK", "0") == "0", None
    record = run.reached(arguments.until)
    if record is not None:
        print(f"{recipe.route} s{arguments.seed}: nothing to do, {record} is there", flush=True)
    elif arguments.done and (failure := run.diverged(arguments.until)):
        record, note = run.file("failure.json"), run.failure_message(failure)
    else:
        try:
            record = _train(
                run,
                arguments.until,
                arguments.max_seconds,
                arguments.on_mismatch,
                tensorboard=arguments.tensorboard,
            )
        except Diverged as end:
            if not arguments.done:
                raise
            record, note = end.record, str(end)
    if note and first:
        print(f"diverged: {note} (without --done, the same command tries again)", file=sys.stderr, flush=True)
    if arguments.done and first:
        hashes = {"recipe_hash": recipe.hash, "stage_hash": study.stage_hash("train")}
        write_marker(arguments.done, record, **hashes, note=note)
    return 0


def _train(
    run: RunDir, until: int | None, max_seconds: float | None, on_mismatch: str, *, tensorboard: bool
) -> Path:
    from ..distributed import joined
    from ..run import Request, train

    with joined(run.study.train.device) as world:
        return train(Request(run, until, max_seconds, on_mismatch, tensorboard), world=world)
