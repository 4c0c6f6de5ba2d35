"""A Llama block as two ops, forward and backward, with every boundary fused that its formats allow.

    forward    norm -> QKV -> RoPE -> attention -> Wo -> + x, norm -> W1, W3 -> SiLU up -> W2 -> + x'
    backward   the same boundaries the other way, each gradient encoded by the kernel that makes it

Same parameters, same recipe, same random bits as the unfused block; q, k, v and gate, up are one product each
(their encoded weights lie side by side; the parameters do not move). Differences from calling the layers one
by one, all in roundings that no format sees: dX of a group is rounded once, RMSNorm and SiLU are the
kernels'.

Saved for backward: x, qkv after RoPE, the attention output, the stream after attention, gate and up, in BF16,
and three FP32 vectors. No encoded activation outlives its product: column operands are made in backward by
the kernels that read their source anyway, so a change of plan never meets an old carrier.

    T tokens = B sequences of S     D hidden     N = (H + 2 G) d     F ffn
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp4core.kernels import fused_rope, row_scale
from fp4core.ops import held
from fp4core.ops.carrier_attention import attention_backward, attention_forward
from fp4core.ops.carrier_boundary import (
    gradient_scales,
    norm_backward,
    norm_forward,
    rope_backward,
    silu_backward,
    silu_forward,
)
from fp4core.ops.carrier_encode import encode, encode_gradients, encode_weights
from fp4core.ops.carrier_gemm import Carrier, contract, sum_of_products
from fp4core.ops.carrier_groups import Group, group
from fp4core.ops.carrier_plan import X_COL, X_ROW
from fp4core.ops.fused import register_fused_block
from fp4core.ops.linear import Linear

_BF16 = torch.bfloat16
_HEAD = 128
# Order of the seven weights, and which of them share an input.
WEIGHTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_GROUPS = (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7))


def _groups(producers: list[Tensor], spec: str, device: torch.device) -> list[Group]:
    ids = [int(p) for p in producers]
    return [group(ids[part], spec, device) for part in _GROUPS]


def _heads(qkv: Tensor, weights: Sequence[Tensor], batch: int) -> list[Tensor]:
    """Views q, k, v [B, heads, S, 128] of qkv [T, N]."""
    out, at = [], 0
    for w in weights[:3]:
        n = w.shape[0]
        out.append(qkv[:, at : at + n].view(batch, -1, n // _HEAD, _HEAD).transpose(1, 2))
        at += n
    return out


def _project(g: Group, x: Carrier, weights: Sequence[Tensor]) -> Tensor:
    """BF16 [T, sum N]: outputs of a group's linears side by side."""
    w = encode_weights(g, weights)
    if w.joint is not None:
        return contract(x, w.joint, _BF16)
    rows, total = x.data.shape[0], sum(w.shape[0] for w in weights)
    out, at = x.data.new_empty((rows, total), dtype=_BF16), 0
    for c in w.rows:
        contract(x, c, _BF16, out[:, at : at + c.data.shape[0]])
        at += c.data.shape[0]
    return out


def _weight_gradients(cols: list[Carrier], x: Carrier, weights: Sequence[Tensor]) -> Tensor:
    """[sum N, K] in the weights' dtype: dW of a group's linears, one above the other."""
    dtype = weights[0].dtype
    if len(cols) == 1:
        return contract(cols[0], x, dtype)
    out, at = x.data.new_empty((sum(w.shape[0] for w in weights), x.data.shape[0]), dtype=dtype), 0
    for c in cols:
        contract(c, x, dtype, out[at : at + c.data.shape[0]])
        at += c.data.shape[0]
    return out


