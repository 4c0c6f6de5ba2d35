"""The scaled sums of BF16 parts against the same sums in FP32, one after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp4core.kernels._launch import interpreted
from fp4core.kernels.scaled_sum import ScaledSums

DEVICE = "cpu" if interpreted() else "cuda"
WIDE = 64  # parts begin at multiples of as many values


def _check(sizes: list[int], ranks: int, rank: int, add: bool, shift: int = 0) -> None:
    """Sums of vectors of `sizes` whose own terms begin `shift` values behind those of other tensors."""
    generator = torch.Generator().manual_seed(ranks)
    starts = [0]
    for n in sizes:
        starts.append(starts[-1] + -(-n // WIDE) * WIDE)
    # between parts lies what none of them is
    received = torch.full((ranks - 1, starts[-1]), 5.0, dtype=torch.bfloat16)
    sources, rooms, wants = [], [], []
    for n, start in zip(sizes, starts[:-1], strict=True):
        powers = torch.randint(-40, 40, (ranks, n), generator=generator)
        terms = (torch.randn(ranks, n, generator=generator) * torch.exp2(powers.float())).bfloat16()
        terms[:, 1:2] = -0.0
        before = torch.randn(n, generator=generator)
        wants.append(_want(terms, before, add))
        sources.append(torch.cat([torch.full((shift,), 7.0), terms[rank].float()]).bfloat16().to(DEVICE))
        received[:, start : start + n] = torch.cat([terms[:rank], terms[rank + 1 :]])
        # behind the last value lies another tensor's
        rooms.append(torch.cat([before, torch.full((7,), 3.0)]).to(DEVICE))
    totals = [room[:n] for room, n in zip(rooms, sizes, strict=True)]
    sums = ScaledSums(totals, [shift] * len(sizes), starts, rank, ranks, 1.0 / ranks)
    sums(sources, received.to(DEVICE), add=add)
    for room, total, want in zip(rooms, totals, wants, strict=True):
        assert torch.equal(total.cpu().view(torch.int32), want.view(torch.int32))
        assert (room[len(total) :] == 3.0).all()


def _want(terms: Tensor, before: Tensor, add: bool) -> Tensor:
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    total = total * torch.tensor(1.0 / len(terms), dtype=torch.float32)
    return before + total if add else total


@pytest.mark.parametrize("ranks, rank", [(1, 0), (2, 0), (2, 1), (3, 1), (8, 7)])
@pytest.mark.parametrize("n", [5, 4096, 9001])
@pytest.mark.parametrize("add", [False, True])
def test_terms_are_added_in_order(ranks: int, rank: int, n: int, add: bool) -> None:
    _check([n], ranks, rank, add)


@pytest.mark.parametrize("shift", [0, 3, 64], ids=lambda shift: f"own from {shift}")
@pytest.mark.parametrize(
    "sizes",
    [
        [4096, 9001, 5, 8192, 1],
        [4096, 16, 8192 + 32],
        [0, 4097, 0, 0, 33, 0],
        [0, 0],
        [48 + 16 * i for i in range(37)],
    ],
    ids=["uneven", "aligned", "some of no values", "none", "more than one launch's"],
)
def test_vectors_are_summed_together(sizes: list[int], shift: int) -> None:
    for ranks, rank, add in [(1, 0, True), (2, 1, True), (2, 0, False), (5, 2, True)]:
        _check(sizes, ranks, rank, add, shift)


def test_what_the_kernel_would_misread_is_refused() -> None:
    sums = ScaledSums([torch.zeros(32, device=DEVICE)], [0], [0], 0, 2, 0.5)
    parts = torch.zeros(1, 64, dtype=torch.bfloat16, device=DEVICE)
    good = torch.zeros(64, dtype=torch.bfloat16, device=DEVICE)
    for bad in (good.float(), good[::2]):
        with pytest.raises(
            ValueError, match=r"scaled sums: got a source of torch\..*; needed contiguous torch.bf"
        ):
            sums([bad], parts, add=False)
