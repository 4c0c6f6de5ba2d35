"""Mean of BF16 vectors in FP32, term by term in their order: a gradient's parts once they have travelled.

One pass; torch's own reduction over so short an axis is not made for it (NOTES.md).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def mean_kernel(parts_ptr, mean_ptr, n, factor, W: tl.constexpr, BLOCK: tl.constexpr):
    """mean[i] = factor x (parts[0, i] + parts[1, i] + ...), parts BF16 [W, n], mean and the sums FP32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < n
    total = tl.load(parts_ptr + at, mask=real, other=0.0).to(tl.float32)
    for w in range(1, W):
        total += tl.load(parts_ptr + tl.cast(w, tl.int64) * n + at, mask=real, other=0.0).to(tl.float32)
    tl.store(mean_ptr + at, total * factor, mask=real)


def mean_of_parts(parts: Tensor, out: Tensor) -> Tensor:
    """Mean over the first axis of parts, BF16 [W, n], written to out, FP32 [n]; both contiguous. Returns out.

    1/W is rounded to FP32 once: exact for powers of two.
    """
    count, n = parts.shape
    grid = (triton.cdiv(n, _BLOCK),)
    mean_kernel[grid](parts, out, n, 1.0 / count, W=count, BLOCK=_BLOCK, num_warps=8)
    return out
