"""The Llama of the experiment: grouped-query attention, RoPE, RMSNorm, SiLU-gated feed-forward.

Shapes: B sequences, S positions, D hidden, H query heads, G key/value heads, d head_dim, F ffn, V vocab.

Parameters are FP32 (any dtype works) under Hugging Face's names, so ``state_dict`` is theirs; activations
are in ``compute_dtype``, BF16 between layers, with norms, rotation, softmax, SiLU and loss in FP32 inside.
Linears are ``nn.Linear`` until ``fp4core.convert`` replaces the seven of each block; attention, norms,
embedding and head never leave BF16. Causal over the whole sequence: packed documents see each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp4core.model.head import OutputHead
from fp4core.model.recompute import block_policy, checkpointed
from fp4core.model.rope import rope_inv_freq, rope_tables, rotate
from fp4core.ops.fused import fused_block
from fp4core.ops.linear import Linear, linear_group
from fp4core.recipe import ModelConfig

# cuDNN first: 0.95 + 2.81 ms forward + backward at 8192 on an H200, against FlashAttention 2's 1.74 + 4.92
_SDPA_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def project(layers: Sequence[nn.Linear], x: Tensor, state: Tensor | None) -> list[Tensor]:
    """Outputs of linears of one input, converted or not."""
    if isinstance(layers[0], Linear):
        return linear_group(layers, x, state)
    return [F.linear(x, layer.weight.to(x.dtype)) for layer in layers]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in FP32 inside, one rounding to x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        width = config.heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, width, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, state: Tensor | None) -> Tensor:
        q, k, v = project([self.q_proj, self.k_proj, self.v_proj], x, state)
        q = rotate(q.unflatten(-1, (self.heads, self.head_dim)), cos, sin)
        k = rotate(k.unflatten(-1, (self.kv_heads, self.head_dim)), cos, sin)
        v = v.unflatten(-1, (self.kv_heads, self.head_dim))
        mixed = _attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return project([self.o_proj], mixed.transpose(1, 2).flatten(2), state)[0]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q [B, H, S, d] over k, v [B, G, S, d], in q's dtype."""
    if q.device.type == "cpu":  # FP32 inside: faster there than BF16, and one rounding
        out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True)
        return out.to(q.dtype)
    with sdpa_kernel(_SDPA_ORDER, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        gate, up = project([self.gate_proj, self.up_proj], x, state)
        inner = (F.silu(gate.float()) * up.float()).to(x.dtype)
        return project([self.down_proj], inner, state)[0]


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.mlp = FeedForward(config)
        self.activation_checkpoint = "none"  # of this block: none, selective or full

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, state: Tensor | None) -> Tensor:
        # inside forward, so that a compiled forward holds it and FSDP's hooks stay outside the recomputation
        return checkpointed(self.activation_checkpoint, self._forward, h, cos, sin, state)

    def _forward(self, h: Tensor, cos: Tensor, sin: Tensor, state: Tensor | None) -> Tensor:
        fused = fused_block(self, h)
        if fused is not None:
            return fused(self, h, cos, sin, state)
        h = h + self.self_attn(self.input_layernorm(h), cos, sin, state)
        return h + self.mlp(self.post_attention_layernorm(h), state)


class Decoder(nn.Module):
    """Embedding, blocks and final norm: what Hugging Face calls ``model``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = RMSNorm(config.hidden, config.rms_eps)


class Llama(nn.Module):
    """Decoder-only language model; parameters are uninitialised until ``init_weights`` or a load.

    Args:
        config: the architecture.
        compute_dtype: BF16, or FP32 to compare with another implementation.
        activation_checkpoint: "none"; "full" recomputes each block in backward; "selective" keeps the results
            of matrix products and attention and recomputes the element-wise rest; "selective-8" recomputes
            every eighth block. Gradients are the same.
        head_chunk: tokens whose logits exist at once in the loss (``fp4core.model.head``).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        compute_dtype: torch.dtype = torch.bfloat16,
        activation_checkpoint: str = "none",
        head_chunk: int = 4096,
    ) -> None:
        super().__init__()
        if config.heads % config.kv_heads or config.head_dim % 2:
            raise ValueError(
                f"Llama: got {config.heads} heads, {config.kv_heads} kv_heads, head_dim {config.head_dim}; "
                "needed heads to be a multiple of kv_heads and head_dim even"
            )
        self.config, self.compute_dtype = config, compute_dtype
        self._inv_freq: list[float] = rope_inv_freq(config).tolist()
        self._rope: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self.model = Decoder(config)
        tied = config.tie_embeddings
        self.lm_head = OutputHead(
            config.hidden, config.vocab, config.output_head, tied=tied, chunk=head_chunk
        )

        self.activation_checkpoint = activation_checkpoint

    @property
    def activation_checkpoint(self) -> str:
        """Policy of the blocks (``fp4core.model.recompute``); may be set at any time."""
        return self._activation_checkpoint

    @activation_checkpoint.setter
    def activation_checkpoint(self, policy: str) -> None:
        policies = [block_policy(policy, i) for i in range(len(self.model.layers))]
        for block, own in zip(self.model.layers, policies):
            block.activation_checkpoint = own
        self._activation_checkpoint = policy

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def inv_freq(self) -> Tensor:
        """FP32 [head_dim / 2] rotary frequencies; no cast of the model can change them."""
        return torch.tensor(self._inv_freq, dtype=torch.float32)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens [B, S] int64 -> logits [B, S, V] in the compute dtype.

        With targets [B, S] int64 (-100: no loss there) -> FP32 losses [B, S] in nats per token. Raises
        ValueError when S is longer than ``config.max_position``, and under autocast.
        """
        length, device = tokens.shape[1], tokens.device
        if torch.is_autocast_enabled(device.type):
            raise ValueError("Llama: got an autocast region, needed none: compute_dtype says what is rounded")
        if length > self.config.max_position:
            raise ValueError(
                f"Llama: got {length} positions, needed at most max_position = {self.config.max_position}"
            )
        cos, sin = self._rope_tables(length, device)
        state = self._random_state()
        h = self.model.embed_tokens(tokens).to(self.compute_dtype)
        for block in self.model.layers:
            h = block(h, cos, sin, state)
        tied = self.model.embed_tokens.weight if self.config.tie_embeddings else None
        return self.lm_head(self.model.norm(h), targets, tied)

    def _rope_tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The last tables again: making them copies from the host, which waits for the device's queue."""
        key = (length, device)
        if key not in self._rope:
            with torch.inference_mode(False):  # training may use what an evaluation made
                self._rope = {key: rope_tables(self._inv_freq, length, device)}
        return self._rope[key]

    def _random_state(self) -> Tensor | None:
        """This forward pass's state, handed to the blocks so that a recomputation draws the same bits."""
        first = self.model.layers[0].self_attn.q_proj
        return first.sr_state if isinstance(first, Linear) else None
