"""A run stays with the implementation that began it: Transformer Engine's or our own."""

from __future__ import annotations

import json

import pytest
from conftest import Lab

from fp4core.records import read_json


def test_a_te_run_does_not_change_hands(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.train("te_nvfp4", "--until", "3") == 0
    manifest = lab.run_path("te_nvfp4") / "manifest.json"
    record = read_json(manifest)
    assert record["backend"] == record["starts"][-1]["backend"] == "reference"
    assert record["recipe"]["implementation"] == "te"
    record["starts"][-1]["backend"] = "te"
    manifest.write_text(json.dumps(record))
    before = manifest.read_bytes()
    assert lab.train("te_nvfp4") == 2
    message = capsys.readouterr().err
    assert "trained by backend te so far, this start would use reference" in message
    assert manifest.read_bytes() == before
