"""Synthetic studies, drawn once for all tests of figures/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from figures.__main__ import main
from figures.data import Tidy
from tests.figures import synthetic


@pytest.fixture(scope="session")
def one(tmp_path_factory) -> Path:
    """Tidy directory of one seed on a CPU."""
    return synthetic.write(tmp_path_factory.mktemp("one") / "tidy")


@pytest.fixture(scope="session")
def three(tmp_path_factory) -> Path:
    """Tidy directory of three seeds on a GPU, with the report's depth and components."""
    return synthetic.write(
        tmp_path_factory.mktemp("three") / "tidy",
        seeds=(1, 2, 3),
        steps=2000,
        device_kind="cuda",
        blocks=32,
        components=("qkv", "attention_output", "ffn"),
    )


@pytest.fixture(scope="session")
def results(one) -> Path:
    """Results directory of the one-seed study: tables, figures, two run manifests, report.html."""
    root = one.parent
    for route in ("bf16", "mxfp4_sr"):
        folder = root / "runs" / route / "s1"
        folder.mkdir(parents=True)
        manifest = {"route": route, "seed": 1, "recipe_hash": "0123456789ab", "commit": "feed", "dirty": True}
        folder.joinpath("manifest.json").write_text(json.dumps(manifest))
        summary = {"command": f"python -m fp4core train --route {route}"}
        folder.joinpath("summary.json").write_text(json.dumps(summary))
    assert main(["tables", "--tidy", str(one), "--out", str(root / "tables")]) == 0
    assert main(["plots", "--tidy", str(one), "--out", str(root / "figures")]) == 0
    out = root / "report.html"
    assert main(["report", "--tidy", str(one), "--results", str(root), "--out", str(out)]) == 0
    return root


@pytest.fixture(scope="session")
def tidy_one(one) -> Tidy:
    return Tidy(one)


@pytest.fixture(scope="session")
def tidy_three(three) -> Tidy:
    return Tidy(three)
