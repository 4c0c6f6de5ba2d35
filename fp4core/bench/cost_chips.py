"""Figures of the chips that the cost model knows, each with its source, and efficiencies that are not
calibrated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One GPU.

    Attributes:
        name: as in the published tables.
        bf16_tflops, fp4_tflops: dense Tensor Core peaks; FP4 is None where there are no FP4 units.
        fp8_tflops: dense FP8 peak, for carriers.
        memory_tbps: HBM bandwidth. memory_gib: usable HBM.
        processors, clock_ghz: streaming multiprocessors, and the clock they hold under load.
        bf16_reached: fraction of its BF16 peak that a large BF16 product reaches.
    """

    name: str
    bf16_tflops: float
    fp8_tflops: float
    fp4_tflops: float | None
    memory_tbps: float
    memory_gib: float
    processors: int
    clock_ghz: float
    bf16_reached: float

    @property
    def lane_rate(self) -> float:
        """Instructions per second over all lanes: four schedulers of 32 lanes per processor."""
        return self.processors * 128 * self.clock_ghz * 1e9


# Peaks: NVIDIA's data sheets of GB200 NVL72, HGX B200, HGX B300 and H200, without sparsity; the BF16 ones are
# those of the report's MFU column. Clocks: sustained, not boost; a few per cent either way. BF16 products: on
# B200 1360 TFLOP/s at N 6144, K 4096 (vllm-project/vllm#20646); on H200 707-788, bench/results/gemm.json.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("GB200", 2500.0, 5000.0, 10000.0, 8.0, 184.0, 152, 1.9, 0.604),
        Chip("B200", 2250.0, 4500.0, 9000.0, 8.0, 179.0, 148, 1.85, 0.604),
        Chip("B300", 2250.0, 4500.0, 13500.0, 8.0, 268.0, 148, 1.9, 0.604),
        Chip("H200", 989.0, 1979.0, None, 4.8, 140.0, 132, 1.75, 0.745),
    )
}

# Fractions of a peak that a kernel reaches; measured once, the same on every chip. H200 products are those of
# bench/results/gemm.json, weighted by their operations (runs of different hours differ by 8%).
BF16_CARRIER_PRODUCT = 0.775  # cuBLAS or Triton with outer scales, quantised data: 735-845
FP8_PRODUCT = 0.71  # E5M2 x E4M3 with full accumulation: 1322-1537 of 1979
FP4_PRODUCT = 0.57  # B200 at 8192^3: DeepGEMM 5702, cuBLASLt 5239 of 9000 (deepseek-ai/DeepGEMM#348)
ATTENTION_FORWARD = 0.585  # H200, cuDNN, causal, 8192, 32/8 heads of 128: 0.95 ms
ATTENTION_BACKWARD = 0.49  # the same: 2.81 ms
MEMORY = 0.80  # element-wise kernels, of the data sheet's bandwidth
LAUNCH_US = 2.0  # from the end of one kernel to the start of the next

# H200: what producers of carriers move (one read, both views written), TB/s, of bench/results/producers.json.
# No rotated BF16 producer without stochastic rounding was measured: the unrotated one's rate stands in.
CARRIER_PRODUCERS = {
    "fp8": 3.84,
    "fp8_rotated": 3.37,
    "fp8_stochastic": 2.90,
    "fp8_stochastic_rotated": 2.51,
    "bf16": 4.00,
    "bf16_rotated": 4.04,
    "bf16_stochastic": 3.63,
    "bf16_stochastic_rotated": 3.12,
}

NVLINK_GBPS = 300.0  # parameter exchange inside one node of eight H200, per GPU; assumed
