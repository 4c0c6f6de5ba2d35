"""Packed codes, scale bytes and outer scales of every format and view equal the reference's, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fp4core import formats
from fp4core.kernels._launch import interpreted
from fp4core.kernels.codes import quantize_codes
from fp4core.reference import casts
from fp4core.reference import quantize as reference
from fp4core.reference.philox import SRKey

DEVICE = "cpu" if interpreted() else "cuda"
GOLDEN = Path(__file__).parents[1] / "golden"
SHAPES = [(75, 100)] if interpreted() else [(64, 128), (75, 100), (33, 47), (300, 500), (1, 1), (130, 16)]


def by_reference(
    x: torch.Tensor, fmt: formats.Format, axis: int, **options: object
) -> tuple[torch.Tensor, ...]:
    q = reference.quantize_2d(x, fmt, axis=axis, **options)
    codes, scale = casts.e2m1_codes(q.values), q.scales.byte
    if axis == 0:
        codes, scale = codes.mT, scale.mT
    return reference.pack(codes.contiguous()), scale, q.scales.outer


def inputs(shape: tuple[int, int], kind: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=g) * torch.exp(2 * torch.randn(shape[0], 1, generator=g))
    if kind == "awkward" and shape[0] > 32:
        x[3] = 0.0
        x[5] = -0.0
        x[7, 3 % shape[1]] = -1e-30
        x[9] = 3e38
        x[11] = 1e-39
        x[20:30, shape[1] // 2 :] = 0.0
    if kind == "nonfinite":
        x[-1, -1] = float("nan")
        x[0, 0] = float("inf")
    return x


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("axis", [1, 0], ids=["row", "col"])
@pytest.mark.parametrize("name", formats.names())
def test_codes_equal_the_reference(name: str, axis: int, shape: tuple[int, int]) -> None:
    fmt = formats.get(name)
    key = SRKey((1 << 63) + 5, 3, 9, 12345)
    cases = [("awkward", None, None), ("awkward", None, key)]
    if not interpreted():
        cases += [("normal", None, key), ("nonfinite", None, None)]
    if not fmt.two_d:
        cases += (
            [("awkward", "fixed32", key)]
            if interpreted()
            else [("normal", h, None) for h in ("plain16", "fixed32")]
        )
    for kind, hadamard, sr in cases:
        held = torch.tensor(3.0) if fmt.sampled_amax and sr is not None else None
        x = inputs(shape, kind)
        options = {"hadamard": hadamard, "key": sr, "held_amax": held}
        got = quantize_codes(x.to(DEVICE), fmt, axis=axis, **options)
        want = by_reference(x, fmt, axis, **options)
        for part, a, b in zip(("codes", "scales", "outer"), got, want):
            a = a.cpu()
            assert a.shape == b.shape, f"{part} of {kind} {hadamard}"
            equal = torch.equal(a, b) or torch.equal(a.float().nan_to_num(-1), b.float().nan_to_num(-1))
            assert equal, f"{part} of {kind}, hadamard {hadamard}, key {sr}: {int((a != b).sum())} differ"


@pytest.mark.parametrize(
    "path",
    sorted(GOLDEN.rglob("mxfp4_report_1x32.normal.npz"))[:1]
    if interpreted()
    else sorted(GOLDEN.rglob("*.npz")),
    ids=lambda p: p.stem,
)
def test_golden_bytes(path: Path) -> None:
    """Bytes of the independent sources, straight from the kernels."""
    prefixes = {
        "mxfp4_report_1x32": "mxfp4",
        "mxfp4_report_32x32": "mxfp4_w2d",
        "mxfp4_floor_1x32": "mxfp4_ocp",
        "mxfp4_rceil_1x32": "mxfp4_rceil",
        "mxfp4_even_1x32": "mxfp4_even",
        "nvfp4_decode_1x16": "nvfp4_te",
        "nvfp4_decode_16x16": "nvfp4_te_w2d",
        "nvfp4_encode_1x16": "nvfp4",
        "nvfp4_encode_16x16": "nvfp4_w2d",
        "nvfp4_cta_1x16": "nvfp4_cta",
        "nvfp4_cta_weight_16x16": "nvfp4_cta_w2d",
    }
    name = prefixes.get(path.name.split(".")[0])
    if name is None:
        pytest.skip(f"{path.name} is not a file of codes and scales of one view")
    with np.load(path, allow_pickle=False) as file:
        x = torch.from_numpy(file["x"].astype(np.int32) << 16).view(torch.float32)
        codes, scale = torch.from_numpy(file["codes"]), torch.from_numpy(file["scale"])
    got_codes, got_scale, _ = quantize_codes(x.to(DEVICE), formats.get(name))
    assert torch.equal(reference.unpack(got_codes.cpu(), x.shape[1]), codes)
    # Transformer Engine's reference repeats a tile's scale for each of its rows
    assert torch.equal(got_scale.cpu(), scale[:: scale.shape[0] // got_scale.shape[0]])