@torch.library.custom_op("fp4core::carrier_block", mutates_args=())
def _forward(
    x: Tensor,
    norms: list[Tensor],
    weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    state: Tensor,
    producers: list[Tensor],
    spec: str,
    eps: float,
) -> list[Tensor]:
    """[y [B, S, D], qkv [T, N], attention [T, H d], stream [T, D], gate | up [T, 2 F], rstd, rstd', lse]."""
    batch, length, hidden = x.shape
    qkv_group, o_group, ffn_group, down_group = _groups(producers, spec, x.device)
    flat = x.reshape(-1, hidden)
    _, rows, rstd1 = norm_forward(qkv_group, flat, None, norms[0], eps)
    qkv = _project(qkv_group, rows, weights[:3])
    rotated = (weights[0].shape[0] + weights[1].shape[0]) // _HEAD
    fused_rope.rope_forward_(qkv, rotated, length, fused_rope.rope_table(cos, sin, planes=True))
    attended, lse = attention_forward(*_heads(qkv, weights, batch))
    mixed = attended.transpose(1, 2).reshape(flat.shape[0], -1)
    rows, _ = encode(o_group, mixed, X_ROW, None, state, o_group.producers[0])
    delta = _project(o_group, rows, weights[3:4])
    stream, rows, rstd2 = norm_forward(ffn_group, flat, delta, norms[1], eps)
    gate_up = _project(ffn_group, rows, weights[4:6])
    ffn = gate_up.shape[1] // 2
    rows = silu_forward(down_group, gate_up[:, :ffn], gate_up[:, ffn:])
    y = stream + _project(down_group, rows, weights[6:])
    for g in (qkv_group, ffn_group):
        held.share_x(spec, g.producers)
    return [y.view(x.shape), qkv, mixed, stream, gate_up, rstd1, rstd2, lse]


@_forward.register_fake
def _(
    x: Tensor,
    norms: list[Tensor],
    weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    state: Tensor,
    producers: list[Tensor],
    spec: str,
    eps: float,
) -> list[Tensor]:
    batch, length, hidden = x.shape
    t = batch * length
    q, k = weights[0].shape[0], weights[1].shape[0]
    bf16 = {"dtype": _BF16}
    fp32 = {"dtype": torch.float32}
    return [
        x.new_empty(x.shape),
        x.new_empty((t, q + 2 * k), **bf16),
        x.new_empty((t, q), **bf16),
        x.new_empty((t, hidden), **bf16),
        x.new_empty((t, 2 * weights[4].shape[0]), **bf16),
        x.new_empty(t, **fp32),
        x.new_empty(t, **fp32),
        x.new_empty(t * q // _HEAD, **fp32),
    ]


@torch.library.custom_op("fp4core::carrier_block_backward", mutates_args=())
def _backward(
    dy: Tensor,
    x: Tensor,
    saved: list[Tensor],
    norms: list[Tensor],
    weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    state: Tensor,
    producers: list[Tensor],
    spec: str,
) -> list[Tensor]:
    """[dx, dnorm, dnorm', dW of q|k|v, of o, of gate|up, of down]; weights' gradients stacked per group."""
    batch, length, hidden = x.shape
    qkv, mixed, stream, gate_up, rstd1, rstd2, lse = saved
    qkv_group, o_group, ffn_group, down_group = _groups(producers, spec, x.device)
    dy = dy.reshape(-1, hidden).contiguous()
    ffn = gate_up.shape[1] // 2

    # of a token's gradient on its way through the block; what attention mixes gets scales of its own
    scales = gradient_scales(down_group, dy)
    rows, cols = encode_gradients(down_group, [dy], state, True, True, scales)
    dh = [sum_of_products(rows, encode_weights(down_group, weights[6:]).columns)]
    rows, cols_ffn, dw_down = silu_backward(
        ffn_group,
        down_group,
        dh,
        gate_up[:, :ffn],
        gate_up[:, ffn:],
        state,
        lambda h: _weight_gradients(cols, h, weights[6:]),
        scales,
    )
    dnormed = sum_of_products(rows, encode_weights(ffn_group, weights[4:6]).columns)
    dstream, normed, rows, cols, dnorm2 = norm_backward(
        ffn_group, o_group, dnormed, stream, dy, norms[1], rstd2, state, scales
    )
    dw_ffn = _weight_gradients(cols_ffn, normed, weights[4:6])
    del cols_ffn, normed
    dmixed = sum_of_products(rows, encode_weights(o_group, weights[3:4]).columns)
    if scales is not None:
        row_scale.unscale_(dmixed, scales)
    _, mixed_col = encode(o_group, mixed, None, X_COL, state, o_group.producers[0])
    dw_o = _weight_gradients(cols, mixed_col, weights[3:4])
    del mixed_col, rows, cols

    shape = (batch, length, -1, _HEAD)
    q, k, v = _heads(qkv, weights, batch)
    grads = attention_backward(
        dmixed.view(shape).transpose(1, 2), q, k, v, mixed.view(shape).transpose(1, 2), lse
    )
    rows, cols, scales, outliers = rope_backward(qkv_group, grads, cos, sin, state)
    columns = encode_weights(qkv_group, weights[:3]).columns
    dnormed = sum_of_products(rows, columns)
    if outliers is not None:
        outliers.complete(dnormed, columns[0])
    dx, normed, _, _, dnorm1 = norm_backward(
        qkv_group, None, dnormed, x.reshape(-1, hidden), dstream, norms[0], rstd1, state, scales
    )
    dw_qkv = _weight_gradients(cols, normed, weights[:3])
    return [dx.view(x.shape), dnorm1, dnorm2, dw_qkv, dw_o, dw_ffn, dw_down]


@_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    saved: list[Tensor],
    norms: list[Tensor],
    weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    state: Tensor,
    producers: list[Tensor],
    spec: str,
) -> list[Tensor]:
    stacked = [
        weights[part][0].new_empty((sum(w.shape[0] for w in weights[part]), weights[part][0].shape[1]))
        for part in _GROUPS
    ]
    return [x.new_empty(x.shape), *(n.new_empty(n.shape) for n in norms), *stacked]


