"""Captions say whether Transformer Engine's routes ran in Transformer Engine or on our own kernels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest

from figures import captions
from figures.data import Tidy


def changed(tidy: Path, target: Path, te: list[str]) -> Tidy:
    """The study with other backends in its two Transformer Engine routes."""
    shutil.copytree(tidy, target)
    runs = pd.read_csv(target / "runs.csv")
    for route, backend in zip(("te_nvfp4", "te_nvfp4_bf16x4"), te):
        runs.loc[runs["route"] == route, "backend"] = backend
    runs.to_csv(target / "runs.csv", index=False)
    return Tidy(target)


@pytest.mark.parametrize(
    ("te", "text"),
    [
        (["te", "te"], "TE routes: Transformer Engine itself."),
        (["reference", "reference"], "TE routes: its numerics on this project's reference backend."),
        (
            ["te", "carrier"],
            "TE routes: its numerics on this project's carrier backend, in part Transformer Engine itself.",
        ),
    ],
    ids=["itself", "ours", "both"],
)
def test_caption_names_the_implementation(one: Path, tmp_path: Path, te: list[str], text: str) -> None:
    tidy = changed(one, tmp_path / "tidy", te)
    assert captions.transformer_engine(tidy) == text
    assert captions.setting(tidy).endswith(text)
