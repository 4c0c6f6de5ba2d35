"""A table as data: columns with their number format, rows of values, marks and notes. Renderers turn it
into text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from functools import cached_property
from itertools import groupby

from figures.numbers import Value, decimal, fixed

BEST_NOTE = "Bold: best value of the column."


@dataclass(frozen=True)
class Column:
    """One column.

    key: name in the CSV file. title: header. group: header that spans neighbouring columns of the same group.
    decimals: number column with so many decimals; None: text. signed: plus sign on positive values. best:
    mark the
    smallest or largest value ('min', 'max'). interval: values are (low, high); the CSV file gets key_low
    and key_high.
    width: share of the line for long text. csv_only: only in the CSV file. p: a p value, '<0.001' below that.
    """

    key: str
    title: str
    group: str = ""
    decimals: int | None = None
    signed: bool = False
    best: str | None = None
    interval: bool = False
    width: float | None = None
    csv_only: bool = False
    p: bool = False

    @property
    def numeric(self) -> bool:
        return self.decimals is not None


@dataclass
class Table:
    """A finished table. rows map column keys to values (missing = blank); ``section`` names a column whose
    changes
    start a new block of rows under a heading; ``marks`` puts a symbol behind a cell, explained by a note."""

    name: str
    title: str
    caption: str
    columns: list[Column]
    rows: list[dict[str, object]]
    section: str | None = None
    notes: list[str] = field(default_factory=list)
    marks: dict[tuple[int, str], str] = field(default_factory=dict)
    summary: set[int] = field(default_factory=set)

    @property
    def heading(self) -> str:
        """'Table 6. Throughput' for table06_throughput."""
        number = self.name[5:7]
        return f"Table {int(number)}. {self.title}" if number.isdigit() else self.title

    @property
    def shown(self) -> list[Column]:
        """Columns that are displayed (the section's column becomes headings)."""
        return [column for column in self.columns if not column.csv_only and column.key != self.section]

    @cached_property
    def best(self) -> set[tuple[int, str]]:
        """Cells that hold the best value of their column, within their section, as displayed: what reads the
        same is equally good, and what most rows have is not marked. Summary rows and cells with a mark (a
        score at chance) do not compete."""
        found: set[tuple[int, str]] = set()
        for column in self.shown:
            if column.best is None:
                continue
            groups: dict[object, list[tuple[float, int]]] = {}
            for index, row in enumerate(self.rows):
                number = decimal(rounded(column, row.get(column.key)))
                competes = index not in self.summary and (index, column.key) not in self.marks
                if number is not None and competes:
                    groups.setdefault(row.get(self.section or ""), []).append((float(number), index))
            for cells in groups.values():
                if len({value for value, _ in cells}) > 1:
                    top = (min if column.best == "min" else max)(value for value, _ in cells)
                    first = {(index, column.key) for value, index in cells if value == top}
                    found |= first if len(first) <= len(cells) / 2 else set()
        return found

    @property
    def has_blanks(self) -> bool:
        return any(
            is_blank(row.get(column.key))
            for index, row in enumerate(self.rows)
            for column in self.shown
            if column.numeric and index not in self.summary
        )


def rounded(column: Column, value: object) -> Value:
    """``value`` with the digits that a numeric column displays."""
    number = decimal(value)  # type: ignore[arg-type]
    if number is None or column.decimals is None:
        return number
    return number.quantize(Decimal(1).scaleb(-column.decimals), rounding=ROUND_HALF_UP)


def is_blank(value: Value | tuple | object) -> bool:
    """Whether a cell has nothing to show."""
    if isinstance(value, tuple):
        return all(is_blank(part) for part in value)
    return value is None or value == "" or (isinstance(value, float) and not math.isfinite(value))


def notes(table: Table) -> list[str]:
    """The notes to print: best values where some are marked, then the table's own."""
    return ([BEST_NOTE] if table.best else []) + table.notes


def cell(column: Column, value: object, *, pad: bool = True) -> str:
    """Display text of one value; '' for a blank."""
    if is_blank(value):
        return ""
    if column.interval:
        low, high = value  # type: ignore[misc]
        parts = [fixed(v, column.decimals or 0, signed=column.signed) for v in (low, high)]
        return f"[{parts[0]}, {parts[1]}]"
    if column.p and float(value) < 0.001:  # type: ignore[arg-type]
        return "<0.001"
    if column.numeric:
        return fixed(value, column.decimals or 0, signed=column.signed, pad=pad)  # type: ignore[arg-type]
    return str(value)


def blocks(table: Table) -> Iterator[tuple[str | None, list[tuple[int, dict[str, object]]]]]:
    """(section heading or None, [(row index, row), ...]) in order."""
    numbered = list(enumerate(table.rows))
    if table.section is None:
        yield None, numbered
        return
    for heading, rows in groupby(numbered, key=lambda pair: pair[1].get(table.section)):
        yield (str(heading) if heading else None), list(rows)
