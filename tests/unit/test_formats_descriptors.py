"""Format descriptors: complete, frozen, free of torch, with helpful errors."""

import dataclasses
import subprocess
import sys

import pytest

from fp4core import formats

MX = ["mxfp4", "mxfp4_w2d", "mxfp4_decode", "mxfp4_ocp", "mxfp4_rceil", "mxfp4_even"]
NV = ["nvfp4_te", "nvfp4_te_w2d", "nvfp4", "nvfp4_w2d", "nvfp4_cta", "nvfp4_cta_w2d"]
NAMES = [*MX, *NV, "ue5m3", "ue5m3_w2d"]


def test_names():
    assert list(formats.names()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_descriptor_is_complete(name):
    fmt = formats.get(name)
    assert fmt.name == name and formats.get(fmt) is fmt
    assert fmt.two_d == name.endswith("_w2d") == (fmt.block_rows == fmt.block_cols)
    assert fmt.block_cols == (32 if fmt.block_scale == "e8m0" else 16)
    assert (fmt.outer == "constant") == (fmt.outer_constant is not None) == (fmt.outer_divisor is None)
    assert (fmt.outer == "stripe") == (fmt.stripe_rows is not None)
    assert fmt.rule and fmt.outer_rule and fmt.source
    assert fmt.bits_per_value == 4 + 8 / (fmt.block_rows * fmt.block_cols)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.block_rows = 2


@pytest.mark.parametrize(
    ("wrong", "near"), [("mxpf4", "mxfp4"), ("nvfp4_w2", "nvfp4_w2d"), ("UE5M3", "ue5m3")]
)
def test_unknown_name_suggests_the_nearest(wrong, near):
    with pytest.raises(ValueError, match=f"unknown format '{wrong}'; did you mean '{near}'"):
        formats.get(wrong)


def test_bf16_is_not_a_format():
    with pytest.raises(ValueError, match="Known formats: mxfp4, "):
        formats.get("bf16")


def test_no_torch():
    code = "import sys, fp4core.formats; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