def _save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, norms, weights, cos, sin, state, producers, ctx.spec, _ = inputs
    ctx.save_for_backward(x, cos, sin, state, *producers, *output[1:], *norms, *weights)


def _autograd(ctx: Any, grads: list[Tensor]):
    x, cos, sin, state, *rest = ctx.saved_tensors
    producers, saved, norms, weights = rest[:7], rest[7:14], rest[14:16], rest[16:]
    dx, dn1, dn2, *stacked = _backward(
        grads[0], x, saved, norms, weights, cos, sin, state, producers, ctx.spec
    )
    dws: list[Tensor] = []
    for part, dw in zip(_GROUPS, stacked):
        dws += dw.split([w.shape[0] for w in weights[part]])
    return dx, [dn1, dn2], dws, None, None, None, [None] * len(producers), None, None


_forward.register_autograd(_autograd, setup_context=_save)


def layers(block: nn.Module) -> list[nn.Module]:
    """The seven linears of a block of ``fp4core.model``."""
    attention, mlp = block.self_attn, block.mlp
    return [getattr(attention if i < 4 else mlp, name) for i, name in enumerate(WEIGHTS)]


def can_fuse(block: nn.Module, h: Tensor) -> bool:
    """Whether ``block_forward`` computes this block on this input.

    It does for seven ``fp4core.Linear`` of one recipe, without biases or hooks, BF16 activations, heads of
    128, dimensions that are multiples of 128 and sequences of multiples of 32.
    """
    found = layers(block)
    first = found[0]
    if h.dtype != _BF16 or h.dim() != 3 or block.self_attn.head_dim != _HEAD:
        return False
    plain = all(
        isinstance(m, Linear)
        and m.spec == first.spec
        and m.bias is None
        and m.backend == first.backend
        and m.weight.requires_grad == first.weight.requires_grad
        and not (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)
        for m in found
    )
    return plain and h.shape[1] % 32 == 0 and all(n % 128 == 0 for m in found for n in m.weight.shape)


def block_forward(block: nn.Module, h: Tensor, cos: Tensor, sin: Tensor, state: Tensor) -> Tensor:
    """The block's output [B, S, D] for h [B, S, D] BF16; ``can_fuse`` must hold.

    Args:
        block: a block of ``fp4core.model`` (input_layernorm, self_attn, post_attention_layernorm, mlp).
        h: BF16 hidden states.
        cos, sin: FP32 [S, 64], as ``fp4core.model.rope.rope_tables`` gives.
        state: int64 [3] random state; a private copy, as for ``fp4core.ops.linear``.
    """
    found = layers(block)
    producers = [m.producer_cpu for m in found]
    norms = [block.input_layernorm.weight, block.post_attention_layernorm.weight]
    weights = [m.weight for m in found]
    spec, eps = found[0].spec, block.input_layernorm.eps
    return _forward(h.contiguous(), norms, weights, cos, sin, state, producers, spec, eps)[0]


register_fused_block("carrier", can_fuse, block_forward)
