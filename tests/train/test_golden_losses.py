"""Short trajectories of every route, committed: a refactor reproduces them, a change of numbers says why.

On the processor and torch version that wrote them the losses are equal to the bit. Elsewhere FP32 sums run in
another order and a BF16 or FP4 rounding flips here and there: losses then agree to 1e-3, which still catches
a wrong layer, and no longer tells one route from another.

Write them anew with `python tests/train/test_golden_losses.py`, in the commit that changes them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import Lab, make_tiny_data

from fp4core.recipe import list_routes, load_recipe
from fp4core.train.distributed import World, cpu_name
from fp4core.train.engine import Engine
from fp4core.train.shards import check_data, open_training

GOLDEN = Path(__file__).parents[1] / "golden" / "losses" / "tiny.json"
STEPS = 4


def _losses(lab: Lab, data: Path, route: str) -> list[float]:
    study = lab.study()
    stream = open_training(data, check_data(data), sequence=study.train.sequence)
    world = World(0, 1, torch.device("cpu"))
    engine = Engine(study, load_recipe(route), 0, world=world, stream=stream)
    return [engine.step(step).loss for step in range(1, STEPS + 1)]


def _place(data: Path) -> dict[str, str]:
    """Where numbers are the same to the bit."""
    tokenizer = check_data(data)["tokenizer"]["sha256"]
    return {"cpu": _processor(), "torch": torch.__version__, "tokenizer": tokenizer}


def _processor() -> str:
    """Name, family, model and stepping, and the vector width that torch uses."""
    fields = dict.fromkeys(("cpu family", "model", "stepping"), "?")
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if fields.get(name.strip()) == "?":
            fields[name.strip()] = value.strip()
    return " ".join([cpu_name(), *fields.values(), torch.backends.cpu.get_cpu_capability()])


@pytest.mark.parametrize("route", list_routes())
def test_losses_are_the_committed_ones(route: str, lab: Lab, tiny_data: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    place = _place(tiny_data)
    if place["tokenizer"] != golden["place"]["tokenizer"]:
        pytest.skip("this tokenizers version trains another tokenizer: the losses are of other tokens")
    losses = _losses(lab, tiny_data, route)
    if place == golden["place"]:
        assert losses == golden["losses"][route]
    assert losses == pytest.approx(golden["losses"][route], rel=1e-3)


def test_golden_losses_tell_routes_apart() -> None:
    losses = json.loads(GOLDEN.read_text())["losses"]
    assert sorted(losses) == sorted(list_routes())
    assert len({tuple(values) for values in losses.values()}) == len(losses)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        made = make_tiny_data(root)
        laboratory = Lab(root / "lab", made)
        record = {
            "place": _place(made),
            "losses": {route: _losses(laboratory, made, route) for route in list_routes()},
        }
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {GOLDEN}", file=sys.stderr)
