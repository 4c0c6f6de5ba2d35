"""`python -m fp4core data`: see fp4core.train.data."""

from __future__ import annotations

from pathlib import Path

from fp4core.records import write_marker

from ..data import prepare_data
from .options import parser, resolve_study


def main(argv: list[str]) -> int:
    """Make the data directory of a study unless it is up to date."""
    options = parser("data", "Tokenizer, token shards and validation stream of a study.", seed=False)
    options.add_argument("--out", type=Path, required=True, help="data directory, e.g. results/smoke/data")
    options.add_argument("--inputs", type=Path, default=Path("inputs.yaml"), help="bindings of local files")
    arguments = options.parse_args(argv)
    study = resolve_study(arguments)
    record = prepare_data(
        study, arguments.out, inputs=arguments.inputs, note=lambda line: print(line, flush=True)
    )
    if arguments.done:
        write_marker(arguments.done, record, recipe_hash=None, stage_hash=study.stage_hash("data"))
    return 0
