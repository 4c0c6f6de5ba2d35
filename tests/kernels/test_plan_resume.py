"""A run on the carrier backend goes on under the plans it had: the same bits as without the stop."""

from __future__ import annotations

import gc
import json

import pytest
import torch

from fp4core.ops import carrier_groups
from tests.kernels.carriers import engine


@pytest.mark.usefixtures("attention_that_repeats")
def test_plans_survive_a_restart() -> None:
    """Nor do the encodings of past steps stay alive."""
    one = engine()
    one.step(1)
    encodings = _encodings()
    one.step(2)
    assert _encodings() == encodings
    # a contraction that fell back to BF16 stays there; a fresh plan would begin in FP8 and sum otherwise
    group = carrier_groups.groups(one.model)[0]
    group.plan.kinds[0] = group.plan.kinds[5] = "bf16"
    carrier_groups.groups(one.model)[1].plan.set_apart = True
    kept = json.loads(json.dumps(one.extra_state()))
    weights = {name: value.clone() for name, value in one.model.state_dict().items()}
    moments = {
        name: {key: value.clone() for key, value in one.optimizer.state[p].items()}
        for name, p in one.model.named_parameters()
    }
    expected = one.step(3)
    after = [p.detach().clone() for p in one.model.parameters()]
    plans = one.extra_state()

    carrier_groups.forget()
    two = engine()
    two.model.load_state_dict(weights)
    for name, p in two.model.named_parameters():
        for key, value in moments[name].items():
            two.optimizer.state[p][key].copy_(value)
    two.resume(2, kept)
    assert carrier_groups.groups(two.model)[0].plan.kinds[0] == "bf16"
    assert [g.plan.set_apart for g in carrier_groups.groups(two.model)] == [False, True, False, False]
    assert two.step(3) == expected
    assert all(torch.equal(a, b) for a, b in zip(after, two.model.parameters(), strict=True))
    assert two.extra_state() == plans


def _encodings() -> int:
    gc.collect()
    return sum(type(o) is carrier_groups.Weights for o in gc.get_objects())


def test_plans_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="which no layer has"):
        engine().resume(1, {"carrier_plans": [[{"producers": [9999]}]]})


def test_a_state_is_of_its_moment() -> None:
    """A thread may write it while later steps adapt the plans: what it holds must not move with them."""
    carrier_groups.forget()
    one = engine()
    one.step(1)
    state = one.extra_state()
    then = json.dumps(state)
    for group in carrier_groups.groups(one.model):
        group.plan.adapt(dict.fromkeys(range(6), (-60, 60)))
        group.calibrated[0] = not group.calibrated[0]
    carrier_groups.turn(carrier_groups.groups(one.model))
    assert json.dumps(state) == then != json.dumps(one.extra_state())
    carrier_groups.forget()
