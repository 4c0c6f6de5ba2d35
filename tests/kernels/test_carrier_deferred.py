"""Deferred carriers: misfits, plans that hold windows of steps, and the way back to FP8."""

from __future__ import annotations

import pytest
import torch

from fp4core.ops import carrier, carrier_groups
from fp4core.ops.carrier_plan import DY_ROW
from tests.kernels.carriers import DEVICE, draw, model, one_linear, run, state

pytestmark = pytest.mark.usefixtures("fresh_groups")


def test_deferred_misfits_are_reported_once_and_the_replay_is_exact():
    m = model("mxfp4_sr")
    layer, x = one_linear(m)
    carrier.defer(m)
    run(layer, x)
    assert carrier.misfits(m) == []
    run(layer, x, 2.0**-20)
    report = carrier.misfits(m)
    assert {r.view for r in report} == {"x_row", "x_col"} and report[0].producers == (layer.producer,)
    again = run(layer, x, 2.0**-20)
    assert carrier.misfits(m) == []
    carrier_groups.forget()
    checked = run(layer, x, 2.0**-20)
    assert all(torch.equal(a, b) for a, b in zip(again, checked))


def test_a_check_can_be_queued_and_looks_at_its_own_model_alone():
    m = model("mxfp4_sr")
    assert carrier.reading(m) is None
    layer, x = one_linear(m)
    other = next(
        l
        for l in m.modules()
        if hasattr(l, "producer") and l.weight.shape == layer.weight.shape and l.producer != layer.producer
    )
    carrier.defer(m)
    for each in (layer, other):
        run(each, x)
    assert carrier.misfits(m) == []
    run(layer, x, 2.0**-20)
    fine, whole, bad = carrier.reading(other), carrier.reading(m), carrier.reading(layer)
    assert [bool(r.flag) for r in (fine, whole, bad)] == [False, True, True]
    assert fine.misfits() == [] and {r.producers for r in bad.misfits()} == {(layer.producer,)}
    # a reading is of its moment, though the counts have begun anew
    assert {r.producers for r in whole.misfits()} == {(layer.producer,)}
    assert not carrier.reading(m).flag


def test_a_reference_stays_while_there_is_room_and_moves_when_there_is_not():
    m = model("mxfp4_sr")
    layer, x = one_linear(m)
    carrier.defer(m)
    run(layer, x)
    group = carrier_groups.groups(m)[0]
    assert carrier.misfits(m) == []
    first = list(group.plan.refs)
    run(layer, x, 2.0)
    assert carrier.misfits(m) == [] and group.plan.refs == first
    assert group.state[:, 0].tolist() == first and not group.state[:, 1:].any()
    run(layer, x, 32.0)  # E4M3's 15 steps still hold this, with less than two to spare
    assert carrier.misfits(m) == []
    assert group.plan.refs != first and group.state[:, 0].tolist() == group.plan.refs


def _micro_steps(layer, x, smallest: tuple[float, ...], scales: tuple[float, ...] = (1.0, 1.0)) -> bool:
    """Steps of micro-batches with one small block in dY each, until exact; True when repeated."""
    for attempt in range(4):
        for small, scale in zip(smallest, scales):
            y = layer(x.clone().requires_grad_(), state())
            dy = torch.full_like(y, scale)
            dy[0, :32] = scale * small
            torch.autograd.grad(y, [layer.weight], dy)
        if not carrier.misfits(layer):
            return attempt > 0
    raise AssertionError("never exact")


def test_micro_batches_that_fit_one_by_one_but_not_together_do_not_repeat_every_step():
    layer, x = one_linear(model("mxfp4_sr"))
    carrier.defer(layer)
    _micro_steps(layer, x, (1.0, 1.0))
    # 25 and 29 steps wide; in BF16 from here on
    assert _micro_steps(layer, x, (2.0**-24, 2.0**-28))
    assert not any(
        _micro_steps(layer, x, pair) for pair in ((2.0**-28, 1.0), (1.0, 2.0**-24), (2.0**-33, 1.0))
    )
    group = carrier_groups.groups(layer)[0]
    assert group.plan.kinds[DY_ROW] == "bf16" and carrier.misfit_views(layer) == {"dy_row": 2}


@pytest.mark.parametrize("scales", [(1.0, 2.0**-30), (1.0, 2.0**4)])
def test_micro_batches_of_other_scales_are_repeated_at_most_twice(scales):
    layer, x = one_linear(model("mxfp4_sr"))
    carrier.defer(layer)
    repeated = sum(_micro_steps(layer, x, (2.0**-24, 2.0**-24), scales) for _ in range(6))
    assert repeated <= 2


def test_steps_whose_smallest_blocks_differ_share_a_reference():
    layer, x = one_linear(model("mxfp4_sr"))
    carrier.defer(layer)
    _micro_steps(layer, x, (1.0,))
    assert _micro_steps(layer, x, (2.0**-24,))
    group = carrier_groups.groups(layer)[0]
    assert group.plan.kinds[DY_ROW] == "e5m2"
    assert not any(_micro_steps(layer, x, (small,)) for small in (1.0, 2.0**-24, 2.0**-12, 2.0**-25))


def test_a_tensor_that_changes_its_scale_takes_its_reference_along():
    layer, x = one_linear(model("mxfp4_sr"))
    carrier.defer(layer)

    def exact(scale: float) -> bool:
        y = layer(x.clone().requires_grad_(), state())
        torch.autograd.grad(y, [layer.weight], torch.full_like(y, scale))
        return not carrier.misfits(layer)

    assert exact(2.0**-30)
    assert not exact(4.0) and exact(4.0) and exact(8.0)
    carrier.turn(layer)
    assert not exact(2.0**-40) and exact(2.0**-40)
    assert carrier_groups.groups(layer)[0].plan.kinds.count("bf16") == 0
    assert not exact(4.0) and exact(4.0) and exact(2.0**-40)  # the second time in a window
    assert carrier_groups.groups(layer)[0].plan.kinds.count("bf16") == 4


