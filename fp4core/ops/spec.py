"""A LinearRecipe as one short string, so that it can be an argument of a custom op.

Custom ops take tensors, numbers and strings; a string also reads well in a traced graph:

    fprop x=mxfp4 w=mxfp4_w2d; dgrad dy=mxfp4:stochastic w=mxfp4_w2d; wgrad dy=mxfp4:nearest:fixed32 x=...

An operand is ``format[:rounding[:hadamard[:scale_target]]]``; what is left out is ``nearest``, ``none`` and
the format's own target. A last part ``amax NUMBER`` names the table of held maxima (``fp4core.ops.held``).
"""

from __future__ import annotations

import functools

from fp4core.recipe import Dgrad, Fprop, LinearRecipe, Operand, Wgrad

# Views of one linear layer that may draw stochastic bits; the last two bits of a producer id.
VIEWS = 4
ROW_DY, COLUMN_DY, ROW_X, COLUMN_X = range(VIEWS)
# Linear layers of a block in the order of their index: q k v o gate up down, and room for one more.
LINEARS = 8

_TABLE = "amax"
_CONTRACTIONS = (("fprop", Fprop, ("x", "w")), ("dgrad", Dgrad, ("dy", "w")), ("wgrad", Wgrad, ("dy", "x")))


def producer_id(block: int, index: int, view: int = 0) -> int:
    """Philox producer of a view: ``((block * 8 + index) * 4 + view)``."""
    return (block * LINEARS + index) * VIEWS + view


def encode(recipe: LinearRecipe) -> str:
    """The recipe as text; ``decode(encode(r)) == r``."""
    parts = []
    for contraction, _, names in _CONTRACTIONS:
        operands = getattr(recipe, contraction)
        parts.append(" ".join([contraction, *(f"{n}={_operand_text(getattr(operands, n))}" for n in names)]))
    return "; ".join(parts)


@functools.lru_cache(maxsize=1024)
def decode(text: str) -> LinearRecipe:
    """The recipe of ``encode``'s text. Raises ValueError for any other text."""
    try:
        found: dict[str, dict[str, Operand]] = {}
        for part in text.split("; "):
            contraction, *pairs = part.split(" ")
            if contraction != _TABLE:
                found[contraction] = dict(_operand_pair(pair) for pair in pairs)
        return LinearRecipe(**{name: kind(**found[name]) for name, kind, _ in _CONTRACTIONS})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"got {text!r}, needed the text of fp4core.ops.spec.encode ({error})") from None


def with_table(text: str, number: int) -> str:
    """The text with the number of a table of held maxima; ``decode`` gives the same recipe."""
    return f"{text}; {_TABLE} {number}"


@functools.lru_cache(maxsize=1024)
def table(text: str) -> int | None:
    """Number of the table of held maxima that the text names, or None."""
    last = text.rpartition("; ")[2].split(" ")
    return int(last[1]) if last[0] == _TABLE else None


def is_plain_bf16(recipe: LinearRecipe) -> bool:
    """True when no operand is quantised or transformed."""
    f, d, w = recipe.fprop, recipe.dgrad, recipe.wgrad
    operands = (f.x, f.w, d.dy, d.w, w.dy, w.x)
    return all(op.format == "bf16" and op.hadamard == "none" for op in operands)


def _operand_text(op: Operand) -> str:
    target = "" if op.scale_target is None else repr(op.scale_target)
    parts = [op.format, op.rounding, op.hadamard, target]
    defaults = ["", "nearest", "none", ""]
    while parts[-1] == defaults[len(parts) - 1]:
        parts.pop()
    return ":".join(parts)


def _operand_pair(pair: str) -> tuple[str, Operand]:
    name, value = pair.split("=")
    form, rounding, hadamard, target = [*value.split(":"), *["nearest", "none", ""][value.count(":") :]]
    return name, Operand(form, rounding, hadamard, float(target) if target else None)
