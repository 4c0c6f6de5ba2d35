"""What a route does per token in one block: operations, bytes, instructions and launches of every boundary.

Boundaries are those of the report's block, each forward and backward:

    norm_qkv           X of q, k, v         forward   X encoded (row view for Fprop, column view kept for
    Wgrad), attention_output   X of o                         W encoded, Y = X W^T norm_gate_up       X of
    gate, up        backward  dY encoded (row view for Dgrad, column view for Wgrad), silu_down          X
    of down                      W encoded, dX = dY W, dW = dY^T X

Element-wise work around the products is counted in bytes moved, with d hidden, w query width, v key and
value width, f FFN width; a fused producer makes its operand from values it already holds, so the BF16
tensor that would only feed a quantiser is neither written nor read. Transformer Engine's route quantises
from memory: those bytes stay, an amax pass reads the tensor once more, and scales are swizzled by a pass of
their own. A global scale (``nvfp4``) cannot be
applied before the whole tensor is known: its producer reads the tensor again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fp4core import formats
from fp4core.recipe import LinearRecipe, ModelConfig, Operand, Recipe

_TABLE = Path(__file__).parent / "producer_instructions.json"
_BF16 = 2.0


@dataclass(frozen=True)
class Boundary:
    """Work of one boundary per token, weights apart (they cost per micro-step, whatever its tokens).

    Attributes:
        flops: operation kind ("bf16", "mx", "nv", "cta") -> floating-point operations of its products.
        element_bytes: element-wise traffic around them.
        reduce_bytes: read by passes that only find maxima, or read again after them.
        quantise_bytes, instructions: of the producers of X or dY.
        layout_bytes: moved only to put scales in another order.
        weights: of its linears. weight_bytes, weight_instructions: of encoding them, per micro-step.
        launches: kernels per micro-step.
        views: (kind, bytes) of each dual producer, for chips whose producers were measured.
    """

    name: str
    flops: dict[str, float]
    element_bytes: float = 0.0
    reduce_bytes: float = 0.0
    quantise_bytes: float = 0.0
    instructions: float = 0.0
    layout_bytes: float = 0.0
    weights: float = 0.0
    weight_bytes: float = 0.0
    weight_instructions: float = 0.0
    launches: int = 0
    views: tuple[tuple[str, float], ...] = field(default=())


@cache
def _instructions() -> dict[str, float]:
    """Machine instructions per value (both views where a producer makes both) of the native producers."""
    table = json.loads(_TABLE.read_text())
    return {name: count / table["values_per_thread"] for name, count in table["instructions"].items()}


def _family(name: str) -> str:
    if name == "bf16":
        return "bf16"
    fmt = formats.get(name)
    kinds = {"nv_te": "te", "nv_global": "nvfp4", "nv_cta": "cta", "ue5m3": "nvfp4"}
    return kinds.get(fmt.algorithm, "mxfp4")


def _kind(operand: Operand) -> str:
    """Which product an operand asks for."""
    return {"bf16": "bf16", "mxfp4": "mx", "cta": "cta"}.get(_family(operand.format), "nv")


def _view_bytes(operand: Operand) -> float:
    return 0.0 if operand.format == "bf16" else formats.get(operand.format).bits_per_value / 8


def dual_instructions(row: Operand, col: Operand, *, gradient: bool) -> float:
    """Instructions per value of a producer of both views of X or dY; none where both are BF16.

    Two families in one producer (operand hybrids) are listed for dY; elsewhere they count half of each.
    """
    table, families = _instructions(), (_family(row.format), _family(col.format))
    if families == ("bf16", "bf16"):
        return 0.0
    what = "dy" if gradient else "x"
    size = {"none": "", "plain16": "-h16", "fixed16": "-h16", "fixed32": "-h32"}[col.hadamard]
    if families[0] != families[1]:
        mixed = f"hybrid-{what}{size}"
        if mixed in table:
            return table[mixed]
        return sum(0.5 * table.get(f"{name}-{what}", 0.0) for name in families)
    name = families[0]
    if name == "te":
        return table[f"te-{what}"]
    if f"{name}-{what}{size}" in table:
        return table[f"{name}-{what}{size}"]
    # a rotation that is not in the table costs what it adds to the MX producer of X
    return table[f"{name}-{what}"] + table[f"mxfp4-x{size}"] - table["mxfp4-x"]


def _weight(operand: Operand, column: bool) -> tuple[float, float]:
    """(bytes, instructions) per weight of encoding one view from BF16."""
    if operand.format == "bf16":
        return 0.0, 0.0
    name = f"{_family(operand.format)}-w{'t' if column else ''}"
    return _BF16 + _view_bytes(operand), _instructions()[name]


def _tensor(row: Operand, col: Operand, features: float, *, gradient: bool, fused: bool) -> dict[str, float]:
    """Producer work of one [tokens, features] tensor, per token."""
    names = {op.format for op in (row, col)} - {"bf16"}
    if not names:
        return {}
    waits = any(formats.get(n).algorithm in ("nv_te", "nv_global") for n in names)
    read = 0.0 if fused else _BF16
    return {
        "reduce_bytes": features * _BF16 * waits,
        "quantise_bytes": features * (read + _view_bytes(row) + _view_bytes(col)),
        "instructions": features * dual_instructions(row, col, gradient=gradient),
        "layout_bytes": 0.0 if fused else features * 2 * 2 / 16,  # two views' scale bytes, read and written
    }


def _carried(row: Operand, col: Operand, features: float) -> tuple[str, float]:
    """(measured kind, bytes) of a producer of FP8 or BF16 carriers."""
    fp8 = all(_kind(op) == "mx" for op in (row, col))
    parts = ["fp8" if fp8 else "bf16"]
    if "stochastic" in (row.rounding, col.rounding):
        parts.append("stochastic")
    if col.hadamard != "none":
        parts.append("rotated")
    return "_".join(parts), features * (_BF16 + (2.0 if fp8 else 4.0))


@cache
def boundaries(recipe: LinearRecipe, model: ModelConfig, *, fused: bool) -> tuple[Boundary, ...]:
    """Every boundary of a block whose linears follow ``recipe``. ``fused``: producers hold their input."""
    d, f = model.hidden, model.ffn
    width, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    qkv = width + 2 * narrow
    fp, dg, wg = recipe.fprop, recipe.dgrad, recipe.wgrad
    quantised = fp.x.format != "bf16"
    # BF16 tensors that only feed quantisers: the two normed streams, h, and dq dk dv, d gate, d up
    spared = 1.0 if fused and quantised else 0.0
    rope = 4 * (width + narrow)
    shapes = {
        "norm_qkv": (
            d,
            [width, narrow, narrow],
            4 * d + rope - 2 * d * spared,
            8 * d + rope - 2 * qkv * spared,
        ),
        "attention_output": (width, [d], 0.0, 0.0),
        "norm_gate_up": (d, [f, f], 8 * d - 2 * d * spared, 8 * d),
        "silu_down": (f, [d], 6 * f + 6 * d - 2 * f * spared, 12 * f - 4 * f * spared),
    }
    found = []
    for name, (k, outs, forward_bytes, backward_bytes) in shapes.items():
        product = 2.0 * k * sum(outs)
        weights = float(k * sum(outs))
        w_bytes, w_instructions = _weight(fp.w, False)
        x = _tensor(fp.x, wg.x, k, gradient=False, fused=fused)
        found.append(
            Boundary(
                f"{name}_forward",
                {_kind(fp.x): product},
                forward_bytes,
                weights=weights,
                weight_bytes=weights * w_bytes,
                weight_instructions=weights * w_instructions,
                launches=(1 + len(outs)) * bool(x) + len(outs) + 2 + 4 * bool(x) * (not fused),
                views=(_carried(fp.x, wg.x, k),) if x else (),
                **x,
            )
        )
        w_bytes, w_instructions = _weight(dg.w, True)
        dy = _tensor(dg.dy, wg.dy, sum(outs), gradient=True, fused=fused)
        flops: dict[str, float] = {}
        for kind in (_kind(dg.dy), _kind(wg.dy)):
            flops[kind] = flops.get(kind, 0.0) + product
        found.append(
            Boundary(
                f"{name}_backward",
                flops,
                backward_bytes,
                weights=weights,
                weight_bytes=weights * w_bytes,
                weight_instructions=weights * w_instructions,
                launches=2 * len(outs) * bool(dy) + 2 * len(outs) + 2 + 4 * bool(dy) * (not fused),
                views=(_carried(dg.dy, wg.dy, sum(outs)),) if dy else (),
                **dy,
            )
        )
    return tuple(found)


def attention_flops(model: ModelConfig, sequence: int) -> tuple[float, float]:
    """(forward, backward) operations per token and block of causal attention; backward recomputes the
    scores."""
    forward = 2.0 * sequence * model.heads * model.head_dim
    return forward, 2.5 * forward


def kept_bytes(recipe: LinearRecipe, model: ModelConfig, *, carriers: bool = False) -> float:
    """Bytes per token that a block keeps for backward without recomputation; ``carriers``: one or two per
    value."""
    d, f = model.hidden, model.ffn
    width, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    operand = recipe.wgrad.x
    view = _BF16 if operand.format == "bf16" else _view_bytes(operand)
    if carriers and operand.format != "bf16":
        view = 1.0 if _kind(operand) == "mx" else _BF16
    stream, attention = 2 * _BF16 * d, _BF16 * (2 * width + 2 * narrow) + 4 * model.heads
    # normed streams and h; the attention output is kept for its own backward and, encoded, for Wgrad
    operands = view * (2 * d + f) + (0.0 if operand.format == "bf16" else view * width)
    return stream + attention + _BF16 * 2 * f + operands


def fused_producers(recipe: Recipe) -> bool:
    """Whether a route's producers hold their input: the report's custom ones do, Transformer Engine's do
    not."""
    return recipe.implementation != "te"
