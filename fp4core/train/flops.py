"""Model work per token and the peak it is compared with.

MFU = F · R / peak with F = 6(N - N_emb) + 12·L·H·d_h·S per token, R in tokens/s per device and the dense
BF16 peak of the device. It is effective BF16-equivalent work, not the occupancy of FP4 Tensor Cores
(report section 4.3), so it may pass 100%.
"""

from __future__ import annotations

from typing import Protocol


class Shape(Protocol):
    """The fields of fp4core.recipe.ModelConfig that decide the work."""

    blocks: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


# dense BF16 TFLOP/s per device, by the first match in the device's name
_PEAKS = (("GB200", 2500.0), ("B300", 2250.0), ("B200", 2250.0), ("H200", 989.0), ("H100", 989.0))


def body_parameters(model: Shape) -> int:
    """N - N_emb: blocks, norms and output head; the embedding does no matrix work."""
    width = model.heads * model.head_dim
    attention = 2 * model.hidden * width + 2 * model.hidden * model.kv_heads * model.head_dim
    block = attention + 3 * model.hidden * model.ffn + 2 * model.hidden
    return model.blocks * block + model.hidden + model.vocab * model.hidden


def flops_per_token(model: Shape, sequence: int) -> int:
    """Training FLOP per token at `sequence` tokens (8B at 8192: 57,914,449,920)."""
    attention = 12 * model.blocks * model.heads * model.head_dim * sequence
    return 6 * body_parameters(model) + attention


def peak_flops(device_name: str) -> float | None:
    """Dense BF16 peak in FLOP/s, None where it is not known (every CPU)."""
    for name, tera in _PEAKS:
        if name in device_name:
            return tera * 1e12
    return None


def mfu(tokens_per_s: float, model: Shape, sequence: int, device_name: str) -> float | None:
    """Model FLOP utilisation as a fraction, None where no peak is known. `tokens_per_s` is per device."""
    peak = peak_flops(device_name)
    return None if peak is None else flops_per_token(model, sequence) * tokens_per_s / peak
