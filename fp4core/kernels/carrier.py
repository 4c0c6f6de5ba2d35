"""The ``carrier`` backend: what ``fp4core.quantize`` and ``fp4core.matmul`` call on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4core import formats
from fp4core.kernels.codes import quantize_codes as quantize
from fp4core.kernels.gemm import bf16_gemm

__all__ = ["matmul", "quantize"]

_SPAN = 100  # exponents on either side of zero that BF16 carriers and FP32 sums hold with room to spare


def _carrier(q: Any) -> tuple[Tensor, float]:
    """BF16 matrix of code x block scale (divided by a power of two) and what is left to multiply by."""
    fmt = formats.get(q.format)
    if fmt.outer != "constant":
        return q.decode_blocks().to(torch.bfloat16), 1.0
    live = q.block_scale[(q.block_scale > 0) & (q.block_scale < 255)]
    low, high = (int(live.min()), int(live.max())) if live.numel() else (127, 127)
    if high - low > 2 * _SPAN:
        raise ValueError(
            f"matmul: got {q.format} block scales from 2^{low - 127} to 2^{high - 127}, more than a BF16 "
            "carrier spans; backend='reference' multiplies them"
        )
    ref = (low + high) // 2 - 127
    shifted = q.decode_blocks() if ref == 0 else q.decode_blocks().double() * 2.0**-ref
    return shifted.to(torch.bfloat16), fmt.outer_constant * 2.0**ref


def matmul(a: Any, b: Any, *, dtype: torch.dtype) -> Tensor:
    """A B^T [..., N] of two ``QuantizedTensor``s [..., K] and [N, K] in ``dtype``.

    Exact products, FP32 sums, outer scales in the epilogue, one rounding.
    """
    ca, fa = _carrier(a)
    cb, fb = _carrier(b)
    outer = [None if formats.get(q.format).outer == "constant" else q.outer_scale.reshape(-1) for q in (a, b)]
    return bf16_gemm(ca, cb, fa * fb, outer[0], outer[1], dtype).view(*a.shape[:-1], b.shape[0])
