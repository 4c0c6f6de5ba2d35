"""Scaled sums of BF16 vectors in FP32, term by term in order: a gradient's parts once they have travelled.

One pass reads every part and adds to what earlier parts left; torch would take one for each of the two, and
its reduction over so short an axis is not made for it (NOTES.md).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def scaled_sum_kernel(
    own_ptr,
    others_ptr,
    stride,
    total_ptr,
    n,
    factor,
    RANK: tl.constexpr,
    W: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total[i] = (total[i] +) factor x (part_0[i] + part_1[i] + ...), sums in FP32, W parts of BF16.

    Part RANK is own [n], the others are the rows of others [W - 1, n], `stride` values apart, in order.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < n
    scaled = tl.zeros((BLOCK,), tl.float32)
    for w in tl.static_range(W):
        if w == RANK:
            part = tl.load(own_ptr + at, mask=real, other=0.0)
        else:
            row = w - (1 if w > RANK else 0)
            part = tl.load(others_ptr + tl.cast(row, tl.int64) * stride + at, mask=real, other=0.0)
        # from the first term itself: 0 + -0 would be +0
        scaled = part.to(tl.float32) if w == 0 else scaled + part.to(tl.float32)
    scaled = scaled * factor
    if ADD:
        scaled = tl.load(total_ptr + at, mask=real, other=0.0) + scaled
    tl.store(total_ptr + at, scaled, mask=real)


def add_scaled_sum(
    own: Tensor, others: Tensor, rank: int, factor: float, total: Tensor, *, add: bool
) -> Tensor:
    """total = factor x (the sum of `own` and `others` in the order of ranks), returned.

    Args:
        own: BF16 [n], contiguous: the term at place `rank`.
        others: BF16 [W - 1, n], rows contiguous: the other terms in order.
        factor: rounded to FP32 once; the product is rounded before it is added.
        total: FP32 [n], contiguous; written.
        add: to what total holds.
    """
    n, count = own.numel(), others.shape[0] + 1
    grid = (triton.cdiv(n, _BLOCK),)
    scaled_sum_kernel[grid](
        *(own, others, others.stride(0), total, n, factor),
        RANK=rank,
        W=count,
        ADD=add,
        BLOCK=_BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return total
