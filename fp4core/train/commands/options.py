"""Options that the training commands share, and what they resolve to. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from fp4core.recipe import Recipe, Study, load_recipe, load_study


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one ValueError, printed by the dispatcher like any other wrong input."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}; see {self.prog} --help")


def parser(command: str, description: str, *, route: bool = False, seed: bool = True) -> Parser:
    """A parser with --study, --recipes, --results, --done and, where asked for, --route and --seed."""
    made = Parser(prog=f"python -m fp4core {command}", description=description)
    made.add_argument("--study", required=True, help="name of a study or path of its YAML file")
    made.add_argument(
        "--recipes", type=Path, help="folder with routes/ and studies/ (default: the project's own)"
    )
    if route:
        made.add_argument("--route", required=True, help="name of a route or path of its YAML file")
    if seed:
        made.add_argument("--seed", type=int, required=True, help="run seed")
    made.add_argument("--done", type=Path, help="completion marker to write")
    return made


def resolve_study(arguments: argparse.Namespace) -> Study:
    """The study of --study and --recipes."""
    return load_study(arguments.study, arguments.recipes)


def resolve_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe of --route and --recipes."""
    return load_recipe(arguments.route, arguments.recipes)
