"""BF16 products through cuBLAS with the epilogue's factor read from device memory.

torch offers the factor only as a host number, which would cost a synchronisation per product. cuBLAS itself
reads it from the device in pointer mode DEVICE; this is the one call that torch does not expose, made on
torch's own handle (its stream, workspace and lifetime), with the handle's modes restored afterwards.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

_OP = {False: 0, True: 1}  # CUBLAS_OP_N, CUBLAS_OP_T
_TYPE = {torch.bfloat16: 14, torch.float32: 0}  # CUDA_R_16BF, CUDA_R_32F
_COMPUTE_32F = 68
_GEMM_DEFAULT = -1
_POINTER_MODE_DEVICE = 1
_DISALLOW_REDUCED_PRECISION = 16  # no BF16 partial sums when cuBLAS splits K


@functools.cache
def library(name: str = "cublas") -> ctypes.CDLL | None:
    """cuBLAS (or "cublasLt") as torch has loaded it; None where there is none (no CUDA, a static build)."""
    if torch.version.cuda is None or torch.version.hip is not None:
        return None
    try:
        return ctypes.CDLL(f"lib{name}.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


@functools.cache
def _beta(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.float32, device=device)


def _check(status: int, call: str) -> None:
    if status != 0:
        raise RuntimeError(f"{call} returned cuBLAS status {status}")


def _matrix(x: Tensor) -> tuple[bool, int]:
    """(stored transposed, leading dimension) of a matrix with one unit stride."""
    if x.stride(1) == 1:
        return False, x.stride(0)
    if x.stride(0) == 1:
        return True, x.stride(1)
    raise ValueError(f"product: got strides {x.stride()}, needed one stride of 1")


def product(a: Tensor, b: Tensor, alpha: Tensor, out: Tensor, accumulate: bool = False) -> Tensor:
    """out [M, N] = alpha[0] (a [M, K] b [N, K]^T), rounded once to out's type.

    Args:
        a, b: BF16, row-major or a transposed view of row-major.
        alpha: FP32 [1] on the device.
        out: BF16 or FP32, unit stride along N.
        accumulate: add the product to what ``out`` holds.
    """
    (m, k), n = a.shape, b.shape[0]
    a_t, lda = _matrix(a)
    b_t, ldb = _matrix(b)
    if out.stride(1) != 1:
        raise ValueError(f"product: got an output with strides {out.stride()}, needed unit stride along N")
    blas = library()
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    pointer_mode, math_mode = ctypes.c_int(), ctypes.c_int()
    _check(blas.cublasGetPointerMode_v2(handle, ctypes.byref(pointer_mode)), "cublasGetPointerMode")
    _check(blas.cublasGetMathMode(handle, ctypes.byref(math_mode)), "cublasGetMathMode")
    _check(blas.cublasSetPointerMode_v2(handle, _POINTER_MODE_DEVICE), "cublasSetPointerMode")
    try:
        _check(blas.cublasSetMathMode(handle, _DISALLOW_REDUCED_PRECISION), "cublasSetMathMode")
        # cuBLAS is column-major: out^T [N, M] = b [N, K] a^T [K, M]
        status = blas.cublasGemmEx(
            handle,
            _OP[not b_t],
            _OP[a_t],
            n,
            m,
            k,
            ctypes.c_void_p(alpha.data_ptr()),
            ctypes.c_void_p(b.data_ptr()),
            _TYPE[b.dtype],
            ldb,
            ctypes.c_void_p(a.data_ptr()),
            _TYPE[a.dtype],
            lda,
            ctypes.c_void_p(_beta(float(accumulate), out.device).data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            _TYPE[out.dtype],
            out.stride(0),
            _COMPUTE_32F,
            _GEMM_DEFAULT,
        )
        _check(status, "cublasGemmEx")
    finally:
        blas.cublasSetPointerMode_v2(handle, pointer_mode)
        blas.cublasSetMathMode(handle, math_mode)
    return out
