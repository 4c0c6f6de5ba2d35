"""What the tests of fused kernels share: values, views, and what the producers make of them."""

from __future__ import annotations

import torch

from fp4core.kernels import producers as p
from fp4core.kernels._launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
V = p.View
ROW, ROW_SR = V("mxfp4", "e5m2"), V("mxfp4", "e5m2", "stochastic")
COL, COL_H32 = V("mxfp4", "e5m2"), V("mxfp4", "e5m2", hadamard="fixed32")
X_COL, X_COL_H32 = V("mxfp4", "e4m3"), V("mxfp4", "e4m3", hadamard="fixed32")
WIDE = V("mxfp4", "bf16")
SR_STATE = (0x1234_5678_9ABC, 17, 96)


def draw(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    """BF16 values of unequal features, the same on every device."""
    g = torch.Generator().manual_seed(seed)
    spread = torch.exp(0.5 * torch.randn(shape[-1], generator=g))
    return (torch.randn(shape, generator=g) * spread * scale).to(torch.bfloat16).to(DEVICE)


def states(count: int, ref: int = -2) -> torch.Tensor:
    return p.new_state(count, DEVICE, ref)


def sr() -> torch.Tensor:
    return torch.tensor(SR_STATE, dtype=torch.int64, device=DEVICE)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes."""
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def produced(x: torch.Tensor, row, col, state, producer: int = 0):
    """(row data, column data) of the producers for x, with the states of the two views."""
    made = p.produce(x, row, col, row_state=state[0], col_state=state[1], sr=p.SR(sr(), producer))
    return [None if m is None else m.data for m in made]
