"""Sampled and held maxima: the schedule, the scale target, what is shared, what a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fp4core
from fp4core.model.build import build_model
from fp4core.ops import held
from fp4core.ops import spec as specs
from fp4core.ops.quantize import quantize
from fp4core.recipe import ModelConfig, Operand, RopeConfig, load_recipe
from fp4core.reference import casts
from fp4core.train.engine import set_determinism

UE5M3 = Operand("ue5m3")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there the carriers hold the same references


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are tiny: threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sampled(
    table: held.HeldAmax, step: int, *tensors: torch.Tensor, row: int = 0, column: int = held.X
) -> list:
    """References of tensors, one micro-batch each, in one step."""
    table.begin(step)
    found = [float(table.reference(x.bfloat16(), row, column, 1.0)) for x in tensors]
    table.finish()
    return found


def test_steps_1_51_101_sample_and_the_others_hold() -> None:
    table = held.HeldAmax(1, 50)
    seen = {step: sampled(table, step, torch.tensor([float(step)]))[0] for step in range(1, 103)}
    bf16 = {step: float(torch.tensor(float(step)).bfloat16()) for step in seen}
    assert all(seen[step] == bf16[1 + (step - 1) // 50 * 50] for step in seen)


def test_a_sampling_step_uses_each_tensors_own_and_holds_the_largest() -> None:
    table = held.HeldAmax(1, 2)
    assert sampled(table, 1, torch.tensor([-3.0]), torch.tensor([2.0])) == [3.0, 2.0]
    assert sampled(table, 2, torch.tensor([100.0])) == [3.0]
    # begun twice, as a repeated step is: the first attempt leaves nothing behind
    table.begin(3)
    table.reference(torch.tensor([50.0]).bfloat16(), 0, held.X, 1.0)
    assert sampled(table, 3, torch.tensor([4.0])) == [4.0]
    assert sampled(table, 4, torch.tensor([9.0])) == [4.0]


def test_gradients_are_held_in_units_of_one_process() -> None:
    """Two ranks double every loss; a run that goes on in another world size finds the maxima it needs."""
    table = held.HeldAmax(1, 50)
    one, two = torch.tensor([0.75]).bfloat16(), torch.tensor([1.5]).bfloat16()
    table.begin(1, gradient_scale=2)
    assert [float(table.reference(two, 0, column, 1.0)) for column in (held.X, held.DY)] == [1.5, 1.5]
    table.finish()
    assert table.state()["held"] == [[1.5, 0.0, 0.75]]
    for step, scale, dy in ((2, 2, 1.5), (3, 1, 0.75), (4, 8, 6.0)):
        table.begin(step, gradient_scale=scale)
        assert float(table.reference(one, 0, held.DY, 1.0)) == dy
        assert float(table.reference(one, 0, held.X, 1.0)) == 1.5
        table.finish()


def test_ranks_agree_on_the_largest() -> None:
    table = held.HeldAmax(1, 50)
    table.begin(1)
    table.reference(torch.ones(1).bfloat16(), 0, held.DY, 1.0)
    table.finish(lambda values: [max(v, 7.0) for v in values])
    assert table.state()["held"] == [[7.0, 7.0, 7.0]]


def test_nothing_seen_means_each_tensors_own() -> None:
    table = held.HeldAmax(2, 50)
    assert sampled(table, 1, torch.zeros(4)) == [0.0]
    assert sampled(table, 2, torch.tensor([5.0])) == [5.0]
    assert sampled(table, 3, torch.tensor([6.0]), row=1, column=held.W) == [6.0]


def test_state_goes_through_json_exactly() -> None:
    import json

    table, other = held.HeldAmax(2, 50), held.HeldAmax(2, 50)
    sampled(table, 1, torch.tensor([0.1]), row=1, column=held.DY)
    other.load(json.loads(json.dumps(table.state())))
    assert other.state() == table.state()
    assert other.state()["held"][1][held.DY] == float(torch.tensor(0.1).bfloat16())


@pytest.mark.parametrize(
    "state", [{}, {"interval": 20, "held": [[0.0] * 3] * 2}, {"interval": 50, "held": [[0.0] * 3]}]
)
def test_a_foreign_state_is_refused(state: dict) -> None:
    with pytest.raises(ValueError, match="needed 2 rows every 50"):
        held.HeldAmax(2, 50).load(state)


@pytest.mark.parametrize("target", [448.0, 2048.0, 300.0])
def test_scale_target_is_the_block_scale_of_the_largest_block(target: float) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=g).bfloat16()
    op = Operand("ue5m3", scale_target=target)
    amax = held.reference(x, op, specs.encode(load_recipe("ue5m3").for_block(0, 32)), 0, held.DY)
    q = quantize(x, "ue5m3", amax=amax)
    scale = casts.ue5m3_decode(q.block_scale)
    assert float(scale.max()) == float(casts.ue5m3_round(torch.tensor(target))[1])
    # the rule in FP64: s = UE5M3(T amax_b / g), outer = g / (6 T)
    amax_b = x.double().abs().view(64, 4, 16).amax(-1)
    wanted = (target * amax_b / amax_b.max()).float()
    same = casts.ue5m3_round(wanted)[0] == q.block_scale
    # FP32 rounds the reference and the quotient once each: a scale next to a midpoint may fall to either side
    assert same.float().mean() > 0.98
    assert float(q.outer_scale) == pytest.approx(float(amax_b.max()) / (6 * target), rel=2**-22)


def test_spec_carries_target_and_table() -> None:
    recipe = load_recipe("ue5m3").for_block(31, 32, "down")
    assert recipe.wgrad.dy.scale_target == 2048.0
    text = specs.encode(recipe)
    assert "dy=ue5m3:stochastic:none:2048.0" in text and specs.decode(text) == recipe
    assert specs.table(text) is None
    assert specs.table(specs.with_table(text, 7)) == 7
    assert specs.decode(specs.with_table(text, 7)) == recipe


def test_a_maximum_that_is_no_number_is_not_held() -> None:
    table = held.HeldAmax(1, 2)
    assert sampled(table, 1, torch.tensor([3.0])) == [3.0]
    sampled(table, 3, torch.tensor([float("nan"), 1.0]), torch.tensor([2.0]))
    assert table.state()["held"] == [[3.0, 0.0, 0.0]]
    sampled(table, 5, torch.tensor([float("-inf")]))
    assert sampled(table, 6, torch.tensor([100.0])) == [3.0]
    # one rank's NaN is every rank's: what is exchanged orders above all numbers
    table.begin(7)
    table.reference(torch.tensor([float("nan")]).bfloat16(), 0, held.X, 1.0)
    sent = []
    table.finish(lambda values: sent.extend(values) or [max(v, 9.0) for v in values])
    assert sent == [float("inf"), 0.0, 0.0] and table.state()["held"] == [[3.0, 9.0, 9.0]]


def tiny() -> torch.nn.Module:
    rope = RopeConfig(original_max_position=16)
    config = ModelConfig(
        blocks=4, hidden=32, ffn=64, heads=2, kv_heads=1, head_dim=16, vocab=64, max_position=32, rope=rope
    )
    return build_model(config, "ue5m3")


def test_only_late_down_projections_have_the_larger_target() -> None:
    model = tiny()
    targets = {
        name: layer.recipe.wgrad.dy.scale_target
        for name, layer in model.named_modules()
        if isinstance(layer, fp4core.Linear)
    }
    assert {name for name, target in targets.items() if target} == {"model.layers.3.mlp.down_proj"}
    late = load_recipe("ue5m3")
    assert [i for i in range(32) if late.for_block(i, 32, "down").wgrad.dy.scale_target] == [
        27,
        28,
        29,
        30,
        31,
    ]
    assert all(late.for_block(i, 32, "up").wgrad.dy.scale_target is None for i in range(32))


def test_a_model_holds_what_its_layers_saw_and_keeps_its_state_dict() -> None:
    model = tiny()
    assert not [name for name in model.state_dict() if "amax" in name]
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))

    def loss(step: int) -> float:
        model.zero_grad()
        model.held_amax.begin(step)
        total = model(tokens[:, :-1], tokens[:, 1:]).sum()
        total.backward()
        model.held_amax.finish()
        return float(total)

    first = loss(1)
    rows = torch.tensor(model.held_amax.state()["held"]).view(4, specs.LINEARS, 3)
    assert (rows[:, :7] > 0).all() and not rows[:, 7].any()
    assert torch.equal(rows[:, 0, held.X], rows[:, 1, held.X]) and torch.equal(rows[:, 4, 0], rows[:, 5, 0])
    assert float(rows[0, 0, held.W]) == float(model.blocks[0].self_attn.q_proj.weight.bfloat16().abs().max())
    assert loss(2) == first  # the same numbers: held is what was sampled
    model.held_amax.load({**model.held_amax.state(), "held": (rows.view(-1, 3) * 3).tolist()})
    assert loss(2) != first
    assert loss(51) == first


def trained(steps: range, policy: str, start: dict | None = None) -> tuple[list[float], dict]:
    """Losses of some steps of two micro-batches by plain descent, and what a checkpoint would keep."""
    rope = RopeConfig(original_max_position=16)
    config = ModelConfig(
        blocks=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=64, max_position=32, rope=rope
    )
    model = build_model(config, "ue5m3", DEVICE, activation_checkpoint=policy)
    model.held_amax.interval = 3
    if start is not None:
        model.load_state_dict(start["weights"])
        model.held_amax.load(start["held"])
    tokens = torch.randint(0, 64, (8, 2, 1, 17), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    losses = []
    for step in steps:
        model.zero_grad()
        model.held_amax.begin(step)
        for number, batch in enumerate(tokens[step]):
            fp4core.set_sr_state(model, seed=5, step=step, token_offset=16 * number)
            loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()).sum()
            loss.backward()
            losses.append(float(loss.detach()))
        model.held_amax.finish()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, {"weights": weights, "held": model.held_amax.state()}


@pytest.fixture
def exact() -> Iterator[None]:
    """The trainer's own settings on a GPU, where attention would sum its gradients in any order."""
    if DEVICE == "cpu":
        yield
        return
    threads, fill = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory
    set_determinism(1, exact=True)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_resume_is_bit_equal_with_and_without_recomputation(policy: str) -> None:
    """Samples at steps 1 and 4; stopped after 2, between them, and after 4, on one."""
    losses, end = trained(range(1, 7), policy)
    first, middle = trained(range(1, 3), policy)
    second, late = trained(range(3, 5), policy, middle)
    third, resumed = trained(range(5, 7), policy, late)
    assert first + second + third == losses
    assert resumed["held"] == end["held"] != middle["held"]
    assert all(torch.equal(resumed["weights"][name], value) for name, value in end["weights"].items())
    # the held maxima matter: without them the resumed run takes another way
    forgotten = {**middle, "held": {**middle["held"], "held": [[0.0] * 3] * 16}}
    assert trained(range(3, 4), policy, forgotten)[0] != second[:2]


@pytest.mark.usefixtures("exact")
def test_recomputation_changes_no_number() -> None:
    (plain, end), (again, other) = trained(range(1, 5), "none"), trained(range(1, 5), "full")
    assert plain == again and end["held"] == other["held"]


def test_two_models_do_not_share_a_table() -> None:
    one, two = tiny(), tiny()
    assert one.held_amax.number != two.held_amax.number
    assert one.blocks[0].self_attn.q_proj.spec != two.blocks[0].self_attn.q_proj.spec
    fp4core.convert(one, "mxfp4_sr")
    assert held.held_amax(one) is None
