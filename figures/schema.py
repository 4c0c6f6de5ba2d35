"""Tidy tables: read one, hold it to its schema, say exactly what is wrong with it.

A schema in ``schemas/tidy`` describes one row (JSON Schema 2020-12). Two extra keywords describe the table:
``x-file`` is its file name and ``x-key`` the columns that are unique together. Tables are checked column
by column
(a loss history has tens of thousands of rows), with the same meaning as validating row by row; a test
compares both.

CSV: UTF-8, comma, header; an empty field is a missing value; booleans are ``true``/``false``.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

SCHEMA_DIR = Path(__file__).resolve().parents[1] / "schemas" / "tidy"


class TidyError(ValueError):
    """A tidy table that cannot be used; the message says got, needed and remedy."""


class MissingTable(TidyError):
    """One or more tidy tables are absent or empty."""


@cache
def names() -> tuple[str, ...]:
    """Names of all tidy tables, sorted."""
    return tuple(sorted(path.name.removesuffix(".schema.json") for path in SCHEMA_DIR.glob("*.schema.json")))


@cache
def load_schema(name: str) -> dict:
    """The row schema of table ``name``; ``TidyError`` when there is no such table."""
    path = SCHEMA_DIR / f"{name}.schema.json"
    if not path.is_file():
        raise TidyError(f"unknown tidy table {name!r}: schemas/tidy describes {', '.join(names())}")
    return json.loads(path.read_text(encoding="utf-8"))


def file_of(name: str) -> str:
    """File name of table ``name`` inside a tidy directory."""
    return load_schema(name)["x-file"]


def read_table(directory: Path, name: str) -> pd.DataFrame:
    """Read and check table ``name`` from ``directory``; columns in schema order, missing numbers as NaN.

    Raises ``MissingTable`` when the file is absent and ``TidyError`` when a column or a value breaks the
    schema.
    """
    schema = load_schema(name)
    path = Path(directory) / schema["x-file"]
    if not path.is_file():
        raise MissingTable(f"{path} is missing: run the stage that writes it, or `python -m eval collect`")
    where = path.name
    try:
        if path.suffix == ".parquet":
            raw = pd.read_parquet(path)
        else:
            raw = pd.read_csv(path, dtype=str, keep_default_na=False, na_filter=False)
    except pd.errors.EmptyDataError:
        raise TidyError(
            f"{where} has no header: needed the columns {', '.join(schema['required'])}"
        ) from None
    except (ValueError, OSError) as error:
        raise TidyError(f"{where} cannot be read as {path.suffix[1:]}: {error}") from None
    return check_frame(raw, name, where)


def check_frame(raw: pd.DataFrame, name: str, where: str) -> pd.DataFrame:
    """Typed copy of ``raw`` that satisfies the schema of ``name``; ``TidyError`` names column, row and
    value."""
    schema = load_schema(name)
    properties = schema["properties"]
    unknown = [column for column in raw.columns if column not in properties]
    absent = [column for column in schema["required"] if column not in raw.columns]
    if unknown or absent:
        got = f"unknown column {unknown[0]!r}" if unknown else f"no column {absent[0]!r}"
        raise TidyError(f"{where}: {got}; needed {', '.join(properties)}")
    columns = {
        column: _convert(raw[column], rule, f"{where} column {column}")
        for column, rule in properties.items()
        if column in raw.columns
    }
    frame = pd.DataFrame(columns)
    for column in properties:
        if column not in frame:
            frame[column] = np.nan
    frame = frame[list(properties)]
    key = schema["x-key"]
    duplicated = frame.duplicated(key, keep="first")
    if duplicated.any():
        row = frame.loc[duplicated.idxmax(), key]
        at = ", ".join(f"{column}={row[column]}" for column in key)
        raise TidyError(f"{where}: {at} occurs more than once; each {'/'.join(key)} is one row")
    return frame


def write_atomic(path: Path, content: bytes) -> None:
    """Write ``content`` so that a reader sees the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _convert(values: pd.Series, rule: dict, where: str) -> pd.Series:
    """Column of the type that ``rule`` states: object (str or None), int64, float64 or bool.

    A float NaN or the text "nan" is a value of a number column (a loss that diverged); an empty field or a
    null is missing. Both become NaN.
    """
    types = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    kind, nullable = types[0], "null" in types
    if pd.api.types.is_numeric_dtype(values):
        missing = values.isna() if kind != "number" else pd.Series(False, index=values.index)
    else:
        values = values.astype(object)
        missing = (values == "") | values.isna()
    if missing.any() and not nullable:
        raise TidyError(f"{where}, row {_row(missing)}: empty, needed {_needed(rule)}")
    if kind == "string":
        return _strings(values, missing, rule, where)
    if kind == "boolean":
        lowered = values.map(lambda v: str(v).lower())
        _refuse(values, ~lowered.isin(("true", "false")), rule, where)
        return lowered == "true"
    numbers = pd.to_numeric(values.where(~missing, np.nan), errors="coerce").astype(float)
    unread = numbers.isna() & ~missing
    if unread.any() and not pd.api.types.is_numeric_dtype(values):
        _refuse(values, unread & (values.map(str).str.strip().str.lower() != "nan"), rule, where)
    known = numbers.notna()
    if "minimum" in rule:
        _refuse(values, known & (numbers < rule["minimum"]), rule, where)
    if "maximum" in rule:
        _refuse(values, known & (numbers > rule["maximum"]), rule, where)
    if kind == "integer":
        _refuse(values, (known & (numbers != np.floor(numbers))) | (unread & ~missing), rule, where)
        return numbers.astype("int64") if not nullable else numbers
    return numbers


def _strings(values: pd.Series, empty: pd.Series, rule: dict, where: str) -> pd.Series:
    words = [None if missing else str(value) for value, missing in zip(values, empty)]
    text = pd.Series(words, index=values.index, dtype=object)
    allowed = set(text.dropna())
    if "enum" in rule:
        allowed &= set(rule["enum"])
    if "pattern" in rule:
        pattern = re.compile(rule["pattern"])
        allowed = {word for word in allowed if pattern.search(word)}
    _refuse(values, ~empty & ~text.isin(allowed), rule, where)
    return text


def _refuse(values: pd.Series, wrong: pd.Series, rule: dict, where: str) -> None:
    if wrong.any():
        got = values[wrong.idxmax()]
        raise TidyError(f"{where}, row {_row(wrong)}: got {got!r}, needed {_needed(rule)}")


def _row(wrong: pd.Series) -> int:
    """1-based data row of the first true element."""
    return int(np.flatnonzero(wrong.to_numpy())[0]) + 1


def _needed(rule: dict) -> str:
    types = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    parts = ["one of " + ", ".join(rule["enum"])] if "enum" in rule else [types[0]]
    if "minimum" in rule:
        parts.append(f">= {rule['minimum']}")
    if "maximum" in rule:
        parts.append(f"<= {rule['maximum']}")
    if "pattern" in rule:
        parts.append(f"matching {rule['pattern']}")
    return " ".join(parts)
