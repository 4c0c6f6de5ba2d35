"""The boundaries that benchmarks time are callable as they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fp4core.bench.fused_boundary import _Boundaries
from fp4core.ops import spec as specs
from fp4core.ops.carrier_boundary import SCHEDULES, schedule
from fp4core.recipe import load_recipe
from tests.kernels.carriers import CONFIG, DEVICE


@pytest.mark.usefixtures("fresh_groups")
@pytest.mark.parametrize("name", ["serial", "fused"])
def test_every_boundary_runs(name: str) -> None:
    config = dataclasses.replace(CONFIG, hidden=128, ffn=128)
    spec = specs.encode(load_recipe("mxfp4_sr").for_block(0, config.blocks))
    work = _Boundaries(config, spec, 128, torch.device(DEVICE))
    assert name in SCHEDULES
    with schedule(name):
        for _, boundary, _ in work.cases():
            boundary()
