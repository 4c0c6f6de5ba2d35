"""A route that the report does not have says so wherever it appears."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

from figures.data import Tidy
from figures.style import looks
from figures.tables import TABLES

ROOT = Path(__file__).parents[2]
STAND_IN = "operand_hybrid_h16"  # complete in every table of the synthetic study


@pytest.fixture(scope="module")
def tidy(one: Path, tmp_path_factory: pytest.TempPathFactory) -> Tidy:
    """The study with ue5m3 in the place of another route."""
    target = tmp_path_factory.mktemp("extra") / "tidy"
    shutil.copytree(one, target)
    for path in [*target.glob("*.csv"), *target.glob("*.parquet")]:
        csv = path.suffix == ".csv"
        frame = pd.read_csv(path, dtype=str, keep_default_na=False) if csv else pd.read_parquet(path)
        if "route" not in frame:
            continue
        mine = frame["route"] == STAND_IN
        frame.loc[mine, "route"] = "ue5m3"
        if path.name == "routes.csv":
            recipe = yaml.safe_load((ROOT / "recipes" / "routes" / "ue5m3.yaml").read_text())
            frame.loc[mine, ["label", "published_key", "in_report"]] = [recipe["label"], "", "false"]
        frame.to_csv(path, index=False) if csv else frame.to_parquet(path)
    return Tidy(target)


ROUTES = [entry for entry in TABLES if {"routes"} & set(entry.needs)]


@pytest.mark.parametrize("entry", ROUTES, ids=lambda entry: entry.name)
def test_tables_mark_it(entry, tidy: Tidy) -> None:
    table = entry.build(tidy)
    cells = [str(value) for row in table.rows for value in row.values()]
    named = [cell for cell in cells if cell.startswith("UE5M3 FP4")]
    assert named and all(cell == "UE5M3 FP4 (not in the report)" for cell in named)


def test_figures_mark_it(tidy: Tidy) -> None:
    assert looks(tidy)["ue5m3"].short == "UE5M3 (extra)"
