"""Signed Hadamard rotation along the contraction axis, in groups of 16 or 32.

    y = H D x      D = diag(signs)      H16 = Sylvester / 4      H32 = Sylvester / sqrt(32)

Exact order, which every backend repeats bit for bit (all in FP32, x already rounded to BF16):

1. signs: ``fixed16`` and ``fixed32`` negate element i of a group where bit (i mod 16) of 0x2817 is
   clear; ``plain16`` has no signs. Negation, not a product: the sign of a zero flips too.
2. butterfly stages with distance h = 1, 2, 4, 8, and for H32 then h = 16 (the two H16 halves first,
   the cross-half stage last): of each pair (i, i + h), i the lower index, i := a + b, i + h := a - b.
3. one product with the scale, 0.25 for H16 and FP32(1 / sqrt(32)) for H32. No scale in between. (A
   factor 1/4 after the H16 stages and FP32(1 / sqrt 2) at the end gives the same bits, because a power of
   two commutes with rounding.)
4. rounding to BF16.

A last group with fewer than 16 (32) elements stays as it is. An identity block is orthogonal too, so two
operands rotated alike still have the same inner product, and no value is spread into padding.
"""

from __future__ import annotations

import math

import torch

from fp4core.reference.pieces import slices

SIGN_MASK = 0x2817
_GROUP = {"plain16": 16, "fixed16": 16, "fixed32": 32}
NAMES = tuple(_GROUP)


def check_hadamard(name: str | None) -> str | None:
    """``name`` with ``"none"`` as None.

    Raises:
        ValueError: not one of None, "none", "plain16", "fixed16", "fixed32".
    """
    if name is None or name == "none":
        return None
    if name not in _GROUP:
        raise ValueError(f"hadamard: got {name!r}; needed None, {', '.join(map(repr, NAMES))}")
    return name


def signs(name: str) -> torch.Tensor:
    """FP32 vector of the group's signs, +1 or -1."""
    group = _GROUP[name]
    positive = [name == "plain16" or SIGN_MASK >> (i % 16) & 1 for i in range(group)]
    return torch.tensor([1.0 if p else -1.0 for p in positive], dtype=torch.float32)


def scale(name: str) -> float:
    """The factor of step 3; for H32 the double that rounds to FP32(1 / sqrt(32))."""
    return 1 / math.sqrt(_GROUP[name])


def _butterfly_(v: torch.Tensor, axis: int) -> None:
    """All stages of the unscaled Sylvester transform of ``v`` along ``axis``, in place."""
    group, h = v.shape[axis], 1
    while h < group:
        pairs = v.unflatten(axis, (group // (2 * h), 2, h))
        a, b = pairs.select(axis + 1, 0), pairs.select(axis + 1, 1)
        difference = a - b
        a += b
        b.copy_(difference)
        h *= 2


def rotate(x: torch.Tensor, name: str | None, axis: int = -1) -> torch.Tensor:
    """Rotate along ``axis`` and round to BF16.

    Args:
        x: FP32 tensor holding BF16 values.
        name: None (nothing happens), "plain16", "fixed16" or "fixed32".
        axis: the contraction axis.

    Returns:
        FP32 tensor of x's shape holding BF16 values.
    """
    name = check_hadamard(name)
    if name is None or x.numel() == 0:
        return x
    group = _GROUP[name]
    axis = axis % x.dim()
    length = x.shape[axis]
    whole = length - length % group
    if whole == 0:
        return x
    head = x.narrow(axis, 0, whole)
    grouped = head.unflatten(axis, (whole // group, group))
    inner = x.dim() - 1 - axis  # axes right of the contraction axis
    v = grouped * signs(name).to(x.device).view(-1, *[1] * inner)
    for s in slices(v):
        _butterfly_(v[s], axis + 1)
        v[s].mul_(scale(name))
    out = v.flatten(axis, axis + 1).to(torch.bfloat16).float()
    return out if whole == length else torch.cat((out, x.narrow(axis, whole, length - whole)), dim=axis)
