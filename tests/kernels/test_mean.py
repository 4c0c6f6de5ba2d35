"""The mean of BF16 parts against the same sums in FP32, one after another."""

from __future__ import annotations

import pytest
import torch

from fp4core.kernels._launch import interpreted
from fp4core.kernels.mean import mean_of_parts

DEVICE = "cpu" if interpreted() else "cuda"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [5, 4096, 9001])
def test_terms_are_added_in_order(count: int, n: int) -> None:
    generator = torch.Generator().manual_seed(count)
    powers = torch.randint(-40, 40, (count, n), generator=generator)
    parts = (torch.randn(count, n, generator=generator) * torch.exp2(powers.float())).bfloat16().to(DEVICE)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    want = total * torch.tensor(1.0 / count, dtype=torch.float32)
    # behind the last value lies another tensor's
    room = torch.full((n + 7,), 3.0, device=DEVICE)
    mean_of_parts(parts, room[:n])
    assert torch.equal(room[:n], want) and (room[n:] == 3.0).all()
