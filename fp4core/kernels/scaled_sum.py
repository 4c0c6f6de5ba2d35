"""Scaled sums of BF16 vectors in FP32, term by term in order: gradients' parts once they have travelled.

One pass reads every part and adds to what earlier parts left; torch would take one for each of the two, and
its reduction over so short an axis is not made for it (NOTES.md). All vectors of a module are summed by one
launch: a launch for each is as many calls that a host with slow cores hardly makes in time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
# Vectors of one launch: each of its programs looks through all of them for its own.
_MOST = 16


@triton.jit
def scaled_sum_kernel(
    own,
    places_ptr,
    parts_ptr,
    stride,
    factor,
    RANK: tl.constexpr,
    W: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total[i] = (total[i] +) factor x (part_0[i] + part_1[i] + ...), sums in FP32, W parts of BF16.

    A program does so for BLOCK values of one of len(own) vectors. Row k of places, int64 [len(own), 4]: the
    first program of vector k, the address of its FP32 total, its number n of values, and where they begin in
    each row of parts [W - 1, ...]; rows are `stride` values apart. Part RANK lies at the address own[k], the
    others are the rows of parts in order. ALIGNED: addresses, numbers and beginnings are multiples of 16.
    """
    program = tl.program_id(0)
    k = tl.cast(0, tl.int32)
    first = tl.cast(0, tl.int64)
    mine = own[0]
    for i in tl.static_range(1, len(own)):
        begin = tl.load(places_ptr + 4 * i)
        here = program >= begin
        k = tl.where(here, i, k)
        first = tl.where(here, begin, first)
        mine = tl.where(here, own[i], mine)
    n = tl.load(places_ptr + 4 * k + 2)
    own_ptr = tl.cast(mine, parts_ptr.dtype)
    total_ptr = tl.cast(tl.load(places_ptr + 4 * k + 1), tl.pointer_type(tl.float32))
    start = tl.load(places_ptr + 4 * k + 3)
    if ALIGNED:
        n, start = tl.multiple_of(n, 16), tl.multiple_of(start, 16)
        own_ptr, total_ptr = tl.multiple_of(own_ptr, 16), tl.multiple_of(total_ptr, 16)
    others_ptr = parts_ptr + start
    at = (program - first) * BLOCK + tl.arange(0, BLOCK)
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


class ScaledSums:
    """Sums of several vectors over ranks, again and again: what never changes is on the device already."""

    def __init__(
        self,
        totals: Sequence[Tensor],
        offsets: Sequence[int],
        starts: Sequence[int],
        rank: int,
        ranks: int,
        factor: float,
    ) -> None:
        """Nothing is computed yet.

        Args:
            totals: FP32, contiguous, n_k values each: the sums, whose memory stays where it is.
            offsets: of this rank's n_k values among those of a source.
            starts: of n_k values in a row of parts. Loads are wide where n_k, offset and start divide by 16.
            rank, ranks: the place of this rank's own term, and the number of terms.
            factor: rounded to FP32 once; a product is rounded before it is added.
        """
        self._totals = totals  # whose addresses are on the device
        self._rank, self._ranks, self._factor = rank, ranks, factor
        # an odd norm must not cost the others their wide loads
        groups: dict[bool, list[int]] = {True: [], False: []}
        for k, total in enumerate(totals):
            if n := total.numel():
                groups[not any(x % 16 for x in (total.data_ptr(), n, offsets[k], starts[k]))].append(k)
        self._launches = [
            _Launch(wide, group[i : i + _MOST], totals, offsets, starts)
            for wide, group in groups.items()
            for i in range(0, len(group), _MOST)
        ]

    def __call__(self, sources: Sequence[Tensor], parts: Tensor, *, add: bool) -> None:
        """Every total = factor x (the sum over ranks, in their order), or that added to it.

        Args:
            sources: BF16, contiguous, at least offset_k + n_k values each: with the terms of this rank.
            parts: BF16 [ranks - 1, S], contiguous: the other ranks' terms, in order.
            add: to what the totals hold.

        Raises:
            ValueError: a source of another type than parts, or not contiguous; the kernel sees addresses.
        """
        for source in sources:
            if source.dtype != parts.dtype or not source.is_contiguous():
                raise ValueError(
                    f"scaled sums: got a source of {source.dtype} with strides {source.stride()}; needed "
                    f"contiguous {parts.dtype}"
                )
        size = parts.element_size()
        for launch in self._launches:
            # Triton makes a version per pattern of aligned addresses: a vector's alignment never changes
            own = tuple([sources[k].data_ptr() + size * offset for k, offset in launch.own])
            aligned = launch.wide and not any(address % 16 for address in own)
            scaled_sum_kernel[launch.grid](
                *(own, launch.places, parts, parts.stride(0), self._factor),
                RANK=self._rank,
                W=self._ranks,
                ADD=add,
                ALIGNED=aligned,
                BLOCK=_BLOCK,
                num_warps=8,
                enable_fp_fusion=False,
            )


class _Launch:
    """What a launch for the vectors `chosen` needs, as far as it is known before; `wide`: all are aligned."""

    def __init__(
        self,
        wide: bool,
        chosen: Sequence[int],
        totals: Sequence[Tensor],
        offsets: Sequence[int],
        starts: Sequence[int],
    ) -> None:
        self.wide = wide
        self.own = [(k, offsets[k]) for k in chosen]
        rows, programs = [], 0
        for k in chosen:
            rows.append((programs, totals[k].data_ptr(), totals[k].numel(), starts[k]))
            programs += triton.cdiv(totals[k].numel(), _BLOCK)
        self.grid = (programs,)
        self.places = torch.tensor(rows, dtype=torch.int64, device=totals[chosen[0]].device)
