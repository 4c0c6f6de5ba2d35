"""How a machine runs a route's contractions, by whose kernels and why."""

from __future__ import annotations

import torch

from fp4core import formats
from fp4core.ops import linear as linears
from fp4core.ops.backends import backends
from fp4core.recipe import LinearRecipe, Operand, Recipe

_CONTRACTIONS = ("fprop", "dgrad", "wgrad")


def capability() -> int:
    """10 x major + minor of the current GPU, 0 without one."""
    if not torch.cuda.is_available() or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def carriers(recipe: LinearRecipe, sm: int) -> dict[str, str]:
    """Contraction -> "fp8", "bf16" or "plain" on a GPU of capability ``sm`` (>= 80).

    FP8 holds operands whose block scales are powers of two and needs sm_89; everything else fits BF16.
    """
    found = {}
    for name in _CONTRACTIONS:
        contraction = getattr(recipe, name)
        operands = [getattr(contraction, field) for field in type(contraction).__dataclass_fields__]
        if all(op.format == "bf16" for op in operands):
            found[name] = "plain"
        else:
            found[name] = "fp8" if sm >= 89 and all(map(_power_of_two, operands)) else "bf16"
    return found


def _power_of_two(op: Operand) -> bool:
    return op.format != "bf16" and formats.get(op.format).block_scale == "e8m0"


def how(recipe: Recipe, sm: int | None = None) -> str:
    """One line: how this machine (or one of capability ``sm``) runs a route by ``backend: auto``."""
    here = sm is None
    sm = capability() if sm is None else sm
    available = {name for name, b in backends().items() if b.available} if here else _assumed(sm)
    kinds = [carriers(group_recipe(recipe, i), sm) for i in range(len(recipe.groups))]
    if all(set(k.values()) == {"plain"} for k in kinds):
        return "BF16 products" if sm else "FP32 products of BF16 operands"
    if recipe.implementation == "te" and "te" in available:
        return "natively, by Transformer Engine"
    if "carrier" not in available:
        return "exactly but slowly, on the reference: " + backends()["carrier"].reason
    names = {"fp8": "FP8", "bf16": "BF16", "plain": "no"}
    parts = {", ".join(f"{c} {names[k[c]]}" for c in _CONTRACTIONS) for k in kinds}
    line = f"exactly, by carriers ({'; '.join(sorted(parts))})"
    if "native" in available and linears.preferred_backend(recipe, "native") == "native":
        line += "; by FP4 Tensor Cores where the study says backend: native, which has never run"
    return line


def group_recipe(recipe: Recipe, index: int) -> LinearRecipe:
    """The linear recipe of one group of blocks."""
    group = recipe.groups[index]
    return LinearRecipe(group.fprop, group.dgrad, group.wgrad)


def _assumed(sm: int) -> set[str]:
    names = {"reference"} | ({"carrier"} if sm >= 80 else set())
    return names | ({"native"} if sm in (100, 103) else set())
