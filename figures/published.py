"""The report's published values (``published.csv``): facts with their source, digits kept as printed in
the ledgers.

Keyed by our route slugs. Two rows of one value never exist; a value that the report does not give is absent.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from figures.numbers import decimal

PATH = Path(__file__).with_name("published.csv")
COLUMNS = ("table", "route", "metric", "step", "value", "se", "unit", "source")
SETTING = {
    "table06_throughput": "Llama-3.1 8B, sequence 8192, global batch 512, 32 GB200 GPUs, "
    "medians over steps 40-100",
    "table07_endpoint_loss": "Llama-3.1 8B, 160B tokens, raw loss at step 38,140, one trajectory per route",
    "table08_downstream": "Llama-3.1 8B at step 38,000, BF16 inference, one trajectory per route",
    "table09_production": "Llama-3.1 8B, 32 B300 GPUs, inside the long runs",
    "table10_output_head": "Llama-3.1 8B, rates rounded in the report",
    "table12_dgrad_error": "Llama-3.1 8B, 32 blocks, three sequence-2,048 batches",
    "fig09_validation_nll": "Llama-3.1 8B, 768 sequences of 8,192 targets, one trajectory per route",
}


@cache
def rows() -> tuple[dict[str, str], ...]:
    """All rows, in file order."""
    with PATH.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


@cache
def _index() -> dict[tuple[str, str, str], list[dict[str, str]]]:
    index: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in rows():
        index.setdefault((row["table"], row["route"], row["metric"]), []).append(row)
    return index


def text(table: str, route: str, metric: str, step: int | None = None) -> str | None:
    """Published digits of one fact, or None. Without ``step`` the fact must have only one."""
    found = _index().get((table, route, metric), [])
    if step is not None:
        found = [row for row in found if row["step"] == str(step)]
    if len(found) > 1:
        raise ValueError(f"{table}/{route}/{metric} has {len(found)} steps: name one")
    return found[0]["value"] if found else None


def number(table: str, route: str, metric: str, step: int | None = None) -> float | None:
    """Published value as a float, or None."""
    value = decimal(text(table, route, metric, step))
    return None if value is None else float(value)


def series(table: str, route: str, metric: str) -> list[tuple[int, float, float | None]]:
    """(step, value, standard error) of every published step, by step."""
    found = _index().get((table, route, metric), [])
    points = [(int(r["step"]), float(r["value"]), float(r["se"]) if r["se"] else None) for r in found]
    return sorted(points)
