"""Random trainings of a few groups without a tensor: plans, device states and windows keep to each other.

Producers are replaced by what they do to a view's state; everything between a step's beginning and its
verdict is the real ``carrier_groups``, ``carrier_encode.settled`` and ``train.guard``.
"""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import nn

from fp4core.kernels import mx
from fp4core.ops import carrier_groups
from fp4core.ops import spec as specs
from fp4core.ops.carrier_encode import settled
from fp4core.ops.carrier_plan import DY_COL, DY_ROW, W_COL, W_ROW, X_COL, X_ROW
from fp4core.recipe import load_recipe
from fp4core.train.guard import CarrierGuard

pytestmark = pytest.mark.usefixtures("fresh_groups")
CPU = torch.device("cpu")
SPEC = specs.encode(load_recipe("mxfp4_sr").for_block(0, 32))
LAYERS, STRIDE = 4, 50  # a test's step stands for STRIDE of a training, so that windows end
# view -> largest block exponent, width, and how much either varies from tensor to tensor
USUAL = {X_ROW: (1, 4, 1, 2), X_COL: (1, 9, 1, 2), DY_COL: (-10, 8, 1, 6), DY_ROW: (-10, 20, 2, 3)}
Tensors = list[list[dict[int, tuple[int, int]]]]  # of a step: [micro-batch][layer][view] -> span


class Layer(nn.Module):
    """What a group is found by."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.weight, self.spec = nn.Parameter(torch.empty(1)), SPEC
        self.producer = specs.producer_id(block, 6)


class Training:
    """Steps of layers whose tensors are spans of block exponents."""

    def __init__(self) -> None:
        carrier_groups.forget()
        layers = nn.ModuleList(map(Layer, range(LAYERS)))
        self.guard = CarrierGuard(layers)
        self.groups = [carrier_groups.group([layer.producer], SPEC, CPU) for layer in layers]
        self.repeated = 0

    def step(self, number: int, tensors: Tensors) -> None:
        """One step, made again until the guard says that it is exact: then every tensor must have been."""
        for attempt in range(self.guard.attempts):
            self.guard.begin(number * STRIDE, attempt)
            if number > 1:  # a new group's limits are those of its first tensors
                self._check()
            used: list[tuple[bool, bool]] = []
            for micro in tensors:
                for g, spans in zip(self.groups, micro, strict=True):
                    used += self._made(g, [W_ROW, W_COL], spans) + self._made(g, [X_ROW], spans)
                for g, spans in reversed(list(zip(self.groups, micro, strict=True))):
                    used += self._made(g, [DY_ROW, DY_COL], spans) + self._made(g, [X_COL], spans)
            exact = self.guard.exact()
            self._check()
            if exact:
                assert all(fitted and known for fitted, known in used)
                self.repeated += attempt > 0
                return
        raise AssertionError("never exact")

    def _made(self, g: carrier_groups.Group, views: list[int], spans: dict) -> list[tuple[bool, bool]]:
        if views == [W_ROW, W_COL] and g.plan.kinds[W_ROW] == g.plan.kinds[W_COL]:
            return settled(g, views, lambda: [self._produce(g, W_ROW, spans[W_ROW])])
        return settled(g, views, lambda: [self._produce(g, v, spans[v]) for v in views])

    @staticmethod
    def _produce(g: carrier_groups.Group, view: int, span: tuple[int, int]) -> tuple[bool, bool]:
        """(fits, the reference that a product will use is the one it was made with)."""
        low, high, _, _ = mx.SPANS[g.plan.kinds[view]]
        ref, top, small, misfits = g.state[view].tolist()
        fitted = low <= span[0] - ref and span[1] - ref <= high
        format_name = g.operands[view].format
        # a block maximum with the first bits of the exponent, so both are of one exponent
        bits = [carrier_groups.block_limits(k, k, format_name) for k in (span[1], span[0])]
        row = [ref, max(top, bits[0][0]), max(small, bits[1][1]), misfits + (not fitted)]
        g.state[view] = torch.tensor(row, dtype=torch.int32)
        return fitted, ref == g.plan.refs[view]

    def _check(self) -> None:
        for g in self.groups:
            assert g.state[:, 0].tolist() == g.plan.refs
            limits = carrier_groups._table(CPU).limits[g.first : g.first + 6].tolist()
            assert limits == [list(pair) for pair in g.limits()]

    def state(self) -> str:
        """As a checkpoint's manifest has it."""
        return json.dumps(self.guard.state())


def draw(rng: random.Random) -> Tensors:
    """Two micro-batches; now and then a tensor that is much wider, or of another scale."""

    def span(view: int) -> tuple[int, int]:
        top, width, moves, widens = USUAL[view]
        top += rng.randint(-moves, moves)
        width += rng.randint(-widens, widens)
        if rng.random() < 0.004:
            width += 25
        if rng.random() < 0.004:
            top -= 20
        return top - width + 1, top

    weight = (-6, -3 + (rng.random() < 0.01))
    return [
        [{view: span(view) for view in USUAL} | {W_ROW: weight, W_COL: weight} for _ in range(LAYERS)]
        for _ in range(2)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_every_used_tensor_fitted_and_a_resume_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    steps = [draw(rng) for _ in range(45)]
    whole, states = Training(), []
    for number, tensors in enumerate(steps, start=1):
        whole.step(number, tensors)
        states.append(whole.state())
    assert 0 < whole.repeated < 20
    stop = rng.choice([9, 10, 19, 20, 33])
    again = Training()
    again.guard.load(json.loads(states[stop - 1]))
    for number in range(stop + 1, len(steps) + 1):
        again.step(number, steps[number - 1])
        assert again.state() == states[number - 1]
