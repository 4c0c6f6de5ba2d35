"""The step itself: batch splits, replay of a step, schedule, probes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from conftest import Lab, old_record

from fp4core.recipe import load_recipe
from fp4core.records import read_json
from fp4core.train.distributed import World
from fp4core.train.engine import Engine
from fp4core.train.errors import RunError
from fp4core.train.optim import learning_rate
from fp4core.train.probe import geometries, rates
from fp4core.train.shards import check_data, open_training

WORLD = World(0, 1, torch.device("cpu"))


def _engine(lab: Lab, data: Path, route: str, **options: object) -> Engine:
    study = lab.study()
    stream = open_training(data, check_data(data), sequence=study.train.sequence)
    return Engine(study, load_recipe(route), 0, world=WORLD, stream=stream, **options)


@pytest.mark.parametrize("local_batch", [1, 2])
def test_micro_steps_see_the_global_batch(local_batch: int, lab: Lab, tiny_data: Path) -> None:
    """The same rows in the same order, with the random places of the global batch."""
    whole = next(_engine(lab, tiny_data, "bf16").micro_batches(3))
    parts = list(_engine(lab, tiny_data, "bf16", local_batch=local_batch).micro_batches(3))
    assert torch.equal(torch.cat([p[0] for p in parts]), whole[0])
    assert torch.equal(torch.cat([p[1] for p in parts]), whole[1])
    assert [p[2] for p in parts] == list(range(0, 4 * 32, local_batch * 32))


@pytest.mark.parametrize("route", ["bf16", "mxfp4_sr", "mxfp4_sr_h32"])
def test_accumulation_changes_only_the_order_of_sums(route: str, lab: Lab, tiny_data: Path) -> None:
    """Formats without tensor-wide scales quantise a micro-batch as they quantise the whole batch.

    Losses are then bit-equal per token; their FP64 sum and the FP32 gradient sum differ by order alone: sums
    of n = 128 products in another order differ by at most n eps (1.5e-5) of the summed magnitudes, and by
    sqrt(n) eps when errors are random; 1e-5 of the norm lies between.
    """
    one, four = _engine(lab, tiny_data, route), _engine(lab, tiny_data, route, local_batch=1)
    loss_one, loss_four = float(one.gradients(1)), float(four.gradients(1))
    assert loss_four == pytest.approx(loss_one, rel=1e-12)
    for (name, a), (_, b) in zip(one.model.named_parameters(), four.model.named_parameters()):
        assert (a.grad - b.grad).norm() <= 1e-5 * a.grad.norm(), name


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recomputation_draws_the_same_bits(policy: str, lab: Lab, tiny_data: Path) -> None:
    kept = _engine(lab, tiny_data, "mxfp4_sr_h32")
    again = _engine(lab, tiny_data, "mxfp4_sr_h32", activation_checkpoint=policy)
    assert kept.step(1) == again.step(1)
    for a, b in zip(kept.model.parameters(), again.model.parameters()):
        assert torch.equal(a, b)


def test_a_step_that_did_not_fit_is_replayed(lab: Lab, tiny_data: Path) -> None:
    class Guard:
        calls: list[str] = []  # noqa: RUF012 (one test, one instance)
        attempts = 3

        def begin(self, step: int, attempt: int) -> None:
            self.calls.append(f"begin {step} {attempt}")

        def flag(self) -> torch.Tensor:
            return torch.tensor(len(self.calls) < 2)

        def exact(self) -> bool:
            self.calls.append("exact?")
            return len(self.calls) > 2

    plain, guarded = _engine(lab, tiny_data, "mxfp4_sr"), _engine(lab, tiny_data, "mxfp4_sr")
    guarded.guard = Guard()
    first, second = guarded.step(1), guarded.step(2)
    assert Guard.calls[::2] == ["begin 1 0", "begin 1 1", "begin 2 0"] and set(Guard.calls[1::2]) == {
        "exact?"
    }
    assert (first.replayed, second.replayed) == (True, False)
    assert dataclasses.replace(first, replayed=False) == plain.step(1)
    assert second == plain.step(2)


def test_schedule() -> None:
    assert learning_rate(1, peak=3e-4, warmup=2000) == pytest.approx(1.5e-7)
    assert learning_rate(2000, peak=3e-4, warmup=2000) == 3e-4
    assert learning_rate(38147, peak=3e-4, warmup=2000) == 3e-4
    assert learning_rate(1, peak=0.1, warmup=0) == 0.1


def test_training_learns(lab: Lab, tiny_data: Path) -> None:
    engine = _engine(lab, tiny_data, "bf16")
    losses = [engine.step(step).loss for step in range(1, 41)]
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3


def test_rates_are_medians_over_the_window() -> None:
    found = rates([100.0, 4.0, 2.0, 1.0], (2, 4), tokens_per_device=8.0)
    assert found["tokens_per_s"] == 4.0
    assert found["p10"] == pytest.approx(2.4)
    assert found["p90"] == pytest.approx(7.2)


def _command(lab: Lab, name: str, *more: str) -> int:
    from fp4core.__main__ import main

    where = ["--study", "tiny", "--recipes", str(lab.recipes), "--results", str(lab.results), "--seed", "0"]
    return main([name, *where, *more])


def test_probe_writes_both_geometries(lab: Lab) -> None:
    assert list(geometries(lab.study(), "bf16")) == ["selected", "matched"]
    older = old_record(lab.results / "probes" / "mxfp4_sr" / "s0.json", route="mxfp4_sr")
    assert _command(lab, "probe", "--route", "mxfp4_sr", "--done", str(lab.results / "p.json")) == 0
    assert (lab.results / "archive/mxfp4_sr/s0-aaa-bbb/probes/mxfp4_sr/s0.json").read_text() == older
    record = read_json(lab.results / "probes" / "mxfp4_sr" / "s0.json")
    selected, matched = record["measurements"]
    assert (selected["local_batch"], selected["accumulation"]) == (4, 1)
    assert (matched["local_batch"], matched["accumulation"]) == (2, 2)
    for row in record["measurements"]:
        assert row["p10"] <= row["tokens_per_s"] <= row["p90"]
        assert row["mfu_percent"] is None
        assert row["memory_gib"] > 0
    assert read_json(lab.results / "p.json")["record"].endswith("probes/mxfp4_sr/s0.json")


def test_head_screen_compares_with_its_control(lab: Lab) -> None:
    older = old_record(lab.results / "output_head" / "s0.json", route="mxfp4_sr")
    assert _command(lab, "head-screen") == 0
    assert (lab.results / "archive/mxfp4_sr/s0-aaa-bbb/output_head/s0.json").read_text() == older
    record = read_json(lab.results / "output_head" / "s0.json")
    control, lowp, wgrad = record["variants"]
    assert control["grad_relative_difference"] == 0.0
    assert control["loss_difference"] == 0.0
    assert 0 < lowp["grad_relative_difference"] < wgrad["grad_relative_difference"] < 0.5
    assert lowp["loss_difference"] != 0.0


def test_a_step_that_never_fits_is_an_error(lab: Lab, tiny_data: Path) -> None:
    class Guard:
        attempts = 2

        def begin(self, step: int, attempt: int) -> None:
            pass

        def flag(self) -> torch.Tensor:
            return torch.tensor(True)

        def exact(self) -> bool:
            return False

    engine = _engine(lab, tiny_data, "mxfp4_sr")
    engine.guard = Guard()
    with pytest.raises(RunError, match="step 1 was not exact after 2 attempts"):
        engine.step(1)
