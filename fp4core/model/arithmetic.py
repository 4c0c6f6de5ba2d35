"""Parameters, training work per token, and the peak it is compared with.

MFU = F R / peak, F = 6 (N - N_emb) + 12 L H d_h S per token, R in tokens/s of one device, peak its dense BF16
rate. It is BF16-equivalent model work, not the occupancy of FP4 Tensor Cores (report section 4.3).
"""

from __future__ import annotations

from fp4core.recipe import ModelConfig

# dense BF16 TFLOP/s per device; the first name found in the device's name counts
_PEAK_TFLOPS = (("GB200", 2500.0), ("B300", 2250.0), ("B200", 2250.0), ("H200", 989.0), ("H100", 989.0))


def count_parameters(config: ModelConfig) -> int:
    """N: all parameters; a tied output head counts once."""
    embedding = config.vocab * config.hidden
    return (1 if config.tie_embeddings else 2) * embedding + _decoder_parameters(config)


def flops_per_token(config: ModelConfig, sequence: int) -> int:
    """F, forward and backward, at ``sequence`` tokens (Llama-3.1 8B at 8192: 57,914,449,920).

    N - N_emb is the parameters that take part in a matrix product, so a tied head counts here all the same.
    """
    active = _decoder_parameters(config) + config.vocab * config.hidden
    return 6 * active + 12 * config.blocks * config.heads * config.head_dim * sequence


def peak_tflops(device_name: str) -> float | None:
    """Dense BF16 peak in TFLOP/s by the device's name (``torch.cuda.get_device_name()``), else None."""
    return next((peak for name, peak in _PEAK_TFLOPS if name in device_name), None)


def _decoder_parameters(config: ModelConfig) -> int:
    """Blocks and final norm."""
    attention = 2 * config.hidden * config.head_dim * (config.heads + config.kv_heads)
    block = attention + 3 * config.hidden * config.ffn + 2 * config.hidden
    return config.blocks * block + config.hidden
