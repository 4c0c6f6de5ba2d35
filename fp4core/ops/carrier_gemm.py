"""Contractions of carriers: FP8 where both operands fit, BF16 otherwise, outer scales in the epilogue.

    C [M, N] = (A B^T) 2^(ref_a + ref_b) alpha_i beta_j        A [M, K], B [N, K], products and sums in FP32

The products are those of ``fp4core.kernels.gemm``. On the CPU, where kernels run in the interpreter, the
product of the decoded operands is taken in FP64 and rounded: the same values as exact accumulation.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from fp4core.kernels.gemm import bf16_gemm, fp8_gemm

_FP8 = (torch.float8_e5m2, torch.float8_e4m3fn)
_LOW = -160  # first exponent of the table of powers of two


@dataclass(frozen=True)
class Carrier:
    """One operand, contraction axis last.

    Attributes:
        data: FP8 or BF16 [R, K]; FP8 contiguous along K.
        ref: the decoded value is data x 2^ref x constant x outer.
        constant: the format's constant outer scale (1/6 or 1).
        outer: FP32 outer scales on the device: [1], or one per 256 rows; None for constant formats.
    """

    data: Tensor
    ref: int = 0
    constant: float = 1.0
    outer: Tensor | None = None

    @property
    def fp8(self) -> bool:
        """Whether the data is FP8."""
        return self.data.dtype in _FP8

    def widened(self) -> Carrier:
        """The same operand with a BF16 carrier; exact."""
        return (
            Carrier(self.data.to(torch.bfloat16), self.ref, self.constant, self.outer) if self.fp8 else self
        )


@dataclass
class Weights:
    """Encoded weights of a group.

    Attributes:
        key: what they were encoded from and how; another key encodes again.
        rows: carriers of each linear's row view (Fprop).
        joint: all row views in one operand [sum N, K], where one constant serves them (MX); else None.
        columns: the carrier of all column views side by side (Dgrad, FP8), or one per linear (BF16).
        sources: the parameters that were encoded, none of which this keeps alive.
    """

    key: tuple = ()
    rows: list[Carrier] = field(default_factory=list)
    joint: Carrier | None = None
    columns: list[Carrier] = field(default_factory=list)
    sources: list[weakref.ref[Tensor]] = field(default_factory=list)

    def carriers(self) -> list[Carrier]:
        """All operands; several may share memory."""
        return [*self.rows, *self.columns, *([] if self.joint is None else [self.joint])]

    def bytes(self) -> int:
        """Device memory of the encodings."""
        seen: dict[int, int] = {}
        for c in self.carriers():
            storage = c.data.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())


@functools.lru_cache(maxsize=256)
def _scale_table(constant: float, device: torch.device) -> Tensor:
    """FP32 [320, 16]: constant x 2^(i - 160), each at an address that cuBLAS takes (it refuses odd words)."""
    exponents = torch.arange(_LOW, -_LOW, dtype=torch.float64)
    return (constant * torch.exp2(exponents)).to(torch.float32)[:, None].repeat(1, 16).to(device)


@functools.lru_cache(maxsize=4096)
def _scale(exponent: int, constant: float, device: torch.device) -> Tensor:
    return _scale_table(constant, device)[exponent - _LOW, :1]


def contract(
    a: Carrier, b: Carrier, dtype: torch.dtype, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """A B^T in ``dtype`` (BF16 or FP32) [M, N]; into ``out`` where given, added to it when ``accumulate``."""
    if not (a.fp8 and b.fp8):
        a, b = a.widened(), b.widened()
    constant = a.constant * b.constant
    device = a.data.device
    if device.type != "cuda" or (accumulate and a.fp8):
        product = _emulated(a, b, dtype) if device.type != "cuda" else contract(a, b, dtype)
        return product if out is None else out.add_(product) if accumulate else out.copy_(product)
    if a.fp8:
        if out is None and any(n % 16 for n in (*a.data.shape, b.data.shape[0])):
            whole = contract(_aligned(a), _aligned(b), dtype)
            return whole[: a.data.shape[0], : b.data.shape[0]].contiguous()
        # a power of two and the constant: their product is exact in FP32, whatever order it is taken in
        scales = _scale(a.ref, 1.0, device), _scale(b.ref, constant, device)
        return fp8_gemm(a.data, b.data, *scales, dtype, out)
    alpha = constant * 2.0 ** (a.ref + b.ref)
    return bf16_gemm(a.data, b.data, alpha, a.outer, b.outer, dtype, out, accumulate)


def _aligned(c: Carrier) -> Carrier:
    """The operand padded with zeros to multiples of 16, which FP8 products need."""
    rows, k = c.data.shape
    data = F.pad(c.data.view(torch.uint8), (0, -k % 16, 0, -rows % 16)).view(c.data.dtype)
    return Carrier(data, c.ref, c.constant, c.outer)


def _emulated(a: Carrier, b: Carrier, dtype: torch.dtype) -> Tensor:
    acc = (a.data.double() @ b.data.double().t()).float()
    scale = torch.tensor(a.constant * b.constant * 2.0 ** (a.ref + b.ref), dtype=torch.float32)
    if a.outer is not None or b.outer is not None:
        alpha = _per_row(a.outer, acc.shape[0])
        beta = _per_row(b.outer, acc.shape[1])
        scale = alpha[:, None] * beta[None, :] * scale
    return (acc * scale).to(dtype)


def _per_row(outer: Tensor | None, rows: int) -> Tensor:
    if outer is None:
        return torch.ones(1)
    return outer if outer.numel() == 1 else outer.repeat_interleave(256)[:rows]


def sum_of_products(lefts: list[Carrier], rights: list[Carrier]) -> Tensor:
    """BF16 of the sum of A_i B_i^T: one product where the operands lie side by side, else summed in FP32."""
    if len(lefts) == len(rights) == 1:
        return contract(lefts[0], rights[0], torch.bfloat16)
    lefts, rights = _split(lefts, rights), _split(rights, lefts)
    total = contract(lefts[0], rights[0], torch.float32)
    for a, b in zip(lefts[1:], rights[1:]):
        contract(a, b, torch.float32, total, accumulate=True)
    return total.to(torch.bfloat16)


def _split(carriers: list[Carrier], like: list[Carrier]) -> list[Carrier]:
    """A joint operand cut at the contraction lengths of its partners (one side fell back to BF16)."""
    if len(carriers) >= len(like):
        return carriers
    joint, at, parts = carriers[0].widened(), 0, []
    for c in like:
        width = c.data.shape[1]
        parts.append(Carrier(joint.data[:, at : at + width], joint.ref, joint.constant, joint.outer))
        at += width
    return parts
