"""The oracle's linear layers: decoded operands, FP32 GEMMs, any device.

Shapes: T tokens, K input features, N_i output features of the i-th linear; x_TK, w_NK, dy_TN.
The formulas stand in ``fp4core.ops.linear``. Saved for backward: x in BF16, the weights themselves and three
integers; operands are decoded again from them, so that nothing in FP32 outlives the forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4core import formats
from fp4core.ops import held
from fp4core.ops import spec as specs
from fp4core.recipe import Operand
from fp4core.reference import SRKey, fake_quant_2d, rotate

_BF16 = torch.bfloat16
_ROW, _COLUMN = 1, 0  # contraction axis of a row view Qr and of a column view Qc


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """FP32 GEMM, also where the caller's autocast would make it a BF16 one."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


class _Operands:
    """Decodes operands of one layer call with its random state and held maxima."""

    def __init__(self, state: Tensor, spec: str) -> None:
        self.seed, self.step, self.token = state.tolist()
        self.spec = spec

    def decode(self, x: Tensor, op: Operand, producer: int, axis: int, column: int) -> Tensor:
        """FP32 values of x [R, C] with blocks (and Hadamard) along ``axis``, in x's layout.

        ``column``: which of the layer's held maxima it may use (``held.X``, ``held.W``, ``held.DY``).
        """
        if op.format == "bf16":
            return rotate(x.to(_BF16).float(), op.hadamard, axis)
        key = None
        if op.rounding == "stochastic":
            key = SRKey(self.seed, self.step, producer, self.token * x.shape[1])
        amax = held.reference(x, op, self.spec, producer, column)
        fmt = formats.get(op.format)
        return fake_quant_2d(x, fmt, axis=axis, hadamard=op.hadamard, key=key, held_amax=amax)


@torch.library.custom_op("fp4core::reference_linears", mutates_args=())
def linears(x: Tensor, weights: list[Tensor], state: Tensor, spec: str, producers: list[int]) -> list[Tensor]:
    """Y_i = Qr(X) Qr(W_i)^T in BF16 [T, N_i]; arguments as in ``fp4core.ops.linear``."""
    fprop, operands, outputs = specs.decode(spec).fprop, _Operands(state, spec), []
    x_TK = None
    for w_NK, producer in zip(weights, producers):
        if x_TK is None or fprop.x.rounding == "stochastic":
            x_TK = operands.decode(x, fprop.x, producer + specs.ROW_X, _ROW, held.X)
        w_NK = operands.decode(w_NK, fprop.w, producer, _ROW, held.W)
        outputs.append(_matmul(x_TK, w_NK.t()).to(_BF16))
    held.share_x(spec, producers)
    return outputs


@linears.register_fake
def _(x: Tensor, weights: list[Tensor], state: Tensor, spec: str, producers: list[int]) -> list[Tensor]:
    return [x.new_empty((x.shape[0], w.shape[0])) for w in weights]


@torch.library.custom_op("fp4core::reference_linears_backward", mutates_args=())
def _backward(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    state: Tensor,
    spec: str,
    producers: list[int],
    need_x: bool,
    need_w: list[bool],
) -> list[Tensor]:
    """[dX BF16 [T, K], dW_i in the weight's dtype [N_i, K], ...]; empty [0] where not needed."""
    recipe, operands = specs.decode(spec), _Operands(state, spec)
    dx_TK = x_TK = None
    dws = []
    for dy_TN, w_NK, producer, needed in zip(grads, weights, producers, need_w):
        if need_x:
            row_dy = operands.decode(dy_TN, recipe.dgrad.dy, producer + specs.ROW_DY, _ROW, held.DY)
            column_w = operands.decode(w_NK, recipe.dgrad.w, producer, _COLUMN, held.W)
            # FP32 sum over the linears of one input, rounded once below
            dx = _matmul(row_dy, column_w)
            dx_TK = dx if dx_TK is None else dx_TK.add_(dx)
        if not needed:
            dws.append(w_NK.new_empty(0))
            continue
        column_dy = operands.decode(dy_TN, recipe.wgrad.dy, producer + specs.COLUMN_DY, _COLUMN, held.DY)
        if x_TK is None or recipe.wgrad.x.rounding == "stochastic":
            x_TK = operands.decode(x, recipe.wgrad.x, producer + specs.COLUMN_X, _COLUMN, held.X)
        dws.append(_matmul(column_dy.t(), x_TK).to(w_NK.dtype))
    return [x.new_empty(0) if dx_TK is None else dx_TK.to(_BF16), *dws]


@_backward.register_fake
def _(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    state: Tensor,
    spec: str,
    producers: list[int],
    need_x: bool,
    need_w: list[bool],
) -> list[Tensor]:
    dws = [w.new_empty(w.shape if needed else 0) for w, needed in zip(weights, need_w)]
    return [x.new_empty(x.shape if need_x else 0), *dws]


def _save(ctx, inputs, output) -> None:
    x, weights, state, ctx.spec, ctx.producers = inputs
    ctx.save_for_backward(x, state, *weights)


def _autograd(ctx, grads: list[Tensor]):
    x, state, *weights = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[0], list(ctx.needs_input_grad[1])
    dx, *dws = _backward(grads, x, weights, state, ctx.spec, ctx.producers, need_x, need_w)
    dws = [dw if needed else None for dw, needed in zip(dws, need_w)]
    return dx if need_x else None, dws, None, None, None


linears.register_autograd(_autograd, setup_context=_save)
