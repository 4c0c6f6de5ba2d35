"""Where a model's block asks for a fused implementation of itself. Cheap to import: no Triton."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fp4core.ops.linear import Linear, resolve_backend

CanFuse = Callable[[nn.Module, Tensor], bool]
BlockForward = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Tensor]

_FUSED: dict[str, tuple[CanFuse, BlockForward]] = {}


def register_fused_block(backend: str, can_fuse: CanFuse, forward: BlockForward) -> None:
    """Offer ``forward(block, h, cos, sin, state)`` for blocks of ``backend`` where ``can_fuse(block, h)``."""
    _FUSED[backend] = (can_fuse, forward)


def fused_block(block: nn.Module, h: Tensor) -> BlockForward | None:
    """The function that computes ``block`` on ``h`` in fused kernels, or None to compute it layer by layer.

    ``block`` has the modules of ``fp4core.model``'s Block. Traces under ``torch.compile``.
    """
    first = block.self_attn.q_proj
    if not isinstance(first, Linear) or first.plain_bf16:
        return None
    backend = resolve_backend(first.backend, h.device.type)
    if backend not in _FUSED:
        return None
    can_fuse, forward = _FUSED[backend]
    return forward if can_fuse(block, h) else None
