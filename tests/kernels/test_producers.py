"""Producers against the reference, bit for bit: every format, view, rounding and rotation the routes use.

On a GPU the packed PTX path runs on all inputs and shapes; without one the interpreter runs the portable path
on a few. Outputs are slices of NaN-filled buffers, whose surroundings must stay as they were.
"""

from __future__ import annotations

import pytest
import torch

from fp4core import formats
from fp4core.kernels import producers as p
from fp4core.kernels._launch import interpreted
from fp4core.reference import quantize as reference
from fp4core.reference.philox import SRKey

DEVICE = "cpu" if interpreted() else "cuda"
SEED, STEP, TOKEN, PRODUCER = 0x1234_5678_9ABC_DEF0, 17, 96, 41
V = p.View

PAIRS = {
    "mx_e5m2_e4m3": (V("mxfp4", "e5m2"), V("mxfp4", "e4m3")),
    "mx_sr_h32": (V("mxfp4", "e5m2", "stochastic"), V("mxfp4", "e5m2", hadamard="fixed32")),
    "mx_e4m3_sr_h16": (V("mxfp4", "e4m3", "stochastic"), V("mxfp4", "e4m3", hadamard="plain16")),
    "mx_bf16_sr": (V("mxfp4", rounding="stochastic"), V("mxfp4", hadamard="fixed16", transposed=False)),
    "mx_w2d": (V("mxfp4_w2d", "e4m3"), V("mxfp4_w2d", "e4m3")),
    "mx_w2d_bf16": (V("mxfp4_w2d"), V("mxfp4_w2d", transposed=False)),
    "decode": (V("mxfp4_decode", "e5m2", "stochastic"), V("mxfp4_decode", "e4m3")),
    "ocp": (V("mxfp4_ocp", "e5m2"), V("mxfp4_ocp")),
    "rceil": (V("mxfp4_rceil", "e5m2", "stochastic"), V("mxfp4_rceil")),
    "even": (V("mxfp4_even", "e4m3"), V("mxfp4_even", "e5m2")),
    "nvfp4": (V("nvfp4"), V("nvfp4")),
    "nvfp4_sr_h16": (V("nvfp4", rounding="stochastic"), V("nvfp4", hadamard="fixed16", transposed=False)),
    "nvfp4_w2d": (V("nvfp4_w2d"), V("nvfp4_w2d")),
    "cta": (V("nvfp4_cta", rounding="stochastic"), V("nvfp4_cta", hadamard="fixed16")),
    "cta_w2d": (V("nvfp4_cta_w2d"), V("nvfp4_cta_w2d", transposed=False)),
    "operand_dy": (V("nvfp4_cta", rounding="stochastic"), V("mxfp4", "e5m2", hadamard="fixed32")),
    "operand_w": (V("mxfp4_w2d", "e4m3"), V("nvfp4_cta_w2d")),
    "te": (
        V("nvfp4_te", rounding="stochastic"),
        V("nvfp4_te", rounding="stochastic", hadamard="fixed16", transposed=False),
    ),
    "te_w2d": (V("nvfp4_te_w2d"), None),
    "ue5m3": (V("ue5m3", rounding="stochastic"), V("ue5m3", rounding="stochastic")),
    "ue5m3_w2d": (None, V("ue5m3_w2d")),
}
FEW = (
    "mx_e5m2_e4m3",
    "mx_sr_h32",
    "mx_w2d",
    "nvfp4_sr_h16",
    "cta",
    "operand_w",
    "te",
    "ue5m3",
    "ocp",
    "even",
)
SHAPES = [(256, 384), (96, 160), (75, 80)]


def make(kind: str, shape: tuple[int, int]) -> torch.Tensor:
    """Named inputs; FP32 values, BF16-representable or not."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(shape, generator=g)
    if kind == "normal":
        x *= torch.exp(torch.randn(shape[1], generator=g))
    elif kind == "heavy":
        x *= torch.exp(3 * torch.randn(shape, generator=g))
    elif kind == "ties":
        x = torch.randint(-24, 25, shape, generator=g) * 0.25
    elif kind == "tiny":
        x *= 1e-30
    elif kind == "huge":
        x *= 1e32
    elif kind == "holes":
        x[::3, : shape[1] // 2] = 0.0
        x[:, 5] = -0.0
        x[32:64] = 0.0
    elif kind == "zeros":
        x *= 0
    elif kind == "nonfinite":
        x[3, 7], x[40, 33], x[70, 2] = float("nan"), float("inf"), -float("inf")
    return x


def decoded(
    x: torch.Tensor, view: p.View, where: str, key: SRKey
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(code x block scale in the view's orientation, outer, scale bytes) by the reference."""
    fmt = formats.get(view.format)
    q = reference.quantize_2d(
        x,
        fmt,
        axis=1 if where == "row" else 0,
        hadamard=view.hadamard,
        key=key if view.rounding == "stochastic" else None,
    )
    values = reference.decode_blocks_(q.values.double(), q.scales.value.double(), fmt, q.axis)
    return values if where == "row" else values.T, q.scales.outer, q.scales.byte


