"""Contractions of carriers, exact products, FP32 sums, outer scales in the epilogue, one rounding at the end.

    C [M, N] = alpha alpha_i beta_j  sum_k A [i, k] B [j, k]

- ``fp8_gemm``: E5M2 x E4M3 (either way) or E4M3 x E4M3 by cuBLASLt with full accumulation; E5M2 x
  E5M2, which cuBLAS refuses, by the Triton kernel here.
- ``bf16_gemm``: cuBLAS with the factor on the device where it is one number; the Triton kernel where outer
  scales belong to stripes of 256 rows (CTA-local formats), because cuBLAS has no such epilogue.

The Triton kernel is persistent, loads through TMA descriptors, and needs tiles that do not straddle a stripe:
then alpha_i beta_j is one number per tile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from fp4core.kernels import _cublas, _cublaslt
from fp4core.kernels._launch import interpreted

STRIPE = 256
FP8 = (torch.float8_e5m2, torch.float8_e4m3fn)


@triton.jit
def gemm_kernel(
    a_desc,
    b_desc,
    c_desc,
    alpha_ptr,
    outer_a_ptr,
    outer_b_ptr,
    M,
    N,
    K,
    TRANS_A: tl.constexpr,
    TRANS_B: tl.constexpr,
    STRIPE_A: tl.constexpr,
    STRIPE_B: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PROMOTE: tl.constexpr,
    HALVES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Persistent tiles of C. alpha FP32 [1]; outer scales FP32 [1], or per 256 rows where STRIPE_* is 1.

    PROMOTE: products of FP8 are added to FP32 outside the tensor core every PROMOTE of K (0: never, BF16).
    HALVES: the tile is stored in two halves of BN / 2, which halves the buffer in shared memory.
    UPCAST: products in FP32, for the interpreter, which has no BF16 dot.
    """
    start = tl.program_id(0)
    rows = tl.cdiv(M, BM)
    cols = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    per_group = GROUP * cols
    alpha = tl.load(alpha_ptr)
    for tile in tl.range(start, rows * cols, PROGRAMS, flatten=True):
        group = tile // per_group
        first = group * GROUP
        size = tl.minimum(rows - first, GROUP)
        om = (first + (tile % per_group) % size) * BM
        on = ((tile % per_group) // size) * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(steps):
            ok = step * BK
            if TRANS_A:
                a = a_desc.load([ok, om]).T
            else:
                a = a_desc.load([om, ok])
            if TRANS_B:
                b = b_desc.load([ok, on])
            else:
                b = b_desc.load([on, ok]).T
            if UPCAST:
                acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
            elif PROMOTE:
                acc = tl.dot(a, b, acc, max_num_imprecise_acc=PROMOTE)
            else:
                acc = tl.dot(a, b, acc)
        outer = tl.load(outer_a_ptr + (om // 256) * STRIPE_A) * tl.load(outer_b_ptr + (on // 256) * STRIPE_B)
        acc = acc * (outer * alpha)
        if HALVES:
            acc = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
            left, right = tl.split(acc)
            c_desc.store([om, on], left.to(c_desc.dtype))
            c_desc.store([om, on + BN // 2], right.to(c_desc.dtype))
        else:
            c_desc.store([om, on], acc.to(c_desc.dtype))


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=256)
def constant(value: float, device: torch.device) -> Tensor:
    """FP32 [1] with a number, made once per device."""
    return torch.full((1,), value, dtype=torch.float32, device=device)


@functools.cache
def _programs(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _aligned(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def _descriptor(x: Tensor, rows: int, cols: int) -> tuple[TensorDescriptor, bool]:
    """TMA descriptor of an operand [R, K] with tiles of rows x cols, and whether it is stored as [K, R].

    TMA needs addresses and strides in multiples of 16 bytes; an operand without them is copied, padded.
    """
    stored = x if x.stride(1) == 1 else x.t()
    if not _aligned(stored):
        pad = -stored.shape[1] % (16 // stored.element_size())
        stored = F.pad(stored.view(torch.uint8) if stored.element_size() == 1 else stored, (0, pad)).view(
            x.dtype
        )
    block = [rows, cols] if x.stride(1) == 1 else [cols, rows]
    return TensorDescriptor(stored, list(stored.shape), list(stored.stride()), block), x.stride(1) != 1


@dataclass(frozen=True)
class Tile:
    """How the Triton kernel cuts a product: tile, warps, pipeline stages, store in halves, rows per group."""

    bm: int
    bn: int
    bk: int
    warps: int = 8
    stages: int = 3
    halves: bool = True
    group: int = 8


def default_tile(operand: torch.dtype, result: torch.dtype) -> Tile:
    """Best of ``python -m fp4core.bench gemm --tune`` on an H200."""
    if operand in FP8:
        return Tile(256, 128, 128, group=16)
    return Tile(128, 256, 64, halves=result == torch.float32, group=16)


def triton_gemm(
    a: Tensor,
    b: Tensor,
    alpha: Tensor,
    outer_a: Tensor,
    outer_b: Tensor,
    out: Tensor,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """C = alpha alpha_i beta_j A B^T by the Triton kernel; operands and output as in ``bf16_gemm``.

    Args:
        a, b: BF16 or FP8 [M, K], [N, K], one unit stride, other strides and addresses multiples of 16 bytes.
        alpha: FP32 [1] on the device. outer_a, outer_b: FP32 [1], or one per 256 rows.
        out: [M, N], unit stride along N.
        tile: BM and BN divide 256; None chooses.
    """
    t = tile or default_tile(a.dtype, out.dtype)
    bm, bn, bk = t.bm, t.bn, t.bk
    (m, k), n = a.shape, b.shape[0]
    fp8 = a.dtype in FP8
    a_desc, trans_a = _descriptor(a, bm, bk)
    b_desc, trans_b = _descriptor(b, bn, bk)
    target = out
    if not _aligned(out):
        target = out.new_empty(m, triton.cdiv(n, 16) * 16)[:, :n]
    c_desc = TensorDescriptor(target, [m, n], list(target.stride()), [bm, bn // 2 if t.halves else bn])
    tiles = triton.cdiv(m, bm) * triton.cdiv(n, bn)
    programs = min(tiles, 1 if interpreted() else _programs(a.device.index or 0))
    gemm_kernel[(programs,)](
        a_desc,
        b_desc,
        c_desc,
        alpha,
        outer_a,
        outer_b,
        m,
        n,
        k,
        TRANS_A=trans_a,
        TRANS_B=trans_b,
        STRIPE_A=int(outer_a.numel() > 1),
        STRIPE_B=int(outer_b.numel() > 1),
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP=t.group,
        PROGRAMS=programs,
        PROMOTE=128 if fp8 else 0,
        HALVES=t.halves,
        UPCAST=interpreted(),
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return out if target is out else out.copy_(target)


def _check_operands(a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, ...], what: str) -> None:
    if (
        a.dim() != 2
        or b.dim() != 2
        or a.shape[1] != b.shape[1]
        or a.dtype not in dtypes
        or b.dtype not in dtypes
    ):
        raise ValueError(
            f"{what}: got {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}; needed [M, K] and "
            f"[N, K] of {', '.join(map(str, dtypes))}"
        )


def _output(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    shape = (a.shape[0], b.shape[0])
    if out is None:
        return a.new_empty(shape, dtype=dtype)
    if out.shape != shape or out.dtype != dtype or out.stride(1) != 1:
        raise ValueError(f"product: got an output {tuple(out.shape)} {out.dtype}; needed {shape} {dtype}")
    return out


def bf16_gemm(
    a: Tensor,
    b: Tensor,
    alpha: float = 1.0,
    outer_a: Tensor | None = None,
    outer_b: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """C [M, N] = alpha outer_a[i] outer_b[j] (A B^T), BF16 operands, FP32 sums, rounded once to ``dtype``.

    Args:
        a, b: [M, K], [N, K], each contiguous or a transposed view of a contiguous matrix.
        alpha: a number.
        outer_a, outer_b: FP32 on the device: [1], or one per 256 rows of the operand; None is 1.
        dtype: BF16 or FP32.
        out: where to write, [M, N] with unit stride along N.
        accumulate: add the product to what ``out`` holds (FP32, to sum several products before rounding).

    Raises:
        ValueError: shapes or types that do not fit.
    """
    _check_operands(a, b, (torch.bfloat16,), "bf16_gemm")
    out = _output(a, b, dtype, out)
    striped = any(o is not None and o.numel() > 1 for o in (outer_a, outer_b))
    if not striped and not interpreted() and _cublas.library() is not None:
        factor = constant(alpha, a.device)
        for outer in (outer_a, outer_b):
            factor = factor if outer is None else factor * outer
        return _cublas.product(a, b, factor, out, accumulate)
    if accumulate:
        return out.add_(bf16_gemm(a, b, alpha, outer_a, outer_b, dtype))
    one = _one(a.device)
    return triton_gemm(
        a,
        b,
        constant(alpha, a.device),
        one if outer_a is None else outer_a,
        one if outer_b is None else outer_b,
        out,
    )


def fp8_gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """C [M, N] = scale_a scale_b (A B^T), FP8 operands with their contraction contiguous, full accumulation.

    Args:
        a, b: [M, K], [N, K] E5M2 or E4M3; M, N, K multiples of 16.
        scale_a, scale_b: FP32 [1] on the device.
        dtype: BF16 or FP32.
        out: where to write.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    _check_operands(a, b, FP8, "fp8_gemm")
    out = _output(a, b, dtype, out)
    if a.dtype == b.dtype == torch.float8_e5m2 or interpreted():
        return triton_gemm(a, b, scale_a * scale_b, _one(a.device), _one(a.device), out)
    if not _cublaslt.product(a, b, scale_a, scale_b, out):
        _cublaslt.torch_product(a, b, scale_a, scale_b, out)
    return out
