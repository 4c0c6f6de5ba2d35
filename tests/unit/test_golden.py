"""Codes, scales and outer scales against bytes computed by other code; see tests/golden/formats/README.md."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fp4core
from fp4core.ops import fake_quant
from fp4core.recipe import Operand
from fp4core.reference import casts

GOLDEN = Path(__file__).parents[1] / "golden" / "formats"
FORMAT = {
    "mxfp4_floor_1x32": "mxfp4_ocp",
    "mxfp4_rceil_1x32": "mxfp4_rceil",
    "mxfp4_even_1x32": "mxfp4_even",
    "mxfp4_report_1x32": "mxfp4",
    "mxfp4_report_32x32": "mxfp4_w2d",
    "nvfp4_decode_1x16": "nvfp4_te",
    "nvfp4_decode_16x16": "nvfp4_te_w2d",
    "nvfp4_decode_col_rht16": "nvfp4_te",
    "nvfp4_encode_1x16": "nvfp4",
    "nvfp4_encode_16x16": "nvfp4_w2d",
    "nvfp4_cta_1x16": "nvfp4_cta",
    "nvfp4_cta_weight_16x16": "nvfp4_cta_w2d",
}
FILES = sorted(p.stem for p in GOLDEN.glob("*.npz"))


def load(stem: str) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    with np.load(GOLDEN / f"{stem}.npz", allow_pickle=False) as file:
        data = dict(file)
    return data, torch.from_numpy(data["x"].view(np.int16)).view(torch.bfloat16)


def test_every_contract_has_vectors():
    assert {stem.split(".")[0] for stem in FILES} == {*FORMAT, "e2m1_cast"}
    assert len(FILES) == 63


@pytest.mark.parametrize("stem", [f for f in FILES if f.startswith("e2m1_cast")])
def test_e2m1_cast(stem):
    data, x = load(stem)
    codes = casts.e2m1_codes(casts.e2m1_nearest_(x.float()))
    np.testing.assert_array_equal(codes.numpy(), data["codes"])


@pytest.mark.parametrize("stem", [f for f in FILES if not f.startswith("e2m1_cast")])
def test_bytes(stem):
    data, x = load(stem)
    contract = stem.split(".")[0]
    columns = contract.endswith("col_rht16")
    suffix = "_T" if columns else ""
    hadamard = "fixed16" if columns else "none"
    q = fp4core.quantize(x, FORMAT[contract], hadamard=hadamard, transposed=columns)

    np.testing.assert_array_equal(q.unpack().numpy(), data[f"codes{suffix}"])
    scale = q.block_scale.numpy()
    if contract == "nvfp4_decode_16x16":  # the source repeats a tile's byte over its rows
        scale = np.repeat(scale, 16, axis=0)
    np.testing.assert_array_equal(scale, data[f"scale{suffix}"])
    if "outer" in data:
        np.testing.assert_array_equal(q.outer_scale.numpy(), data["outer"])
    for amax in {"amax", "amax_col"} & data.keys():
        np.testing.assert_array_equal(q.outer_scale.numpy(), (data[amax] / np.float32(2688)).reshape(()))
    if "dequant" in data:
        # FP64 dequant of the MX vectors is code x scale / 6: our FP32 value is that, rounded once
        np.testing.assert_array_equal(q.dequantize().numpy(), data["dequant"].astype(np.float32))

    operand = Operand(FORMAT[contract], "nearest", hadamard)
    fake = fake_quant(x, operand, transposed=columns)
    assert torch.equal(fake.contiguous().view(torch.int32), q.dequantize().view(torch.int32))
