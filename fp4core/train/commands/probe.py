"""`python -m fp4core probe`: see fp4core.train.probe."""

from __future__ import annotations

from pathlib import Path

from .options import parser, resolve_recipe, resolve_study


def main(argv: list[str]) -> int:
    """Measure the throughput of one route."""
    options = parser("probe", "Throughput of one route: medians over a window, warm-up excluded.", route=True)
    options.add_argument("--results", type=Path, required=True, help="results directory of the study")
    arguments = options.parse_args(argv)
    study, recipe = resolve_study(arguments), resolve_recipe(arguments)

    from ..distributed import joined
    from ..probe import probe

    with joined(study.train.device) as world:
        probe(study, recipe, arguments.seed, results=arguments.results, done=arguments.done, world=world)
    return 0
