"""Commands beside training: the boundary budget, the doctor, the dispatcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from conftest import Lab, old_record

from fp4core import formats
from fp4core.__main__ import COMMANDS, main
from fp4core.bench import boundary
from fp4core.recipe import list_routes
from fp4core.records import read_json

ROOT = Path(__file__).parents[2]


def _where(lab: Lab) -> list[str]:
    return ["--study", "tiny", "--recipes", str(lab.recipes)]


def test_boundary_budget(lab: Lab) -> None:
    marker, stage_hash = lab.results / "b.json", lab.study().stage_hash("boundary")
    budget = lab.results / "boundary" / "budget.json"
    # of the same study, but of another recipe of one route
    older = old_record(budget, route=None, seed=None, recipe_hash=None, stage_hash=stage_hash)
    arguments = ["--results", str(lab.results), "--done", str(marker)]
    assert main(["bench", "boundary", *_where(lab), *arguments]) == 0
    assert (lab.results / "archive/study" / stage_hash / "boundary/budget.json").read_text() == older
    record = read_json(budget)
    schema = json.loads((ROOT / "schemas" / "tidy" / "boundary.schema.json").read_text())
    for row in record["rows"]:
        jsonschema.validate(row, schema)
    assert {row["route"] for row in record["rows"]} == set(list_routes())
    assert {row["boundary"] for row in record["rows"]} == {
        f"{name}_{direction}"
        for name in ("norm_qkv", "attention_output", "norm_gate_up", "silu_down")
        for direction in ("forward", "backward")
    }
    # a CPU has no fused schedule, and BF16 has nothing to quantise: both stay blank
    assert {row["schedule"] for row in record["rows"]} == {"serial"}
    assert {row["stage"] for row in record["rows"] if row["route"] == "bf16"} == {"gemm"}
    assert {row["stage"] for row in record["rows"] if row["route"] == "mxfp4_sr"} == set(boundary.STAGES)
    assert read_json(marker)["record"].endswith("boundary/budget.json")


@pytest.mark.parametrize(
    ("name", "shape"), [("mxfp4", (33, 64)), ("nvfp4_w2d", (40, 48)), ("nvfp4_cta", (8, 32))]
)
def test_reductions_are_the_formats_own(name: str, shape: tuple[int, int]) -> None:
    x, fmt = torch.randn(shape, generator=torch.Generator().manual_seed(0)), formats.get(name)
    found = boundary.reductions(x, fmt, axis=1)
    if fmt.outer == "constant":
        assert torch.equal(found[:, 0], x[:, : fmt.block_cols].abs().amax(1))
    elif fmt.outer == "stripe":
        assert torch.equal(found, x.abs().amax(1))
    else:
        assert found == x.abs().max()


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"bench", "bind"}))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"python -m fp4core {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["bench", "speed"], "unknown benchmark 'speed'"),
        (["probe", "--study", "smoke"], "the following arguments are required"),
    ],
)
def test_wrong_commands_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("error: ")
    assert message in first


def test_doctor(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *_where(lab)]) == 0
    out = capsys.readouterr().out
    assert "reference" in out
    assert f"{len(list_routes())} routes" in out
    assert main(["doctor", "--study", "report"]) == 1
    assert "fp4core bind corpus PATH" in capsys.readouterr().out


def test_a_finished_run_costs_no_torch(lab: Lab) -> None:
    """The workflow may ask again for what is done; the answer comes without the heavy imports."""
    assert lab.train("bf16") == 0
    code = "import sys; from fp4core.__main__ import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *lab.arguments("bf16")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr
