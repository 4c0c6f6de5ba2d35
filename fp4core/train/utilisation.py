"""Model FLOP utilisation of a measured rate."""

from __future__ import annotations

from fp4core.model.arithmetic import flops_per_token, peak_tflops
from fp4core.recipe import ModelConfig


def mfu(tokens_per_s: float, model: ModelConfig, sequence: int, device_name: str) -> float | None:
    """F R / peak as a fraction, R in tokens/s of one device; None where no peak is known (every CPU)."""
    peak = peak_tflops(device_name)
    return None if peak is None else flops_per_token(model, sequence) * tokens_per_s / (peak * 1e12)
