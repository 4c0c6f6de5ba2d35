"""Rotary position embedding with Llama-3.1 scaling, always in FP32.

The frequencies are Python floats that hold FP32 values exactly, never a buffer: ``model.to(bfloat16)`` would
round a buffer by 0.26%, which changes logits as much as BF16 compute does and grows with position. Rotation
pairs feature i with i + head_dim/2, as Hugging Face's Llama does, so weights need no permutation on export.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp4core.recipe import ModelConfig


def rope_inv_freq(config: ModelConfig) -> Tensor:
    """FP32 [head_dim / 2] angular frequencies in radians per position, on the CPU.

    Every operation and its order is that of transformers' ``llama3`` rope (``factor: 1.0``: of its
    ``default``), so the values are equal bit for bit and an exported configuration can be checked by them.
    """
    rope, dim = config.rope, config.head_dim
    inv_freq = 1.0 / (
        rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / dim)
    )
    if rope.factor == 1.0:
        return inv_freq
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > low_wavelength, inv_freq / rope.factor, inv_freq)
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(between, blended, scaled)


def rope_tables(inv_freq: list[float], positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """FP32 (cos, sin), each [positions, head_dim / 2], of positions 0 .. positions - 1."""
    frequencies = torch.tensor(inv_freq, dtype=torch.float32, device=device)
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, heads, head_dim] rotated in FP32, in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
