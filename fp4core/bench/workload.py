"""What the layer benchmarks share: the 8B block's linears, its configuration, routes by name, groups of
linears."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fp4core.ops import spec as specs
from fp4core.recipe import ModelConfig, RopeConfig, load_recipe

ROUTES = ("mxfp4_sr", "mxfp4_sr_h32", "nvfp4_global", "nvfp4_cta")
# name -> input features, output features of each linear, first layer index
GROUPS = {
    "qkv": (4096, (4096, 1024, 1024), 0),
    "o": (4096, (4096,), 3),
    "gate_up": (4096, (14336, 14336), 4),
    "down": (14336, (4096,), 6),
}
_STD = 0.02


def config_8b(blocks: int, length: int = 8192, vocab: int = 128256) -> ModelConfig:
    """Llama-3.1 8B with fewer blocks."""
    return ModelConfig(
        blocks=blocks,
        hidden=4096,
        ffn=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=vocab,
        rms_eps=1e-5,
        max_position=length,
        rope=RopeConfig(
            theta=500000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=8192,
        ),
        output_head="bf16",
    )


def route_spec(route: str, block: int = 0, depth: int = 32) -> str:
    """The recipe text of a route's linears in one block."""
    return specs.encode(load_recipe(route).for_block(block, depth))


@dataclass
class GroupData:
    """One group of linears with input and output gradients, BF16 on the GPU."""

    name: str
    x: Tensor
    weights: list[Tensor]
    grads: list[Tensor]
    producers: list[int]

    @classmethod
    def make(cls, name: str, tokens: int, device: torch.device) -> GroupData:
        """Activations of unequal features, weights N(0, 0.02^2), small gradients; the same on every call."""
        k, outs, index = GROUPS[name]
        g = torch.Generator(device=device).manual_seed(index + 1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=g)

        spread = torch.exp(0.5 * normal(k))
        x = (normal(tokens, k) * spread).to(torch.bfloat16).requires_grad_()
        weights = [(normal(n, k) * _STD).to(torch.bfloat16).requires_grad_() for n in outs]
        grads = [(normal(tokens, n) * 1e-3).to(torch.bfloat16) for n in outs]
        return cls(name, x, weights, grads, [specs.producer_id(0, index + i) for i in range(len(outs))])

    def step(self, forward: Callable[[Tensor, list[Tensor]], list[Tensor]]) -> tuple[Tensor, ...]:
        """Forward and backward; the gradients of x and of every weight."""
        outputs = forward(self.x, self.weights)
        return torch.autograd.grad(outputs, [self.x, *self.weights], self.grads)


def bf16_linears(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The baseline: one BF16 product per linear."""
    return [F.linear(x, w) for w in weights]


def bf16_joint(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The baseline with the linears of one input as one product."""
    if len(weights) == 1:
        return bf16_linears(x, weights)
    return list(F.linear(x, torch.cat(weights)).split([w.shape[0] for w in weights], dim=1))
