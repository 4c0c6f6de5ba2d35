"""Format descriptors.

A block is ``block_rows`` x ``block_cols`` values of a two-dimensional view whose *last* axis is the
contraction axis; 1D formats have one row per block, 2D formats square tiles, so that W and its
transpose carry the same codes and scales.

    value = E2M1 code x block_scale x outer_scale

Symbols in the formulas: x a value (already rounded to BF16), amax the largest magnitude of the tensor,
amax_b of the block, amax_c of a 128 x 128 chunk; s the block scale as stored (it multiplies to get
values back); M and S are encode scales (they multiply on the way in). Every operation is FP32 with one
rounding; E4M3(.) and UE5M3(.) round to nearest even and saturate.

Sources: "report" is R. Hu, Format-Aware Fusion for Fast FP4 Pretraining, arXiv 2610.00053.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitude of codes 0..7; bit 3 is the sign
E4M3_MAX = 448.0
UE5M3_MAX = 61440.0

Algorithm = Literal[
    "mx_ceil", "mx_floor", "ocp_floor", "ocp_rceil", "ocp_even", "nv_te", "nv_global", "nv_cta", "ue5m3"
]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One FP4 format.

    Attributes:
        name: the name recipes and ``fp4core.quantize`` use.
        element: four-bit element type, always ``e2m1``.
        block_rows, block_cols: values that share one block scale; columns run along the contraction.
        block_scale: type of the stored one-byte block scale.
        outer: domain of the FP32 outer scale: one ``constant``, one per ``tensor``, one per
            ``stripe`` of ``stripe_rows`` rows.
        algorithm: which scale computation the quantisers run; ``rule`` is the same thing as a formula.
        direction: whether the block scale comes from an encode scale (``encode``: how far to stretch the
            block, rounded so that it fits) or is the rounded decode scale itself (``decode``).
        outer_constant: the outer scale of ``constant`` formats.
        outer_divisor: outer scale = amax of its domain / outer_divisor, for ``tensor`` and ``stripe``.
        chunk: rows and columns of the tile whose amax sets the encode scale, for CTA-local formats.
        stripe_rows: rows under one outer scale, for ``stripe`` formats.
        finer_below: 2D MX tiles take half the scale when amax < finer_below x scale.
        sampled_amax: the tensor amax may be a sampled, held one (``quantize(..., amax=...)``).
        rule, outer_rule, source: for people and tables.
    """

    name: str
    block_rows: int
    block_cols: int
    block_scale: Literal["e8m0", "e4m3", "ue5m3"]
    outer: Literal["constant", "tensor", "stripe"]
    algorithm: Algorithm
    direction: Literal["encode", "decode"]
    rule: str
    outer_rule: str
    source: str
    element: Literal["e2m1"] = "e2m1"
    outer_constant: float | None = None
    outer_divisor: float | None = None
    chunk: tuple[int, int] | None = None
    stripe_rows: int | None = None
    finer_below: float | None = None
    sampled_amax: bool = False

    @property
    def two_d(self) -> bool:
        """True for tile formats, whose codes are the same for W and its transpose."""
        return self.block_rows > 1

    @property
    def block(self) -> tuple[int, int]:
        """``(block_rows, block_cols)``."""
        return self.block_rows, self.block_cols

    @property
    def bits_per_value(self) -> float:
        """Storage in bits per value: four for the code plus the block scale's share."""
        return 4 + 8 / (self.block_rows * self.block_cols)


def _mx(name: str, algorithm: Algorithm, rule: str, source: str, **more: object) -> Format:
    fields: dict = {
        "block_rows": 1,
        "block_cols": 32,
        "block_scale": "e8m0",
        "outer": "constant",
        "outer_constant": 1.0,
        "outer_rule": "1",
        "direction": "decode",
    }
    return Format(name=name, algorithm=algorithm, rule=rule, source=source, **(fields | more))


def _block16(name: str, algorithm: Algorithm, rule: str, source: str, **more: object) -> Format:
    fields: dict = {
        "block_rows": 1,
        "block_cols": 16,
        "block_scale": "e4m3",
        "outer": "tensor",
        "outer_divisor": 2688.0,
        "outer_rule": "amax / 2688",
        "direction": "encode",
    }
    return Format(name=name, algorithm=algorithm, rule=rule, source=source, **(fields | more))