def poisoned(
    view: p.View | None, where: str, shape: tuple[int, int]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(whole buffer, slice to write) with a guard zone of 16 columns and 4 rows around the slice."""
    if view is None:
        return None, None
    rows, cols = (-(-n // 32) * 32 for n in shape)
    if where == "col" and view.transposed:
        rows, cols = cols, rows
    size = torch.empty(0, dtype=p.CARRIERS[view.carrier]).element_size()
    whole = torch.full((rows + 8, cols + 32), 0x7F, dtype=torch.uint8, device=DEVICE)
    whole = (
        whole if size == 1 else torch.full((rows + 8, cols + 32), 0x7FF1, dtype=torch.int16, device=DEVICE)
    )
    whole = whole.view(p.CARRIERS[view.carrier])
    return whole, whole[4 : rows + 4, 16 : cols + 16]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int16)


def check(kind: str, shape: tuple[int, int], pair: str, fp32: bool) -> None:
    row, col = PAIRS[pair]
    x = make(kind, shape)
    x = x if fp32 else x.to(torch.bfloat16)
    finite = torch.nan_to_num(x.float(), 0, 0, 0).abs().amax().clamp(min=1e-38)
    top = int(torch.frexp(finite).exponent)
    sr = p.SR(torch.tensor([SEED, STEP, TOKEN], dtype=torch.int64, device=DEVICE), PRODUCER, PRODUCER + 1)
    kwargs, buffers = {}, {}
    for where, view in (("row", row), ("col", col)):
        if view is not None and p.is_mx(view.format):
            ref = 0 if view.carrier == "bf16" else max(top - {"e5m2": 8, "e4m3": 3}[view.carrier], -90)
            kwargs[f"{where}_state"] = p.new_state(1, DEVICE, ref)[0]
        buffers[where], kwargs[f"{where}_out"] = poisoned(view, where, shape)
    before = {k: None if b is None else bits(b).clone() for k, b in buffers.items()}
    made = p.produce(x.to(DEVICE), row, col, sr=sr, **kwargs)
    shared = (
        row is not None
        and col is not None
        and made[0].state is made[1].state
        and formats.get(row.format).two_d
    )
    for where, view, out, producer in (("row", row, made[0], PRODUCER), ("col", col, made[1], PRODUCER + 1)):
        if view is None:
            continue
        want, outer, byte = decoded(x, view, where, SRKey(SEED, STEP, producer, TOKEN * shape[1]))
        whole, start = buffers[where], before[where].clone()
        inner = whole[4:-4, 16:-16]
        start[4:-4, 16:-16] = bits(inner)
        assert torch.equal(start, bits(whole)), f"{where}: wrote outside its output"
        if out.state is not None:
            state = out.state.tolist()
            live = byte[(byte > 0) | (want.new_zeros(()) > 0)].int()
            low, high = p.held_range(view.carrier, state[0])
            out_of_range = bool(((live - 127 < low) | (live - 127 > high)).any()) or bool((byte == 255).any())
            if not shared:
                assert (state[3] > 0) == out_of_range or kind in ("tiny", "huge"), f"{where}: misfits {state}"
            if state[3]:
                continue  # counted, so nobody reads it
            want = want * 2.0 ** -state[0]
        else:
            got_outer = out.outer.cpu()
            assert torch.equal(got_outer.nan_to_num(-1), outer.reshape(-1).nan_to_num(-1)), (
                f"{where}: outer scales"
            )
        data = inner if view.transposed else inner.t()
        got = data[: want.shape[0], : want.shape[1]].double().cpu()
        same = (got == want) | (got.isnan() & want.isnan())
        assert same.all(), f"{where}: {int((~same).sum())} of {same.numel()} values differ"
        if kind != "nonfinite":  # a NaN amax makes its padding NaN too, as it makes everything under it
            padding = data.double().cpu()
            assert not padding[want.shape[0] :].any(), f"{where}: padding rows"
            assert not padding[:, want.shape[1] :].any(), f"{where}: padding columns"


if interpreted():
    GRID = [("normal", (64, 160), pair) for pair in FEW]
    GRID += [
        ("holes", (75, 80), "mx_sr_h32"),
        ("nonfinite", (75, 80), "nvfp4_sr_h16"),
        ("nonfinite", (75, 80), "cta"),
    ]
    GRID += [("heavy", (64, 96), "mx_e5m2_e4m3"), ("zeros", (64, 96), "te"), ("ties", (64, 96), "mx_w2d")]
else:
    KINDS = ("normal", "heavy", "ties", "tiny", "huge", "holes", "zeros", "nonfinite")
    GRID = [(kind, shape, pair) for pair in PAIRS for shape in SHAPES for kind in KINDS]


@pytest.mark.parametrize(
    ("kind", "shape", "pair"), GRID, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else v
)
def test_views_equal_the_reference(kind: str, shape: tuple[int, int], pair: str) -> None:
    check(kind, shape, pair, fp32=False)


@pytest.mark.parametrize("row_tokens", [0, 8, 16])
@pytest.mark.parametrize("tokens", [16, 32])
def test_every_tile_gives_the_same_bytes(tokens: int, row_tokens: int) -> None:
    x = make("normal", (96, 160)).to(DEVICE, torch.bfloat16)
    sr = p.SR(torch.tensor([SEED, STEP, TOKEN], dtype=torch.int64, device=DEVICE), PRODUCER)
    views = V("nvfp4_cta", rounding="stochastic"), V("nvfp4", hadamard="fixed16")
    first = p.produce(x, *views, sr=sr)
    again = p.produce(x, *views, sr=sr, tile=p.Tile(tokens=tokens, row_tokens=row_tokens % tokens))
    for a, b in zip(first, again):
        assert torch.equal(a.data.view(torch.int16), b.data.view(torch.int16))


@pytest.mark.parametrize("pair", ["mx_w2d", "cta_w2d"])
def test_fp32_input_is_rounded_first(pair: str) -> None:
    check("normal", (96, 160), pair, fp32=True)


@pytest.mark.parametrize("carrier", ["e5m2", "e4m3"])
@pytest.mark.parametrize("ref", [-90, 3])
def test_every_exponent_of_the_range_is_held_edges(carrier: str, ref: int) -> None:
    """Tiles of 32 x 32 at every k from the smallest to the largest: subnormal carriers, subnormal sums."""
    low, high = p.held_range(carrier, ref)
    g = torch.Generator().manual_seed(5)
    tiles = torch.rand(high - low + 1, 32, 32, generator=g).sub_(0.5).mul_(2)
    tiles[:, torch.arange(32), torch.arange(32)] = 1.0  # every row and column of a tile reaches 2^k
    x = (tiles * 2.0 ** torch.arange(low, high + 1)[:, None, None]).transpose(0, 1).reshape(32, -1)
    x = x.to(torch.bfloat16)
    state = p.new_state(2, DEVICE, ref)
    sr = p.SR(torch.tensor([SEED, STEP, TOKEN], dtype=torch.int64, device=DEVICE), PRODUCER)
    views = V("mxfp4", carrier, "stochastic"), V("mxfp4", carrier)
    made = p.produce(x.to(DEVICE), *views, row_state=state[0], col_state=state[1], sr=sr)
    nearest, _ = p.produce(x.to(DEVICE), V("mxfp4", carrier), row_state=state[0])
    assert state[:, 3].tolist() == [0, 0]
    key = SRKey(SEED, STEP, PRODUCER, TOKEN * x.shape[1])
    for out, view, where in (
        (made[0], views[0], "row"),
        (made[1], views[1], "col"),
        (nearest, views[1], "row"),
    ):
        want = decoded(x, view, where, key)[0] * 2.0**-ref
        assert torch.equal(out.data.double().cpu(), want), where


def test_misfit_is_counted_and_remembered() -> None:
    """One block 2^40 above the rest: no FP8 carrier holds both, and the state says what was seen."""
    x = torch.full((64, 64), 1.0).to(torch.bfloat16)
    x[5, 40] = 2.0**40
    state = p.new_state(2, DEVICE, 0)
    p.produce(x.to(DEVICE), V("mxfp4", "e5m2"), V("mxfp4", "e4m3"), row_state=state[0], col_state=state[1])
    for ref, top, low, misfits in state.tolist():
        assert (ref, misfits) == (0, 1)
        assert top == (127 + 40) << 7  # BF16 bits of 2^40
        assert 0x8000 - low == 127 << 7


def test_references_follow_the_maxima_seen() -> None:
    x = (make("normal", (64, 64)) * 2.0**9).to(DEVICE, torch.bfloat16)
    views = V("mxfp4", "e5m2"), V("mxfp4", "e4m3")
    state = p.new_state(2, DEVICE, 0)
    p.produce(x, *views, row_state=state[0], col_state=state[1])
    assert int(state[1, 3]) > 0, "E4M3 at reference 0 cannot hold 2^9"
    p.advance(state, ["e5m2", "e4m3"])
    top = int(torch.frexp(x.abs().amax().float()).exponent)
    assert state.tolist() == [[top + 2 - 13, 0, 0, 0], [top + 2 - 6, 0, 0, 0]]
    p.produce(x, *views, row_state=state[0], col_state=state[1])
    assert state[:, 3].tolist() == [0, 0]
    unseen = p.new_state(1, DEVICE, 5)
    p.advance(unseen, ["e4m3"])
    assert unseen.tolist() == [[5, 0, 0, 0]]


def test_views_that_make_no_sense_are_refused() -> None:
    x = torch.zeros(32, 32, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="needed 'bf16'"):
        p.produce(x, V("nvfp4", "e5m2"))
    with pytest.raises(ValueError, match="without a state"):
        p.produce(x, V("mxfp4", "e5m2"))
    with pytest.raises(ValueError, match="random state"):
        p.produce(x, V("mxfp4", rounding="stochastic"))
    with pytest.raises(ValueError, match="hadamard"):
        p.produce(x, V("mxfp4", hadamard="fixed32"))
    with pytest.raises(ValueError, match="contiguous"):
        p.produce(x.t()[:, :16], V("mxfp4"))
