"""The scaled sum of BF16 parts against the same sums in FP32, one after another."""

from __future__ import annotations

import pytest
import torch

from fp4core.kernels._launch import interpreted
from fp4core.kernels.scaled_sum import add_scaled_sum

DEVICE = "cpu" if interpreted() else "cuda"


@pytest.mark.parametrize("count, rank", [(1, 0), (2, 0), (2, 1), (3, 1), (8, 7)])
@pytest.mark.parametrize("n", [5, 4096, 9001])
@pytest.mark.parametrize("add", [False, True])
def test_terms_are_added_in_order(count: int, rank: int, n: int, add: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    powers = torch.randint(-40, 40, (count, n), generator=generator)
    parts = (torch.randn(count, n, generator=generator) * torch.exp2(powers.float())).bfloat16().to(DEVICE)
    parts[:, 1] = -0.0
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    want = total * torch.tensor(1.0 / count, dtype=torch.float32)
    before = torch.randn(n, generator=generator).to(DEVICE)
    if add:
        want = before + want
    # behind the last value lies another tensor's
    room = torch.cat([before, torch.full((7,), 3.0, device=DEVICE)])
    others = torch.full((count - 1, n + 11), 5.0, dtype=torch.bfloat16, device=DEVICE)
    others[:, :n] = torch.cat([parts[:rank], parts[rank + 1 :]])
    add_scaled_sum(parts[rank].clone(), others[:, :n], rank, 1.0 / count, room[:n], add=add)
    assert torch.equal(room[:n].view(torch.int32), want.view(torch.int32)) and (room[n:] == 3.0).all()