_SIXTH = {"outer_constant": 1 / 6, "outer_rule": "1/6", "direction": "encode"}
_TILE32 = {"block_rows": 32, "block_cols": 32}
_TILE16 = {"block_rows": 16, "block_cols": 16}
_MX_CEIL = "s = 2^ceil(log2 amax_b); q = E2M1(6x / s)"
_NV_TE = (
    "S = min(2688 / amax, FLT_MAX); s = E4M3(min(amax_b (S (1/6)), FLT_MAX)); "
    "q = E2M1(x min(1 / (s (1/S)), FLT_MAX))"
)
_NV_GLOBAL = "S = 2688 / amax; M = E4M3(6 / (amax_b S)); s = E4M3(1 / M); q = E2M1(x (M S))"
_NV_CTA = (
    "per chunk S = 448 / amax_c, g = amax_c / 448; M = E4M3(6 / (amax_b S)); s0 = E4M3(1 / M); "
    "q = E2M1(x (M S)); s = E4M3(s0 g / outer)"
)
_UE5M3 = (
    "g = tensor amax, sampled and held; s = UE5M3(448 amax_b / g), zero becomes 1; q = E2M1(x / (s outer))"
)
_OCP = "OCP Microscaling Formats 1.0; bytes of pytorch/ao to_mx"
_TE = "Transformer Engine NVFP4BlockScaling; bytes of its reference_nvfp4"

DESCRIPTORS: tuple[Format, ...] = (
    _mx("mxfp4", "mx_ceil", _MX_CEIL, "report section 2.2.1", **_SIXTH),
    _mx(
        "mxfp4_w2d",
        "mx_ceil",
        _MX_CEIL + "; s / 2 when amax_b < 0.87 s",
        "report sections 2.2.1 and 2.4",
        finer_below=0.87,
        **_SIXTH,
        **_TILE32,
    ),
    _mx(
        "mxfp4_decode",
        "mx_floor",
        "s = 2^floor(log2 amax_b); q = E2M1(6x / s)",
        "report section 2.2.1, the finer choice",
        **(_SIXTH | {"direction": "decode"}),
    ),
    _mx("mxfp4_ocp", "ocp_floor", "s = 2^(floor(log2 amax_b) - 2); q = E2M1(x / s)", f"{_OCP} floor"),
    _mx("mxfp4_rceil", "ocp_rceil", "s = 2^ceil(log2(amax_b / 6)); q = E2M1(x / s)", f"{_OCP} rceil"),
    _mx(
        "mxfp4_even",
        "ocp_even",
        "s = 2^(floor(log2 r) - 2), r = amax_b rounded half up to one mantissa bit; q = E2M1(x / s)",
        f"{_OCP} even",
    ),
    _block16("nvfp4_te", "nv_te", _NV_TE, _TE, direction="decode"),
    _block16("nvfp4_te_w2d", "nv_te", _NV_TE, _TE, direction="decode", **_TILE16),
    _block16("nvfp4", "nv_global", _NV_GLOBAL, "report section 2.2.2, custom global NVFP4"),
    _block16("nvfp4_w2d", "nv_global", _NV_GLOBAL, "report sections 2.2.2, 2.4 and A.1", **_TILE16),
    _block16(
        "nvfp4_cta",
        "nv_cta",
        _NV_CTA,
        "report section 2.2.2, CTA-local NVFP4",
        chunk=(128, 128),
        stripe_rows=256,
        outer="stripe",
        outer_divisor=448.0,
        outer_rule="amax of 256 rows / 448, over all of K",
    ),
    _block16(
        "nvfp4_cta_w2d",
        "nv_cta",
        _NV_CTA + "; positive s floored at 2^-9",
        "report sections 2.2.2 and 2.4",
        chunk=(128, 128),
        outer_divisor=448.0,
        outer_rule="amax / 448",
        **_TILE16,
    ),
    _block16(
        "ue5m3",
        "ue5m3",
        _UE5M3,
        "UE5M3 FP4 block scaling, cited as [25] in report section 7",
        block_scale="ue5m3",
        direction="decode",
        outer_rule="g / (448 x 6)",
        sampled_amax=True,
    ),
    _block16(
        "ue5m3_w2d",
        "ue5m3",
        _UE5M3,
        "UE5M3 FP4 block scaling, cited as [25] in report section 7",
        block_scale="ue5m3",
        direction="decode",
        outer_rule="g / (448 x 6)",
        sampled_amax=True,
        **_TILE16,
    ),
)
