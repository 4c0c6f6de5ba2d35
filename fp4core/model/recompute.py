"""Activation checkpointing: none, selective, full, or full in every n-th block ("selective-8").

"full" keeps a block's input and makes the rest again. "selective-N" does so in blocks N, 2 N, ... counted
from one and keeps everything in the others: torchtitan's option of that name, and the report's geometries.
"selective" decides per operation: it keeps what matrix products, attention and fp4core's own operators
return, and makes norms, rotations, SiLU, casts and, on the reference backend, quantisation again.

Measured on the reference backend (4 blocks of 512, 2048 tokens, any route): 319 MiB are kept with "none", 119
with "selective", 23 with "full". On the carrier backend the operators return encoded views for both
gradients, and "selective" keeps all of them, those included that "none" would free: what it saves there is
smaller and has not been measured. Gradients are the same bits under every policy.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_POLICY = re.compile(r"none|selective|full|selective-([1-9][0-9]*)")
_KEPT_ATEN = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    }
)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name() if isinstance(op, torch._ops.OpOverload) else ""
    namespace, _, rest = name.partition("::")
    if namespace == "fp4core" or (namespace == "aten" and rest.partition(".")[0] in _KEPT_ATEN):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_contexts = functools.partial(create_selective_checkpoint_contexts, _policy)


def block_policy(policy: str, block: int) -> str:
    """ "none", "selective" or "full": what ``policy`` means for the zero-based ``block``.

    Raises:
        ValueError: for an unknown policy.
    """
    found = _POLICY.fullmatch(policy)
    if found is None:
        raise ValueError(
            f"activation_checkpoint: got {policy!r}, needed none, selective, full or selective-N (every N-th "
            "block)"
        )
    every = found.group(1)
    if every is None:
        return policy
    return "full" if (block + 1) % int(every) == 0 else "none"


def checkpointed(policy: str, block: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """``block(*inputs)`` under a policy. Nothing draws from torch's generators: their state is not kept."""
    if policy == "none" or not torch.is_grad_enabled():
        return block(*inputs)
    more = {"context_fn": _contexts} if policy == "selective" else {}
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, **more)
