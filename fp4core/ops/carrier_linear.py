"""The carrier backend of ``fp4core.Linear``: exact FP4 contractions on GPUs without FP4 units.

The contract is that of ``fp4core.ops.linear`` (several linears of one input). Two custom ops, forward and
backward, with fakes and autograd; everything they remember between calls lives in ``carrier_groups`` and
changes no result. Saved for backward: the weights themselves, and the column carrier of x alone, one byte per
value where FP8 holds it (BF16's linear saves two), so Wgrad never reads x again.

How a saved operand of a fixed size survives a span that no FP8 type holds: its codes and scales, packed, need
0.53 bytes per value and fit in the same buffer; ``_unpack`` decodes them to a BF16 carrier.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4core import formats
from fp4core.kernels.producers import CARRIERS
from fp4core.ops import (
    carrier_block,  # noqa: F401  (registers itself as this backend's fused block)
    held,
)
from fp4core.ops import spec as specs
from fp4core.ops.carrier_encode import encode, encode_gradients, encode_weights
from fp4core.ops.carrier_gemm import Carrier, contract, sum_of_products
from fp4core.ops.carrier_groups import Group, fp8_capable, group
from fp4core.ops.carrier_plan import X_COL, X_ROW, is_mx
from fp4core.ops.linear import register_backend
from fp4core.ops.quantize import QuantizedTensor, quantize
from fp4core.recipe import LinearRecipe

_BF16 = torch.bfloat16
_KINDS = ("e4m3", "e5m2", "packed", "bf16")


def _saves_bytes(recipe: LinearRecipe, device: torch.device) -> bool:
    """Whether x's column view is saved in bytes (FP8 or packed) rather than BF16: known without data."""
    return is_mx(recipe.wgrad.x) and is_mx(recipe.wgrad.dy) and fp8_capable(device)


@torch.library.custom_op("fp4core::carrier_linears", mutates_args=())
def _forward(
    x: Tensor, weights: list[Tensor], state: Tensor, spec: str, producers: list[int]
) -> list[Tensor]:
    """[Y_i BF16 [T, N_i] ..., saved x, its outer scales FP32 [n], its (kind, ref) int64 [2] on the CPU].

    x is saved as bytes [K, T] or BF16 [T, K].
    """
    g = group(producers, spec, x.device)
    w = encode_weights(g, weights)
    x_row, x_col = encode(g, x, X_ROW, X_COL, state, g.producers[0])
    outputs = [contract(x_row, w_row, _BF16) for w_row in w.rows]
    held.share_x(spec, producers)
    return [*outputs, *_pack(g, x, x_col)]


@_forward.register_fake
def _(x: Tensor, weights: list[Tensor], state: Tensor, spec: str, producers: list[int]) -> list[Tensor]:
    recipe = specs.decode(spec)
    dtype = torch.uint8 if _saves_bytes(recipe, x.device) else _BF16
    k, t = x.shape[1], x.shape[0]
    return [
        *(x.new_empty((t, w.shape[0])) for w in weights),
        x.new_empty((k, t) if dtype == torch.uint8 else (t, k), dtype=dtype),
        x.new_empty((_outer_count(recipe, k),), dtype=torch.float32),
        torch.empty(2, dtype=torch.int64, device="cpu"),
    ]


