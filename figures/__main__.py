"""``python -m figures tables|plots|report``: tidy tables in, files out.

Exit code 0: done. 2: bad or missing input, one line on stderr, nothing written.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from figures.data import Tidy
from figures.schema import MissingTable, TidyError


class Named(Protocol):
    """A table or a figure of the registries."""

    name: str
    needs: tuple[str, ...]


Entry = TypeVar("Entry", bound=Named)


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m figures", description=__doc__.splitlines()[0])
    commands = root.add_subparsers(dest="command", required=True)
    for name, what in (
        ("tables", "write the tables"),
        ("plots", "draw the figures"),
        ("report", "write report.html"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("--tidy", type=Path, required=True, help="directory of tidy tables")
        command.add_argument(
            "--out",
            type=Path,
            required=True,
            help="file to write" if name == "report" else "directory to write to",
        )
        command.add_argument(
            "--partial",
            action="store_true",
            help="do what the tables at hand allow and list the rest, instead of refusing",
        )
        if name == "report":
            command.add_argument(
                "--results", type=Path, required=True, help="results directory: figures and records"
            )
        else:
            command.add_argument(
                "--only",
                action="append",
                metavar="NAME",
                help="only these (fig07 or the whole name); may be repeated or separated by commas",
            )
    return root


def chosen(entries: Sequence[Entry], only: list[str] | None) -> list[Entry]:
    """Entries whose name or number is in ``only``; all without it."""
    if not only:
        return list(entries)
    wanted = [word for part in only for word in part.split(",") if word]
    names = {entry.name for entry in entries}
    known = names | {name.split("_")[0] for name in names}
    for word in wanted:
        if word not in known:
            raise TidyError(f"unknown name {word!r}: choose from {', '.join(sorted(names))}")
    return [entry for entry in entries if entry.name in wanted or entry.name.split("_")[0] in wanted]


def possible(tidy: Tidy, entries: Sequence[Entry], partial: bool) -> list[Entry]:
    """Entries whose tables exist. Without ``partial`` a missing table is one error that names all of them."""
    lacking = {entry.name: tidy.lacking(entry.needs) for entry in entries}
    missing = {name: files for name, files in lacking.items() if files}
    if missing and not partial:
        listed = "; ".join(f"{name} needs {', '.join(files)}" for name, files in missing.items())
        raise MissingTable(
            f"{tidy.directory} lacks tables that were asked for ({listed}): run the stages that write them "
            "and `python -m eval collect`, or pass --partial"
        )
    for name, files in missing.items():
        print(f"skipped {name}: needs {', '.join(files)}")
    return [entry for entry in entries if entry.name not in missing]


def run_tables(args: argparse.Namespace) -> None:
    from figures.tables import TABLES
    from figures.tables.render import FORMATS, render

    tidy = Tidy(args.tidy)
    entries = possible(tidy, chosen(TABLES, args.only), args.partial)
    texts = {}
    for entry in entries:
        table = entry.build(tidy)
        texts.update({f"{entry.name}.{kind}": render(table, kind).encode("utf-8") for kind in FORMATS})
    write_all(args.out, texts)
    print(f"wrote {len(entries)} tables ({', '.join(FORMATS)}) to {args.out}")


def run_plots(args: argparse.Namespace) -> None:
    tidy = Tidy(args.tidy)
    from figures.plots import FIGURES

    entries = possible(tidy, chosen(FIGURES, args.only), args.partial)
    import matplotlib.pyplot as plt

    from figures import style

    files = {}
    with plt.rc_context(style.RC):
        for entry in entries:
            start = time.monotonic()
            figure = entry.draw(tidy)
            for kind in style.FORMATS:
                buffer = io.BytesIO()
                style.save(figure, buffer, kind)
                files[f"{entry.name}.{kind}"] = buffer.getvalue()
            plt.close(figure)
            print(f"drew {entry.name} ({time.monotonic() - start:.1f} s)", flush=True)
    write_all(args.out, files)
    print(f"wrote {len(entries)} figures ({', '.join(style.FORMATS)}) to {args.out}")


def run_report(args: argparse.Namespace) -> None:
    from figures import report

    text = report.build(Tidy(args.tidy), args.results, partial=args.partial)
    write_all(args.out.parent, {args.out.name: text.encode("utf-8")})
    print(f"wrote {args.out} ({len(text.encode('utf-8')) / 1e6:.1f} MB)")


def write_all(directory: Path, files: dict[str, bytes]) -> None:
    """Write every file atomically, after all of them were made."""
    from figures.schema import write_atomic

    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomic(directory / name, content)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        {"tables": run_tables, "plots": run_plots, "report": run_report}[args.command](args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
