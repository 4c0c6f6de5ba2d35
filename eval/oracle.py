"""Llama's forward pass spelled out, in any precision: the truth that the export gate measures against.

Obvious and slow; it shares no code with the trained model or with transformers. Weights are Hugging Face
named, cast to the compute dtype one block at a time, so FP64 fits where FP32 does.

    T tokens, H hidden, A heads, G key/value heads, D head_dim, V vocabulary
    h = E[tokens];   per block:  h += Wo attend(rope(Wq n), rope(Wk n), Wv n),  n = rms(h)
                                 h += W2 (silu(W1 m) * (W3 m)),                 m = rms(h)
    logits = Wout rms(h);   rms(x) = g x / sqrt(mean(x^2) + eps)

RoPE rotates the pairs (i, i + D/2) by the angle position * inv_freq[i]. The angle is the FP32 product, as
in training: its rounding is part of the model's definition, not an error of an implementation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fp4core.recipe import ModelConfig, RopeConfig


def inv_freq(rope: RopeConfig, head_dim: int) -> Tensor:
    """Rotation frequencies FP64 [D/2], radians per position, with Llama 3.1's scaling.

    Wavelengths above original/low are slowed by `factor`, those below original/high stay, between them the
    two are blended linearly in original/wavelength.
    """
    base = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.factor == 1.0:
        return base
    turns = rope.original_max_position * base / (2 * math.pi)  # full turns within the original context
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return blend * base + (1 - blend) * base / rope.factor


def logits(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    tokens_T: Tensor,
    *,
    table: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Logits [T, V] of one sequence, in `dtype`. `table` is the FP32 inv_freq [D/2] used in training."""

    def get(name: str) -> Tensor:
        return weights[name].to(device=tokens_T.device, dtype=dtype)

    angle = torch.arange(len(tokens_T), device=tokens_T.device, dtype=torch.float32)[:, None] * table[None]
    cos, sin = angle.to(dtype).cos(), angle.to(dtype).sin()
    h_TH = get("model.embed_tokens.weight")[tokens_T]
    for block in range(config.blocks):
        prefix = f"model.layers.{block}."
        n_TH = _rms(h_TH, get(prefix + "input_layernorm.weight"), config.rms_eps)
        h_TH = h_TH + _attention(n_TH, get, prefix + "self_attn.", config, cos, sin)
        m_TH = _rms(h_TH, get(prefix + "post_attention_layernorm.weight"), config.rms_eps)
        gate, up = (m_TH @ get(f"{prefix}mlp.{name}_proj.weight").T for name in ("gate", "up"))
        h_TH = h_TH + (gate * gate.sigmoid() * up) @ get(prefix + "mlp.down_proj.weight").T
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return _rms(h_TH, get("model.norm.weight"), config.rms_eps) @ get(head).T


def _rms(x_TH: Tensor, gain_H: Tensor, eps: float) -> Tensor:
    return gain_H * x_TH / (x_TH.square().mean(-1, keepdim=True) + eps).sqrt()


def _rotate(x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_TD.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _attention(n_TH: Tensor, get, prefix: str, config: ModelConfig, cos: Tensor, sin: Tensor) -> Tensor:
    """Causal attention; query head i reads key/value head i // (A / G). Rows in pieces to bound memory."""
    size, length = config.head_dim, len(n_TH)
    q, k, v = (
        (n_TH @ get(f"{prefix}{name}_proj.weight").T).view(length, -1, size).transpose(0, 1) for name in "qkv"
    )
    heads = []
    for i in range(config.heads):
        j = i // (config.heads // config.kv_heads)
        q_TD, k_TD = _rotate(q[i], cos, sin), _rotate(k[j], cos, sin)
        pieces = []
        for start in range(0, length, 1024):
            stop = min(start + 1024, length)
            scores = q_TD[start:stop] @ k_TD[:stop].T / math.sqrt(size)
            future = torch.ones_like(scores, dtype=torch.bool).triu(start + 1)
            pieces.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[j][:stop])
        heads.append(torch.cat(pieces))
    return torch.cat(heads, dim=-1) @ get(f"{prefix}o_proj.weight").T
