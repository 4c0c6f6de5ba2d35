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

    from ..distributed import start_world, stop_world
    from ..probe import probe

    world = start_world(study.train.device)
    try:
        probe(study, recipe, arguments.seed, results=arguments.results, done=arguments.done, world=world)
    finally:
        stop_world(world)
    return 0
