"""The oracle's linear layers: decoded operands, FP32 GEMMs, any device.

Shapes: T tokens, K input features, N_i output features of the i-th linear; x_TK, w_NK, dy_TN.
The formulas stand in ``fp4core.ops.linear``. Saved for backward: x in BF16, the weights themselves and three
integers; operands are decoded again from them, so that nothing in FP32 outlives the forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4core.ops import spec as specs
from fp4core.ops.quantize import SRKey, fake_quant
from fp4core.recipe import Operand

_BF16 = torch.bfloat16


class _Operands:
    """Decodes operands of one layer call with its random state."""

    def __init__(self, state: Tensor) -> None:
        self.seed, self.step, self.token = state.tolist()

    def decode(self, x: Tensor, op: Operand, producer: int, *, columns: bool = False) -> Tensor:
        """FP32 values of x, or of x^T with blocks along x's rows when ``columns``."""
        if op.format == "bf16" and op.hadamard == "none":
            values = x.to(_BF16).float()
            return values.t() if columns else values
        key = None
        if op.rounding == "stochastic":
            key = SRKey(self.seed, self.step, producer, self.token * x.shape[1])
        return fake_quant(x, op, key=key, transposed=columns)


@torch.library.custom_op("fp4core::reference_linears", mutates_args=())
def linears(x: Tensor, weights: list[Tensor], state: Tensor, spec: str, producers: list[int]) -> list[Tensor]:
    """Y_i = Qr(X) Qr(W_i)^T in BF16 [T, N_i]; arguments as in ``fp4core.ops.linear``."""
    fprop, operands, outputs = specs.decode(spec).fprop, _Operands(state), []
    x_TK = None
    for w_NK, producer in zip(weights, producers):
        if x_TK is None or fprop.x.rounding == "stochastic":
            x_TK = operands.decode(x, fprop.x, producer + specs.ROW_X)
        outputs.append((x_TK @ operands.decode(w_NK, fprop.w, producer).t()).to(_BF16))
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
    recipe, operands = specs.decode(spec), _Operands(state)
    dx_TK = x_KT = None
    dws = []
    for dy_TN, w_NK, producer, needed in zip(grads, weights, producers, need_w):
        if need_x:
            dy = operands.decode(dy_TN, recipe.dgrad.dy, producer + specs.ROW_DY)
            w_KN = operands.decode(w_NK, recipe.dgrad.w, producer, columns=True)
            # FP32 sum over the linears of one input, rounded once below
            dx_TK = dy @ w_KN.t() if dx_TK is None else torch.addmm(dx_TK, dy, w_KN.t())
        if not needed:
            dws.append(w_NK.new_empty(0))
            continue
        dy_NT = operands.decode(dy_TN, recipe.wgrad.dy, producer + specs.COLUMN_DY, columns=True)
        if x_KT is None or recipe.wgrad.x.rounding == "stochastic":
            x_KT = operands.decode(x, recipe.wgrad.x, producer + specs.COLUMN_X, columns=True)
        dws.append((dy_NT @ x_KT.t()).to(w_NK.dtype))
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
