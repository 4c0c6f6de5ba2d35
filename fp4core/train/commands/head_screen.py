"""`python -m fp4core head-screen`: see fp4core.train.head_screen."""

from __future__ import annotations

from pathlib import Path

from fp4core.recipe import load_recipe

from .options import parser, resolve_study


def main(argv: list[str]) -> int:
    """Compare the three output heads under the study's screen settings."""
    options = parser("head-screen", "Output heads: BF16, low-precision forward, plus MXFP8 Wgrad.")
    options.add_argument("--results", type=Path, required=True, help="results directory of the study")
    arguments = options.parse_args(argv)
    study = resolve_study(arguments)
    recipe = load_recipe(study.output_head.route, arguments.recipes)

    from ..distributed import joined
    from ..head_screen import head_screen

    with joined(study.train.device) as world:
        head_screen(
            study, recipe, arguments.seed, results=arguments.results, done=arguments.done, world=world
        )
    return 0
