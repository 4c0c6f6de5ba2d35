"""Where a model's block asks for a fused implementation of itself. Cheap to import: no Triton."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch import Tensor, nn

from fp4core.ops.linear import Linear, resolve_backend

BlockForward = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Tensor]


def fused_block(block: nn.Module, h: Tensor) -> BlockForward | None:
    """The function that computes ``block`` on ``h`` in fused kernels, or None to compute it layer by layer.

    ``block`` has the modules of ``fp4core.model``'s Block; see ``carrier_block.can_fuse`` for the conditions.
    """
    first = block.self_attn.q_proj
    if not isinstance(first, Linear) or first.plain_bf16:
        return None
    if resolve_backend(first.backend, h.device.type) != "carrier":
        return None
    carrier_block = importlib.import_module("fp4core.ops.carrier_block")
    return carrier_block.block_forward if carrier_block.can_fuse(block, h) else None
