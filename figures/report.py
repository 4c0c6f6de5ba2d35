"""report.html: one file that opens offline by double-click, without scripts and without the network.

In: a tidy directory, and a results directory with ``figures/*.svg``. The date is that of the records,
never of the
moment of drawing, so that the same inputs give the same bytes.
"""

from __future__ import annotations

import base64
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from figures import headline, provenance, summary
from figures.data import Tidy
from figures.numbers import count
from figures.schema import MissingTable
from figures.tables import TABLES
from figures.tables.render import to_csv, to_html

if TYPE_CHECKING:
    from figures.plots import Entry

TEMPLATES = Path(__file__).with_name("templates")
LARGEST_SVG = 900_000
NOT_INPUTS = ("note_", "version_", "study_", "validation_gate", "validation_unigram")
INPUT_KEYS = re.compile(r"(sha256|hash|tokenizer|corpus|stream|data|inputs?)", re.I)
FIRST_PAGE = {
    "study",
    "description",
    "device",
    "device_kind",
    "backend",
    "seeds",
    "scale",
    "tokens",
    "date",
    "commit",
}


def build(tidy: Tidy, results: Path, *, partial: bool = False) -> str:
    """The report's HTML. ``MissingTable`` when a table or a drawn figure is absent, unless ``partial``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from figures.plots import FIGURES

    lacking = [
        f"{e.name} needs {', '.join(tidy.lacking(e.needs))}"
        for e in (*TABLES, *FIGURES)
        if tidy.lacking(e.needs)
    ]
    drawn = [e for e in FIGURES if not tidy.lacking(e.needs)]
    undrawn = [e.name for e in drawn if not (results / "figures" / f"{e.name}.svg").is_file()]
    if lacking and not partial:
        raise MissingTable("the report is incomplete: " + "; ".join(lacking))
    if undrawn and not partial:
        raise MissingTable(
            f"{results / 'figures'} lacks {', '.join(f'{name}.svg' for name in undrawn)}: run `python "
            "-m figures plots` first"
        )
    for name in ("meta", "routes"):
        if not tidy.has(name):
            raise MissingTable(f"{name}.csv is missing or empty: the report cannot say what was run")
    tables = []
    for entry in TABLES:
        if not tidy.lacking(entry.needs):
            table = entry.build(tidy)
            tables.append(
                {
                    "name": entry.name,
                    "title": table.title,
                    "html": Markup(to_html(table)),
                    "csv": data_uri(to_csv(table), "text/csv"),
                }
            )
    records = provenance.records(results)
    figures = []
    for entry in drawn:
        if entry.name in undrawn:
            continue
        figures.append(
            {
                "name": entry.name,
                "title": entry.title,
                "caption": entry.caption(tidy),
                "image": image(results / "figures", entry.name),
                "width": "wide" if is_wide(results / "figures" / f"{entry.name}.svg") else "narrow",
                "csv": data_uri(entry.data(tidy).to_csv(index=False, lineterminator="\n"), "text/csv"),
                "commands": [
                    *provenance.commands(records, entry.needs),
                    *last_commands(tidy, results, entry),
                ],
            }
        )
    glance = headline.headline(tidy)
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        meta=tidy.meta,
        facts=facts(tidy),
        notes=[value for key, value in sorted(tidy.meta.items()) if key.startswith("note_") and value],
        statements=summary.statements(tidy),
        headline=Markup(to_html(glance)),
        headline_csv=data_uri(to_csv(glance), "text/csv"),
        tables=tables,
        figures=figures,
        lacking=[*lacking, *(f"{name} was not drawn" for name in undrawn)],
        manifests=[(record, provenance.run_facts(record)) for record in records if record.content],
        records=records,
        tidy_files=provenance.tidy_files(tidy.directory),
        other_meta=sorted(
            (k, v) for k, v in tidy.meta.items() if k not in FIRST_PAGE and not k.startswith("note_")
        ),
        routes=tidy.routes,
    )


def facts(tidy: Tidy) -> list[tuple[str, str]]:
    """The first page's what, on what, when, from which inputs."""
    meta, seeds = tidy.meta, tidy.seeds
    device = meta.get("device", "not recorded")
    if meta.get("backend"):
        device += f", {meta['backend']} backend"
    inputs = [
        f"{key.replace('_', ' ')} {value}"
        for key, value in sorted(meta.items())
        if value and INPUT_KEYS.search(key) and not key.startswith(NOT_INPUTS)
    ]
    listed = f"{count(len(seeds), 'seed')} ({', '.join(map(str, seeds))})" if seeds else "no seeds recorded"
    return [
        ("What", f"Study {meta.get('study', '?')}: {meta.get('description') or 'no description'}"),
        (
            "Scale",
            ", ".join(
                part for part in (meta.get("scale", ""), count(len(tidy.routes), "route"), listed) if part
            ),
        ),
        ("On what", device),
        ("When", meta.get("date", "not recorded")),
        ("Code", commits(meta)),
        ("Inputs", "; ".join(inputs) if inputs else "see the run manifests under Provenance"),
    ]


def commits(meta: dict[str, str]) -> str:
    """The commits of the records, shortened; more than three are counted."""
    found = [part.strip()[:12] for part in meta.get("commit", "").split(";") if part.strip()]
    if not found:
        return "commit not recorded"
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    edits = ", with uncommitted edits" if meta.get("uncommitted_edits") == "yes" else ""
    return ("commit " if len(found) == 1 else "commits ") + ", ".join(found[:3]) + more + edits


def data_uri(text: str, kind: str) -> str:
    """``text`` as a base64 data URI."""
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode('utf-8')).decode('ascii')}"


def image(directory: Path, name: str) -> str:
    """The figure as a data URI: SVG, or PNG where the vector file is very large."""
    path, kind = directory / f"{name}.svg", "image/svg+xml"
    if path.stat().st_size > LARGEST_SVG and (directory / f"{name}.png").is_file():
        path, kind = directory / f"{name}.png", "image/png"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def is_wide(svg: Path) -> bool:
    """Whether a figure is wider than one column, from the width that its file states (points)."""
    with svg.open(encoding="utf-8") as file:
        found = re.search(r'<svg [^>]*?width="([0-9.]+)pt"', file.read(2000))
    return found is None or float(found.group(1)) > 72 * 4.5


def last_commands(tidy: Tidy, results: Path, entry: Entry) -> list[tuple[str, int]]:
    """(command, 1) of collecting, where there are runs to collect, and of drawing."""
    study, words = tidy.meta.get("study", ""), ["python", "-m"]
    collect = [
        *words,
        "eval",
        "collect",
        "--study",
        study,
        "--logs",
        str(results),
        "--out",
        str(tidy.directory),
    ]
    draw = [*words, "figures", "plots", "--tidy", str(tidy.directory), "--out", str(results / "figures")]
    collected = [collect] if any(results.glob("runs/*/s*/manifest.json")) else []
    return [(shlex.join(one), 1) for one in (*collected, [*draw, "--only", entry.name.split("_")[0]])]
