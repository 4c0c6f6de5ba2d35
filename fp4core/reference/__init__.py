"""Plain torch oracles, obvious and slow; never imports fp4core.kernels."""

from fp4core.reference.hadamard import rotate
from fp4core.reference.philox import SRKey, philox4x32_10, random_bytes
from fp4core.reference.quantize import fake_quant_2d, quantize_2d

__all__ = ["SRKey", "fake_quant_2d", "philox4x32_10", "quantize_2d", "random_bytes", "rotate"]
