"""``tl.dot_scaled`` for the Triton interpreter, which lacks it: E2M1 operands, E8M0 or E4M3 scales.

Decodes both operands in FP64, where every code x scale is exact, multiplies there, and adds to the FP32
accumulator once. E8M0 byte 0 is 2^-127 and 255 NaN, as in the hardware's and the reference's definition
(Triton's emulation on GPUs without FP4 units decodes them as 0 and infinity). Importing this module
installs it; compiled kernels never see it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = np.concatenate([_E2M1, -_E2M1])


def _e8m0(byte: np.ndarray) -> np.ndarray:
    return np.where(byte == 255, np.nan, np.exp2(byte.astype(np.float64) - 127))


def _e4m3(byte: np.ndarray) -> np.ndarray:
    b = byte.astype(np.int64)
    exponent, mantissa = (b >> 3) & 15, b & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent - 10.0))
    value = np.where((b & 0x7F) == 0x7F, np.nan, value)
    return np.where(b & 0x80, -value, value)


def _decode(packed: np.ndarray, scale: TensorHandle) -> np.ndarray:
    """FP64 [R, K] of packed codes [R, K / 2] and scales [R, K / vec]."""
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(packed.shape[0], -1)
    kind = _e8m0 if scale.dtype.scalar == tl.uint8 else _e4m3
    scales = kind(scale.data.view(np.uint8))
    return _VALUES[codes] * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


def _dot_scaled(
    self: Any,
    lhs: TensorHandle,
    lhs_scale: TensorHandle,
    lhs_format: Any,
    rhs: TensorHandle,
    rhs_scale: TensorHandle,
    rhs_format: Any,
    fast_math: bool,
    lhs_k_pack: bool,
    rhs_k_pack: bool,
    acc: TensorHandle,
) -> TensorHandle:
    if not (lhs_k_pack and rhs_k_pack and lhs_scale is not None and rhs_scale is not None):
        raise NotImplementedError("interpreted dot_scaled takes scaled E2M1 operands packed along K")
    a = _decode(lhs.data, lhs_scale)
    b = _decode(np.ascontiguousarray(rhs.data.T), rhs_scale)
    return TensorHandle((a @ b.T + acc.data).astype(np.float32), tl.float32)


if not hasattr(InterpreterBuilder, "create_dot_scaled"):
    InterpreterBuilder.create_dot_scaled = _dot_scaled