def test_a_contraction_returns_to_fp8_when_the_wide_window_is_over():
    layer, x = one_linear(model("mxfp4_sr"))
    carrier.defer(layer)
    _micro_steps(layer, x, (1.0, 1.0))
    assert _micro_steps(layer, x, (2.0**-40,))
    group = carrier_groups.groups(layer)[0]
    assert group.plan.kinds[DY_ROW] == "bf16"
    carrier.turn(layer)  # the wide step is in the last window
    assert group.plan.kinds[DY_ROW] == "bf16" and not _micro_steps(layer, x, (2.0**-2, 1.0))
    carrier.turn(layer)
    assert group.plan.kinds[DY_ROW] == "e5m2" and not _micro_steps(layer, x, (2.0**-2, 1.0))


def _backward_step(m, layers, smallest: list[float]) -> tuple[bool, list[torch.Tensor]]:
    """(exact, gradients) of one deferred step of layers with one small block in dY each."""
    found = []
    for layer, small in zip(layers, smallest, strict=True):
        x = draw(64, layer.weight.shape[1]).requires_grad_()
        y = layer(x, state())
        dy = torch.ones_like(y)
        dy[0, :32] = small
        found += torch.autograd.grad(y, [x, layer.weight], dy)
    return not carrier.misfits(m), found


def _as_checked(m, layers, smallest: list[float], found: list[torch.Tensor]) -> bool:
    """Whether these gradients are those of a step with every tensor checked, by plans of its own.

    On a GPU a product in BF16 sums in another order than one in FP8, so there types must agree to compare.
    """
    types = _dgrad_types(layers)
    known = carrier_groups._GROUPS, carrier_groups._TABLES, carrier_groups._DEFERRED
    carrier_groups._GROUPS, carrier_groups._TABLES, carrier_groups._DEFERRED = {}, {}, set()
    try:
        expected = _backward_step(m, layers, smallest)[1]
        comparable = DEVICE == "cpu" or types == _dgrad_types(layers)
        return not comparable or all(map(torch.equal, found, expected))
    finally:
        carrier_groups._GROUPS, carrier_groups._TABLES, carrier_groups._DEFERRED = known


def _dgrad_types(layers) -> list[str]:
    return [carrier_groups.group([n.producer], n.spec, n.weight.device).plan.kinds[DY_ROW] for n in layers]


def test_layers_beside_one_that_left_fp8_stay_and_stay_exact():
    """Their references on the device must be those that their products are multiplied by."""
    m = model("mxfp4_sr")
    layers = [block.mlp.down_proj for block in m.model.layers]
    carrier.defer(m)
    for spans in ([1.0, 1.0], [1.0, 2.0**-8]):
        assert _backward_step(m, layers, spans)[0]
    wide = [2.0**-40, 2.0**-8]
    assert not _backward_step(m, layers, wide)[0] and _backward_step(m, layers, wide)[0]
    assert _dgrad_types(layers) == ["bf16", "e5m2"]
    exact, found = _backward_step(m, layers, wide)
    assert exact and _as_checked(m, layers, wide, found)
    for g in carrier_groups.groups(m):
        assert g.state[:, 0].tolist() == g.plan.refs
        table = carrier_groups._table(g.device)
        assert table.limits[g.first : g.first + 6].tolist() == [list(pair) for pair in g.limits()]


def test_types_that_leave_and_return_give_the_same_gradients():
    """Dgrad in BF16 has W's columns to itself; back in FP8 it shares the rows' encoding again."""
    m = model("mxfp4_sr")
    layers = [m.model.layers[0].mlp.down_proj]
    carrier.defer(m)
    types = []
    for small, turns in ((1.0, 0), (2.0**-40, 0), (2.0**-3, 1), (2.0**-3, 1)):
        for _ in range(turns):
            carrier.turn(m)
            carrier.encode_weights(m)
            assert _backward_step(m, layers, [small])[0]
        exact, found = _backward_step(m, layers, [small])
        if not exact:
            exact, found = _backward_step(m, layers, [small])
        assert exact and _as_checked(m, layers, [small], found)
        types += _dgrad_types(layers)
    assert types == ["e5m2", "bf16", "bf16", "e5m2"]


def test_a_new_window_forgives_no_misfit():
    """Encodings made since the last step may not have fitted."""
    layer, x = one_linear(model("mxfp4_sr"))
    carrier.defer(layer)
    _micro_steps(layer, x, (2.0**-40,))
    assert _dgrad_types([layer]) == ["bf16"]
    for _ in range(2):
        carrier.turn(layer)
        _micro_steps(layer, x, (1.0,))
    with torch.no_grad():
        layer.weight.mul_(2.0**-30)
        layer(x, state())  # a validation, say
    carrier.turn(layer)
    assert _dgrad_types([layer]) == ["e5m2"]
    assert {m.view for m in carrier.misfits(layer)} >= {"w_row"}


def test_infinite_gradients_are_infinite_in_bf16():
    """So a run that diverges ends with its loss, not with a carrier's error."""
    layer, x = one_linear(model("mxfp4_sr"))
    carrier.defer(layer)
    _micro_steps(layer, x, (1.0,))
    for _ in range(2):
        y = layer(x.clone().requires_grad_(), state())
        dy = torch.ones_like(y)
        dy[3, 5] = float("nan")
        dw = torch.autograd.grad(y, [layer.weight], dy)[0]
        exact = not carrier.misfits(layer)
    assert exact and dw[5].isnan().all()
    assert not _micro_steps(layer, x, (1.0,))