def _outer_count(recipe: LinearRecipe, k: int) -> int:
    if recipe.wgrad.x.format == "bf16":
        return 0
    outer = formats.get(recipe.wgrad.x.format).outer
    return 0 if outer == "constant" else 1 if outer == "tensor" else -(-k // 256)


def _pack(g: Group, x: Tensor, c: Carrier) -> list[Tensor]:
    """x's column carrier as the op's last three outputs."""
    # a copy: compiled code takes an op's outputs for allocations of their own, at addresses of 16 bytes
    outer = x.new_empty(0, dtype=torch.float32) if c.outer is None else c.outer.clone()
    if not _saves_bytes(g.recipe, x.device):
        rows = c.data.t()  # [T, K], as the producer wrote it
        rows = rows.clone() if rows.data_ptr() == x.data_ptr() else rows.contiguous()
        return [rows, outer, torch.tensor([_KINDS.index("bf16"), c.ref])]
    if c.fp8:
        kind = "e5m2" if c.data.dtype == torch.float8_e5m2 else "e4m3"
        return [c.data.contiguous().view(torch.uint8), outer, torch.tensor([_KINDS.index(kind), c.ref])]
    op = g.recipe.wgrad.x
    rotation = None if op.hadamard == "none" else op.hadamard
    q = quantize(x, op.format, hadamard=rotation, transposed=True)
    packed = torch.cat((q.codes, q.block_scale), dim=1)
    saved = x.new_zeros((x.shape[1], x.shape[0]), dtype=torch.uint8)
    saved[:, : packed.shape[1]] = packed
    return [saved, outer, torch.tensor([_KINDS.index("packed"), 0])]


def _unpack(g: Group, saved: Tensor, outer: Tensor, meta: Tensor) -> Carrier:
    """The operand of Wgrad from what ``_pack`` saved."""
    kind, ref = _KINDS[int(meta[0])], int(meta[1])
    op = g.recipe.wgrad.x
    if op.format == "bf16":
        return Carrier(saved.t())
    fmt = formats.get(op.format)
    constant = fmt.outer_constant if fmt.outer == "constant" else 1.0
    if kind == "bf16":
        return Carrier(saved.t(), ref, constant, outer if outer.numel() else None)
    if kind != "packed":
        return Carrier(saved.view(CARRIERS[kind]), ref, constant)
    t = saved.shape[1]
    codes, scales = saved[:, : (t + 1) // 2], saved[:, (t + 1) // 2 :][:, : -(-t // 32)]
    one = torch.ones((), device=saved.device)
    q = QuantizedTensor(codes.contiguous(), scales.contiguous(), one, op.format, saved.shape)
    return Carrier(q.decode_blocks().to(_BF16), 0, constant)


@torch.library.custom_op("fp4core::carrier_linears_backward", mutates_args=())
def _backward(
    grads: list[Tensor],
    saved: Tensor,
    outer: Tensor,
    meta: Tensor,
    weights: list[Tensor],
    state: Tensor,
    spec: str,
    producers: list[int],
    need_x: bool,
    need_w: list[bool],
) -> list[Tensor]:
    """[dX BF16 [T, K], dW_i in the weight's dtype [N_i, K], ...]; empty [0] where not needed."""
    g = group(producers, spec, saved.device)
    grads = [dy.contiguous() for dy in grads]
    dy_rows, dy_cols = encode_gradients(g, grads, state, need_x, any(need_w))
    out = [saved.new_empty(0, dtype=_BF16)]
    if need_x:
        out = [sum_of_products(dy_rows, encode_weights(g, weights).columns)]
    x_col = _unpack(g, saved, outer, meta) if any(need_w) else None
    for i, (w, needed) in enumerate(zip(weights, need_w)):
        out.append(contract(dy_cols[i], x_col, w.dtype) if needed else w.new_empty(0))
    return out


@_backward.register_fake
def _(
    grads: list[Tensor],
    saved: Tensor,
    outer: Tensor,
    meta: Tensor,
    weights: list[Tensor],
    state: Tensor,
    spec: str,
    producers: list[int],
    need_x: bool,
    need_w: list[bool],
) -> list[Tensor]:
    k, t = saved.shape if saved.dtype == torch.uint8 else saved.shape[::-1]
    dx = grads[0].new_empty((t, k) if need_x else 0)
    return [dx, *(w.new_empty(w.shape if needed else 0) for w, needed in zip(weights, need_w))]


def _save(ctx, inputs, output) -> None:
    _, weights, state, ctx.spec, ctx.producers = inputs
    ctx.count = len(weights)
    ctx.save_for_backward(state, *output[-3:], *weights)


def _autograd(ctx, grads: list[Tensor]):
    state, saved, outer, meta, *weights = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[0], list(ctx.needs_input_grad[1])
    tokens = saved.shape[1] if saved.dtype == torch.uint8 else saved.shape[0]
    given = [
        saved.new_zeros((tokens, w.shape[0]), dtype=_BF16) if dy is None else dy
        for dy, w in zip(grads[: ctx.count], weights)
    ]
    dx, *dws = _backward(given, saved, outer, meta, weights, state, ctx.spec, ctx.producers, need_x, need_w)
    dws = [dw if needed else None for dw, needed in zip(dws, need_w)]
    return dx if need_x else None, dws, None, None, None


_forward.register_autograd(_autograd, setup_context=_save)


def linears(x: Tensor, weights: list[Tensor], state: Tensor, spec: str, producers: list[int]) -> list[Tensor]:
    """Outputs Y_i of linears of one input; arguments as in ``fp4core.ops.linear``."""
    return _forward(x, weights, state, spec, producers)[:-3]


register_backend("carrier", linears, ("cuda",))
