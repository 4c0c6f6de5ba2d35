"""The native backend of ``fp4core.Linear``: FP4 operands multiplied by FP4 Tensor Cores (sm_100, sm_103).

The contract is that of ``fp4core.ops.linear``. Forward encodes X once, both views, and W's row view; it
keeps X's column view, 0.53 or 0.56 bytes per value, and the weights themselves. Backward encodes each dY
once, both views, and W's column view. Shapes: T tokens, K input features, N_i output features.

A contraction needs two FP4 operands with one type of block scale, or two BF16 ones (``torch.matmul``); any
other recipe is refused. Asked for by name (``backend="native"``); importing this module where it cannot run
raises ValueError. It has never run on the hardware it is for: what holds it are its own sources in the
Triton interpreter.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fp4core import formats
from fp4core.kernels import native
from fp4core.kernels._launch import interpreted, round_up
from fp4core.kernels.native.layout import ATOM, atoms
from fp4core.kernels.producers import View
from fp4core.ops import spec as specs
from fp4core.ops.backends import backends
from fp4core.ops.linear import register_backend
from fp4core.recipe import LinearRecipe, Operand

_BF16 = torch.bfloat16


def _view(op: Operand) -> View | None:
    return None if op.format == "bf16" else View(op.format, rounding=op.rounding, hadamard=op.hadamard)


def encodings(recipe: LinearRecipe) -> list[tuple[View | None, View | None]]:
    """(row view, column view) of every encoding of a training step: X, W forward, W backward, dY."""
    x = _view(recipe.fprop.x), _view(recipe.wgrad.x)
    dy = _view(recipe.dgrad.dy), _view(recipe.wgrad.dy)
    pairs = [x, (_view(recipe.fprop.w), None), (None, _view(recipe.dgrad.w)), dy]
    return [pair for pair in pairs if pair != (None, None)]


@functools.lru_cache(maxsize=1024)
def _decode(spec: str) -> LinearRecipe:
    """The recipe of a spec. Raises ValueError where FP4 Tensor Cores cannot multiply its operands."""
    recipe = specs.decode(spec)
    pairs = {
        "fprop": (recipe.fprop.x, recipe.fprop.w),
        "dgrad": (recipe.dgrad.dy, recipe.dgrad.w),
        "wgrad": (recipe.wgrad.dy, recipe.wgrad.x),
    }
    for name, (left, right) in pairs.items():
        kinds = [None if op.format == "bf16" else formats.get(op.format).block_scale for op in (left, right)]
        rotated = any(op.format == "bf16" and op.hadamard != "none" for op in (left, right))
        if kinds[0] != kinds[1] or "ue5m3" in kinds or rotated:
            raise ValueError(
                f"native: got {left.format} x {right.format} in {name}; FP4 Tensor Cores multiply operands "
                "that both have E8M0 or both have E4M3 block scales (or are both plain BF16); use "
                "backend='carrier' or 'reference'"
            )
    return recipe


def _stream(op: Operand, state: Tensor, producer: int, features: int) -> native.Stream | None:
    """Random bytes of a stochastic view of [T, features]; no host synchronisation."""
    if op.rounding != "stochastic":
        return None
    words = torch.stack((state[0], state[1], state[2] * features))
    return native.Stream(words, producer, features % 16 == 0)


def _contract(a: native.Packed | Tensor, b: native.Packed | Tensor, dtype: torch.dtype) -> Tensor:
    """A B^T with contraction last, in ``dtype``; FP32 sums either way."""
    if isinstance(a, native.Packed):
        out = native.native_gemm(a, b, dtype)
        return out if out.is_contiguous() else out.contiguous()
    if dtype == _BF16:
        return a @ b.t()
    return (a.float() @ b.float().t()).to(dtype)


def _encode(x: Tensor, row: Operand | None, col: Operand | None, **streams: native.Stream | None) -> tuple:
    """Operands of both views: packed, or x itself (transposed for the column view) where BF16; None if not
    asked."""
    views = [None if op is None else _view(op) for op in (row, col)]
    made = native.produce(x, *views, **streams) if views != [None, None] else (None, None)
    plain = (x, x.t())
    return tuple(
        None if op is None else (plain[i] if views[i] is None else made[i]) for i, op in enumerate((row, col))
    )


@torch.library.custom_op("fp4core::native_linears", mutates_args=())
def _forward(
    x: Tensor, weights: list[Tensor], state: Tensor, spec: str, producers: list[int]
) -> list[Tensor]:
    """[Y_i BF16 [T, N_i] ..., then X's column view: codes, scales, outer; or X itself and two empty
    tensors]."""
    recipe = _decode(spec)
    x_row, x_col = _encode(x, recipe.fprop.x, recipe.wgrad.x)
    outputs = [
        _contract(x_row, _encode(w.detach().to(_BF16).contiguous(), recipe.fprop.w, None)[0], _BF16)
        for w in weights
    ]
    if isinstance(x_col, native.Packed):
        return [*outputs, x_col.codes, x_col.scales, x_col.outer]
    return [*outputs, x.clone(), x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.float32)]


@_forward.register_fake
def _(x: Tensor, weights: list[Tensor], state: Tensor, spec: str, producers: list[int]) -> list[Tensor]:
    t, k = x.shape
    outputs = [x.new_empty((t, w.shape[0])) for w in weights]
    name = _decode(spec).wgrad.x.format
    if name == "bf16":
        saved = [torch.empty_like(x), x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.float32)]
        return [*outputs, *saved]
    fmt = formats.get(name)
    count = -(-k // fmt.stripe_rows) if fmt.outer == "stripe" else 1
    return [
        *outputs,
        x.new_empty((k, round_up(t, 32) // 2), dtype=torch.uint8),
        x.new_empty((*atoms(k, -(-t // fmt.block_cols)), ATOM), dtype=torch.uint8),
        x.new_empty(count, dtype=torch.float32),
    ]


@torch.library.custom_op("fp4core::native_linears_backward", mutates_args=())
def _backward(
    grads: list[Tensor],
    saved: list[Tensor],
    weights: list[Tensor],
    state: Tensor,
    spec: str,
    producers: list[int],
    need_x: bool,
    need_w: list[bool],
) -> list[Tensor]:
    """[dX BF16 [T, K], dW_i in the weight's dtype [N_i, K], ...]; empty [0] where not needed."""
    recipe = _decode(spec)
    dgrad, wgrad = recipe.dgrad, recipe.wgrad
    k = weights[0].shape[1]
    x_col = saved[0].t() if wgrad.x.format == "bf16" else None
    total, dws = None, []
    for dy, w, producer, needed in zip(grads, weights, producers, need_w):
        dy, (t, n) = dy.contiguous(), dy.shape
        row, col = _encode(
            dy,
            dgrad.dy if need_x else None,
            wgrad.dy if needed else None,
            row_stream=_stream(dgrad.dy, state, producer + specs.ROW_DY, n) if need_x else None,
            col_stream=_stream(wgrad.dy, state, producer + specs.COLUMN_DY, n) if needed else None,
        )
        if need_x:
            w_col = _encode(w.detach().to(_BF16).contiguous(), None, dgrad.w)[1]
            part = _contract(row, w_col, _BF16 if len(grads) == 1 else torch.float32)
            total = part if total is None else total.add_(part)
        if needed and x_col is None:
            x_col = native.Packed(*saved, wgrad.x.format, (k, t))
        dws.append(_contract(col, x_col, w.dtype) if needed else w.new_empty(0))
    return [weights[0].new_empty(0, dtype=_BF16) if total is None else total.to(_BF16), *dws]


@_backward.register_fake
def _(
    grads: list[Tensor],
    saved: list[Tensor],
    weights: list[Tensor],
    state: Tensor,
    spec: str,
    producers: list[int],
    need_x: bool,
    need_w: list[bool],
) -> list[Tensor]:
    dx = grads[0].new_empty((grads[0].shape[0], weights[0].shape[1]) if need_x else 0)
    return [dx, *(w.new_empty(w.shape if needed else 0) for w, needed in zip(weights, need_w))]


def _save(ctx, inputs, output) -> None:
    x, weights, state, ctx.spec, ctx.producers = inputs
    ctx.tokens, ctx.count = x.shape[0], len(weights)
    ctx.save_for_backward(state, *output[-3:], *weights)


def _autograd(ctx, grads: list[Tensor]):
    state, codes, scales, outer, *weights = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[0], list(ctx.needs_input_grad[1])
    given = [
        state.new_zeros((ctx.tokens, w.shape[0]), dtype=_BF16) if dy is None else dy
        for dy, w in zip(grads[: ctx.count], weights)
    ]
    saved = [codes, scales, outer]
    dx, *dws = _backward(given, saved, weights, state, ctx.spec, ctx.producers, need_x, need_w)
    dws = [dw if needed else None for dw, needed in zip(dws, need_w)]
    return dx if need_x else None, dws, None, None, None


_forward.register_autograd(_autograd, setup_context=_save)


def linears(x: Tensor, weights: list[Tensor], state: Tensor, spec: str, producers: list[int]) -> list[Tensor]:
    """Outputs Y_i of linears of one input; arguments as in ``fp4core.ops.linear``."""
    return _forward(x, weights, state, spec, producers)[:-3]


if not interpreted() and not backends()["native"].available:
    raise ValueError(f"linear backend 'native' cannot run here: {backends()['native'].reason}")
register_backend("native", linears)
