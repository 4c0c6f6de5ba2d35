"""Walking a large tensor in cache-sized pieces.

On a CPU the oracles are bound by fresh memory: an elementwise chain over megabytes pays page faults and DRAM
traffic for every temporary. The same chain over pieces of 64 Ki elements stays in cache and is several times
faster. Elementwise results do not depend on the pieces; other devices get one piece.
"""

from __future__ import annotations

import torch

PIECE = 1 << 16


def slices(t: torch.Tensor) -> list[slice]:
    """Slices of the first axis that cut ``t`` into pieces of about ``PIECE`` elements."""
    rows = t.shape[0]
    if t.device.type != "cpu" or rows == 0:
        return [slice(0, rows)]
    step = max(1, PIECE * rows // max(1, t.numel()))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]
