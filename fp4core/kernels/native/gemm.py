"""Block-scaled FP4 products on tcgen05 through ``tl.dot_scaled``.

    C [M, N] = alpha_i beta_j sum_k (A x scale) [i, k] (B x scale) [j, k]     exact products, FP32 sums

E8M0 scales over 32 values give ``kind::mxf4.block_scale.scale_vec::2X``, E4M3 scales over 16
``kind::mxf4nvf4...4X``. Outer factors are one number per tile (tiles do not straddle a stripe of 256 rows)
and are multiplied on in the epilogue, rounded to the output type once.

Operands, scales and output move by TMA. Scale atoms arrive as they lie in memory (``layout``) and reach
Tensor Memory by ``tcgen05.cp``; the reshapes and transposes below only tell the compiler what the bytes
mean. Two schedules:

    OVERLAPPED  128 x 128 tiles, persistent; loads, MMA and epilogue in specialised warps, two accumulators
                in Tensor Memory, so that a tile's epilogue runs under the next tile's MMA
    WIDE        128 x 256 tiles: three quarters of the operand traffic; its accumulator and the scales leave
                no room for a second one, so the epilogue is exposed: for long contractions

Neither was ever timed: this project has had no GPU with FP4 Tensor Cores. What is checked is the compiled
code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp4core import formats
from fp4core.kernels._launch import interpreted, round_up
from fp4core.kernels.native.producers import Packed, has_fp4_instructions

if interpreted():
    from fp4core.kernels.native import _interpreter  # noqa: F401  imported for its effect


@dataclass(frozen=True)
class Schedule:
    """Tile, pipeline depth (``stages`` for BF16 output, one less for FP32, whose tile takes its place),
    structure."""

    bm: int
    bn: int
    bk: int
    stages: int
    specialised: bool
    halves: bool
    warps: int

    def depth(self, dtype: torch.dtype) -> int:
        """Stages that fit beside the output tile."""
        return self.stages - (dtype == torch.float32)


OVERLAPPED = Schedule(128, 128, 256, 5, specialised=True, halves=False, warps=4)
WIDE = Schedule(128, 256, 256, 3, specialised=False, halves=True, warps=8)
# where Triton emulates dot_scaled (MXFP4 on sm_90): slow, there to test with; upcast tiles need the room
EMULATED = Schedule(128, 128, 128, 2, specialised=False, halves=False, warps=8)
E2M1 = tl.constexpr("e2m1")  # the interpreter wants the constant, not the string
_LONG = 16384  # contraction from which WIDE's exposed epilogue is under a twentieth of a tile's time


@triton.jit
def native_gemm_kernel(
    a_desc,
    a_scale_desc,
    b_desc,
    b_scale_desc,
    c_desc,
    alpha_ptr,
    beta_ptr,
    M,
    N,
    K,
    STRIPE_A: tl.constexpr,
    STRIPE_B: tl.constexpr,
    VEC: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPECIALISED: tl.constexpr,
    HALVES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Persistent tiles of C; alpha, beta FP32 [1], or per 256 rows where STRIPE_* is 1. VEC: values per
    scale."""
    RM: tl.constexpr = BM // 128
    RN: tl.constexpr = BN // 128
    RK: tl.constexpr = BK // VEC // 4
    rows = tl.cdiv(M, BM)
    cols = tl.cdiv(N, BN)
    per_group = GROUP * cols
    first_tile = tl.program_id(0)
    for tile in tl.range(first_tile, rows * cols, PROGRAMS, flatten=SPECIALISED, warp_specialize=SPECIALISED):
        group = tile // per_group
        first = group * GROUP
        size = tl.minimum(rows - first, GROUP)
        pm = first + (tile % per_group) % size
        pn = (tile % per_group) // size
        acc = tl.zeros((BM, BN), tl.float32)
        for step in tl.range(0, tl.cdiv(K, BK), num_stages=STAGES):
            a = a_desc.load([pm * BM, step * (BK // 2)])
            b = b_desc.load([pn * BN, step * (BK // 2)])
            a_scale = a_scale_desc.load([0, pm * RM, step * RK, 0, 0])
            b_scale = b_scale_desc.load([0, pn * RN, step * RK, 0, 0])
            a_scale = a_scale.reshape(RM, RK, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(BM, BK // VEC)
            b_scale = b_scale.reshape(RN, RK, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(BN, BK // VEC)
            acc = tl.dot_scaled(a, a_scale, E2M1, b.T, b_scale, E2M1, acc)
        outer = tl.load(alpha_ptr + (pm * BM // 256) * STRIPE_A)
        outer *= tl.load(beta_ptr + (pn * BN // 256) * STRIPE_B)
        acc = acc * outer
        if HALVES:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            c_desc.store([pm * BM, pn * BN], left.to(c_desc.dtype))
            c_desc.store([pm * BM, pn * BN + BN // 2], right.to(c_desc.dtype))
        else:
            c_desc.store([pm * BM, pn * BN], acc.to(c_desc.dtype))


def native_gemm(
    a: Packed,
    b: Packed,
    dtype: torch.dtype = torch.bfloat16,
    *,
    schedule: Schedule | None = None,
    group: int = 8,
) -> Tensor:
    """C [M, N] of A [M, K] and B [N, K], rounded once to ``dtype`` (BF16 or FP32).

    Raises:
        ValueError: different K, or block scales of different types (no instruction multiplies them); E4M3
            scales on a GPU without FP4 Tensor Cores, whose compiler they abort.
    """
    (m, k), (n, kb) = a.shape, b.shape
    fa, fb = formats.get(a.format), formats.get(b.format)
    if k != kb or fa.block_scale != fb.block_scale or fa.block_cols != fb.block_cols:
        raise ValueError(
            f"native product: got {a.format} [{m}, {k}] and {b.format} [{n}, {kb}]; needed one K and one "
            "type of block scale: E8M0 over 32 or E4M3 over 16 for both"
        )
    out = a.codes.new_empty((m, round_up(n, 16)), dtype=dtype)
    if out.numel() == 0 or k == 0:
        return out.zero_()[:, :n]
    vec = fa.block_cols
    emulated = not interpreted() and not has_fp4_instructions(out.device)
    if emulated and fa.block_scale != "e8m0":
        raise ValueError(
            f"native product: got {a.format} on {out.device}; E4M3 block scales need FP4 Tensor Cores "
            "(sm_100, sm_103), only E8M0 ones can be emulated; use backend='carrier' or 'reference'"
        )
    s = EMULATED if emulated else schedule or _schedule(n, k)
    tiles = triton.cdiv(m, s.bm) * triton.cdiv(n, s.bn)
    programs = 1 if interpreted() else min(tiles, _processors(out.device))
    alpha, beta = _outer(a, b)
    native_gemm_kernel[(programs,)](
        _codes(a, s.bm, s.bk),
        _scales(a, s.bm, s.bk, vec),
        _codes(b, s.bn, s.bk),
        _scales(b, s.bn, s.bk, vec),
        TensorDescriptor(out, [m, n], [out.stride(0), 1], [s.bm, s.bn // 2 if s.halves else s.bn]),
        alpha,
        beta,
        m,
        n,
        k,
        STRIPE_A=int(alpha.numel() > 1),
        STRIPE_B=int(beta.numel() > 1),
        VEC=vec,
        BM=s.bm,
        BN=s.bn,
        BK=s.bk,
        GROUP=group,
        PROGRAMS=programs,
        SPECIALISED=s.specialised,
        HALVES=s.halves,
        STAGES=s.depth(dtype),
        num_warps=s.warps,
        num_stages=s.depth(dtype),
    )
    return out[:, :n]


def _schedule(n: int, k: int) -> Schedule:
    return WIDE if k >= _LONG and n % 256 == 0 else OVERLAPPED


def _outer(a: Packed, b: Packed) -> tuple[Tensor, Tensor]:
    """Outer scales of both operands; two constants become one, rounded from their exact product (1/36)."""
    fa, fb = formats.get(a.format), formats.get(b.format)
    if fa.outer == fb.outer == "constant":
        both = a.outer.new_full((1,), fa.outer_constant * fb.outer_constant)
        return both, torch.ones_like(both)
    return a.outer.reshape(-1), b.outer.reshape(-1)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _codes(p: Packed, rows: int, bk: int) -> Any:
    return TensorDescriptor(p.codes, list(p.codes.shape), list(p.codes.stride()), [rows, bk // 2])


def _scales(p: Packed, rows: int, bk: int, vec: int) -> Any:
    """[1, atoms, atoms, 2, 256]: an atom is two rows of 256 bytes, the widest box that TMA moves."""
    kind = torch.float8_e4m3fn if vec == 16 else torch.uint8
    parts = p.scales.view(kind).view(1, *p.scales.shape[:2], 2, 256)
    return TensorDescriptor(
        parts, list(parts.shape), list(parts.stride()), [1, rows // 128, bk // vec // 4, 2, 256]
    )
