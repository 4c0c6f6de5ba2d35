"""Logs -> tidy tables. The only writer of tables; it checks every manifest and record first.

All tables are written into a directory beside the old one and exchanged by renames, or none is.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
from pathlib import Path
from typing import Any

from eval import logs as checked
from eval import tidy
from fp4core import recipe as recipes

TRACES = ("scale_rounding", "scaling_domains", "weight_2d", "execution_routes")


def build(logs: checked.Logs, reported: recipes.Study | None) -> dict[str, bytes]:
    """File name -> bytes of every tidy table."""
    tables = {name: make(logs) for name, make in tidy.TABLES.items()}
    tables["training"] = tidy.training(logs, reported)
    return encode(tables) | {f"{name}.csv": logs.traces[f"{name}.csv"] for name in TRACES}


def encode(tables: dict[str, list[dict[str, Any]]]) -> dict[str, bytes]:
    """File name -> bytes of tables given as rows; ValueError when columns are not those of the schema."""
    files = {}
    for name, rows in tables.items():
        schema = tidy.schema(name)
        for row in rows[:1]:
            unknown = row.keys() - schema["properties"].keys()
            absent = set(schema["required"]) - row.keys()
            if unknown or absent:
                raise ValueError(
                    f"table {name}: unknown columns {sorted(unknown)}, absent {sorted(absent)} against "
                    f"schemas/tidy/{name}.schema.json"
                )
        if name in tidy.PARQUET:
            files[f"{name}.parquet"] = tidy.parquet_bytes(name, rows)
        else:
            files[f"{name}.csv"] = _csv(rows, list(schema["properties"]))
    return files


def write(files: dict[str, bytes], out: Path) -> None:
    """Put all files into the directory `out`, replacing what was there, or change nothing."""
    work, old = out.with_name(f".{out.name}.part"), out.with_name(f".{out.name}.old")
    for path in (work, old):
        shutil.rmtree(path, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        for name, data in files.items():
            (work / name).write_bytes(data)
        if out.exists():
            os.replace(out, old)
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _csv(rows: list[dict[str, Any]], columns: list[str]) -> bytes:
    """CSV of `columns`; None is empty, booleans true/false, floats keep every digit."""
    sink = io.StringIO()
    writer = csv.DictWriter(sink, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: str(v).lower() if isinstance(v, bool) else v for k, v in row.items()})
    return sink.getvalue().encode()


def main(arguments: list[str]) -> None:
    """python -m eval collect --study S --logs results/S --out results/S/tidy"""
    parser = argparse.ArgumentParser(prog="python -m eval collect", description="logs -> tidy tables")
    parser.add_argument("--study", required=True, help="name or path of a study")
    parser.add_argument("--logs", required=True, type=Path, help="results directory to read")
    parser.add_argument("--out", required=True, type=Path, help="directory of the tidy tables")
    parser.add_argument("--recipes", type=Path, help="folder with routes/ and studies/ (default: recipes)")
    parsed = parser.parse_args(arguments)
    study = recipes.load_study(parsed.study, parsed.recipes)
    routes = recipes.study_routes(study, parsed.recipes)
    head = recipes.load_recipe(study.output_head.route, parsed.recipes)
    logs = checked.read(parsed.logs, study, routes, head)
    files = build(logs, _reported(parsed.recipes))
    write(files, parsed.out)
    runs = len(logs.runs)
    print(f"collect: {len(files)} tables of {len(routes)} routes and {runs} runs in {parsed.out}", flush=True)


def _reported(directory: Path | None) -> recipes.Study | None:
    """The report's own study, for the column beside ours; None in a folder that has none."""
    path = recipes.recipes_dir(directory) / "studies" / "report.yaml"
    return recipes.load_study(path) if path.is_file() else None
