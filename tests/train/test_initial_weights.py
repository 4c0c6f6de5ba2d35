"""Initial weights: a function of seed and name alone, drawn side by side, and only where they are needed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import Lab
from torch import nn

from fp4core.model import build
from fp4core.recipe import load_study

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def _weights(
    monkeypatch: pytest.MonkeyPatch, threads: int, lines: list[str] | None = None
) -> dict[str, torch.Tensor]:
    monkeypatch.setattr(build, "_threads", lambda: threads)
    config = dataclasses.replace(load_study("smoke").model, vocab=4999)
    model = build.build_model(config, None, "meta")
    return build.materialise(model, "cpu", 3, note=None if lines is None else lines.append).state_dict()


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, and more threads than tensors: each tensor has a generator of its own."""
    one, many = _weights(monkeypatch, 1), _weights(monkeypatch, 64)
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.skipif(TORCH < (2, 13), reason="earlier versions of torch truncate by another method")
def test_the_head_is_torchs_truncated_normal() -> None:
    for shape, bound in (((63, 100), 3.0), ((5,), 1.0), ((700, 129), 0.5)):
        mine, its = (torch.empty(shape) for _ in range(2))
        generators = [torch.Generator().manual_seed(11) for _ in range(2)]
        build._truncated_normal(mine, 0.02, 0.02 * bound, generators[0])
        nn.init.trunc_normal_(its, 0.0, 0.02, -0.02 * bound, 0.02 * bound, generator=generators[1])
        assert torch.equal(mine, its)
        assert mine.abs().max() <= torch.tensor(0.02 * bound)


def test_the_head_is_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    head = _weights(monkeypatch, 2)["lm_head.weight"]
    std = head.shape[1] ** -0.5
    assert 2.9 * std < head.abs().max() <= 3 * std
    # N(0, 1) inside three standard deviations has a standard deviation of 0.9866
    assert head.std().item() == pytest.approx(0.9866 * std, rel=0.01)


def test_drawing_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_NOTE_SECONDS", 0.0)
    lines: list[str] = []
    _weights(monkeypatch, 2, lines)
    assert lines and all(line.startswith("drawing initial weights: ") for line in lines)


def test_a_resume_draws_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lab.train("bf16", "--until", "3") == 0

    def draw(*arguments: object) -> torch.Tensor:
        raise AssertionError("weights were drawn that a checkpoint holds")

    monkeypatch.setattr(build, "_draw", draw)
    assert lab.train("bf16") == 0
