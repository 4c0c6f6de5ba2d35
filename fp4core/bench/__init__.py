"""Benchmarks that print a table and write JSON: `python -m fp4core bench NAME [options]`.

Each name is a module here with `main(argv) -> exit code`, imported only when it is asked for.
"""

from __future__ import annotations

import importlib

NAMES = ("boundary", "producers", "gemm", "linear", "block", "step", "scale", "drill", "cost-model")


def main(argv: list[str]) -> int:
    """Run one benchmark. ValueError names the known ones, or says that one needs what is not here."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: python -m fp4core bench NAME [options]\n\nNAME: {', '.join(NAMES)}")
        return 0 if argv else 2
    name = argv[0]
    if name not in NAMES:
        raise ValueError(f"unknown benchmark {name!r}; choose one of: {', '.join(NAMES)}")
    try:
        module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"benchmark {name} cannot start: no module {error.name!r} in this installation"
        ) from None
    return module.main(argv[1:])
