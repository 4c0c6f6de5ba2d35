"""Producers: one BF16 load, every view its consumers need.

``produce(x, row=..., col=...)`` reads a BF16 matrix [M, K] once and writes

    row view   [M, K]   blocks along K     the operand of a contraction over K
    col view   [K, M]   blocks along M     transposed, the operand of a contraction over M

in *carriers*: the decoded block values E2M1 x block scale in the narrowest type that holds them exactly, E5M2 or
E4M3 after a power-of-two reference (MX formats), BF16 (all formats). Outer scales stay outside:

    decoded value = carrier x 2^ref x outer        (2^ref only for MX formats; outer 1/6, 1, or FP32 on the device)

Nothing is rounded a second time. A block that does not fit its FP8 carrier is counted in the view's state
(``misfits``) and its bytes are unspecified; the caller checks the counter before it trusts the step and
produces wider carriers instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4core import formats
from fp4core.kernels.tiles import (
    load_words,
    load_words_masked,
    store_columns,
    store_rows,
    store_rows_masked,
)
from fp4core.kernels.views import (
    column_mx,
    column_nv,
    finish_column,
    finish_row,
    random_words,
    row_mx,
    row_nv,
    square_mx,
    square_nv,
)

CARRIERS = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}
STATE_WORDS = 4  # reference exponent, largest maximum, 0x8000 - smallest, misfits


@dataclass(frozen=True)
class View:
    """What a view should hold.

    Attributes:
        format: format name; a 2D format must be the same in both views.
        carrier: "e5m2", "e4m3" (MX formats only) or "bf16".
        rounding: "nearest" or "stochastic" (row views of 1D formats).
        hadamard: "none", "plain16", "fixed16", "fixed32" (column views of 1D formats).
    """

    format: str
    carrier: str = "bf16"
    rounding: str = "nearest"
    hadamard: str = "none"


@dataclass(frozen=True)
class SR:
    """Random state of a stochastic view: ``state`` int64 [3] on the device (seed, step, global index of the
    first token), ``producer`` the producer id."""

    state: Tensor
    producer: int


def new_state(views: int, device: torch.device | str, ref: int = 0) -> Tensor:
    """int32 [views, 4] states of MX views, all with reference exponent ``ref``."""
    state = torch.zeros(views, STATE_WORDS, dtype=torch.int32, device=device)
    state[:, 0] = ref
    return state


def rule(name: str) -> str:
    """Kernel name of a format's scale rule (``mx`` rules; ``mx_finer`` is the 2D MX rule)."""
    fmt = formats.get(name)
    return "mx_finer" if fmt.finer_below is not None else fmt.algorithm


def is_mx(name: str) -> bool:
    """True for formats with power-of-two block scales, the ones FP8 carriers can hold."""
    return formats.get(name).block_scale == "e8m0"
