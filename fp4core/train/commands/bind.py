"""`python -m fp4core bind KIND PATH`: see fp4core.train.bind."""

from __future__ import annotations

from pathlib import Path

from fp4core._recipe_inputs import KINDS

from ..bind import bind
from .options import Parser


def main(argv: list[str]) -> int:
    """Enter local files with their hashes into inputs.yaml."""
    options = Parser(prog="python -m fp4core bind", description="Bind local files by their SHA-256.")
    options.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    options.add_argument("path", metavar="PATH", help="directory (or tokenizer.json) that holds the files")
    options.add_argument("--inputs", type=Path, default=Path("inputs.yaml"), help="file of bindings")
    options.add_argument("--route", help="checkpoint: its route (default: the manifest's)")
    options.add_argument("--step", type=int, help="checkpoint: its step")
    arguments = options.parse_args(argv)
    bind(
        arguments.kind,
        arguments.path,
        inputs=arguments.inputs,
        route=arguments.route,
        step=arguments.step,
        note=lambda line: print(line, flush=True),
    )
    return 0
