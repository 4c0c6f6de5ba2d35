"""FP8 products through cuBLASLt by the fastest of its algorithms that gives torch's bits.

``torch._scaled_mm`` takes the first algorithm that cuBLASLt's heuristic proposes and sets a product up anew
in every call. Here a kind of product (sizes, types, strides) is looked at once: of the heuristic's first
proposals those that give ``torch._scaled_mm``'s result to the bit, on the operands at hand, are timed, and
the fastest is kept with its descriptors. On an H200 at the sizes of Llama 8B all proposals give the same
bits (they sum along K in the same order), and the fastest takes 98% of the first one's time (NOTES.md).

Where anything is missing or refused, and wherever no timing may choose a kernel (``train.deterministic``),
``torch._scaled_mm`` does the product. This is the one thing beside
``_cublas`` that torch does not expose; constants are those of cublasLt.h.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4core.kernels import _cublas

_TYPE = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_32F, _R_32F = 68, 0
_TRANSA, _TRANSB, _SCALE_A, _SCALE_B, _FAST_ACCUM = 3, 4, 17, 18, 25  # CUBLASLT_MATMUL_DESC_*
_MAX_WORKSPACE = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
_WORKSPACE = 32 << 20  # torch's own on Hopper
_ALIGNED = 256  # bytes, what the heuristic supposes of every pointer
_PROPOSALS = 8
_ROUNDS, _CALLS = 3, 4  # of timing each proposal
_LEAST = 1 << 33  # multiplications below which choosing is not worth its time
_KEPT = 4096  # descriptors; each is some hundred bytes of host memory


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass
class _Call:
    """Everything of a product but its pointers and stream."""

    description: int
    left: int
    right: int
    result: int
    proposal: _Proposal


@functools.cache
def library() -> ctypes.CDLL | None:
    """cuBLASLt as torch has loaded it, its arguments declared; None where there is none."""
    found = _cublas.library("cublasLt")
    if found is None:
        return None
    pointer = ctypes.c_void_p
    found.cublasLtMatmul.argtypes = [pointer] * 14 + [ctypes.c_size_t, pointer]
    found.cublasLtMatmulAlgoGetHeuristic.argtypes = [*[pointer] * 7, ctypes.c_int, pointer, pointer]
    found.cublasLtMatmulDescCreate.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    found.cublasLtMatmulDescSetAttribute.argtypes = [pointer, ctypes.c_int, pointer, ctypes.c_size_t]
    sizes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]
    found.cublasLtMatrixLayoutCreate.argtypes = [pointer, ctypes.c_int, *sizes]
    found.cublasLtMatmulPreferenceSetAttribute.argtypes = [pointer, ctypes.c_int, pointer, ctypes.c_size_t]
    for what in ("MatmulDesc", "MatmulPreference", "MatrixLayout"):
        getattr(found, f"cublasLt{what}Destroy").argtypes = [pointer]
    return found


class _Refused(Exception):
    """cuBLASLt would not do it."""


def _check(status: int) -> None:
    if status != 0:
        raise _Refused(status)


@functools.cache
def _handle(device: int) -> int:
    made = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(library().cublasLtCreate(ctypes.byref(made)))
    return made.value


@functools.cache
def _workspace(device: int, stream: int) -> Tensor:
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=f"cuda:{device}")


@functools.cache
def _numbers() -> tuple[int, int, ctypes.Array]:
    """Addresses of 1 and 0 in FP32, and what holds them."""
    both = (ctypes.c_float * 2)(1.0, 0.0)
    return ctypes.addressof(both), ctypes.addressof(both) + 4, both


def _description(scale_a: int, scale_b: int) -> int:
    lt, made = library(), ctypes.c_void_p()
    _check(lt.cublasLtMatmulDescCreate(ctypes.byref(made), _COMPUTE_32F, _R_32F))
    # the operands change places: cuBLAS is column-major, out^T [N, M] = b [N, K] a^T [K, M]
    settings = (
        (_TRANSA, ctypes.c_int(1)),
        (_TRANSB, ctypes.c_int(0)),
        (_FAST_ACCUM, ctypes.c_int8(0)),
        (_SCALE_A, ctypes.c_void_p(scale_b)),
        (_SCALE_B, ctypes.c_void_p(scale_a)),
    )
    for attribute, value in settings:
        size = ctypes.sizeof(value)
        _check(lt.cublasLtMatmulDescSetAttribute(made, attribute, ctypes.byref(value), size))
    return made.value


def _layout(kind: torch.dtype, rows: int, columns: int, leading: int) -> int:
    made = ctypes.c_void_p()
    _check(library().cublasLtMatrixLayoutCreate(ctypes.byref(made), _TYPE[kind], rows, columns, leading))
    return made.value


def _proposals(device: int, call: _Call, most: int) -> list[_Proposal]:
    lt, preference = library(), ctypes.c_void_p()
    _check(lt.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    size = ctypes.c_size_t(_WORKSPACE)
    found, count = (_Proposal * most)(), ctypes.c_int()
    try:
        _check(lt.cublasLtMatmulPreferenceSetAttribute(preference, _MAX_WORKSPACE, ctypes.byref(size), 8))
        _check(
            lt.cublasLtMatmulAlgoGetHeuristic(
                _handle(device), call.description, call.left, call.right, call.result, call.result,
                preference, most, ctypes.addressof(found), ctypes.addressof(count),
            )
        )  # fmt: skip
    finally:
        lt.cublasLtMatmulPreferenceDestroy(preference)
    return [proposal for proposal in found[: count.value] if proposal.state == 0]


def _run(call: _Call, proposal: _Proposal, device: int, a: int, b: int, out: int) -> None:
    one, zero, _ = _numbers()
    stream = torch.cuda.current_stream(device).cuda_stream
    space = _workspace(device, stream).data_ptr() if proposal.workspace else 0
    _check(
        library().cublasLtMatmul(
            _handle(device), call.description, one, b, call.left, a, call.right, zero, out, call.result,
            out, call.result, ctypes.addressof(proposal), space, proposal.workspace, stream,
        )
    )  # fmt: skip


_CALLS_KEPT: dict[tuple, _Call] = {}  # by everything that a call depends on, the scales' addresses included
_CHOSEN: dict[tuple, _Proposal | None] = {}  # by sizes, types and strides; None: torch does it


def _strict() -> bool:
    """Whether no timing may choose a kernel, nor the operands that a process happens to meet first."""
    strict = torch.are_deterministic_algorithms_enabled()
    return strict and not torch.is_deterministic_algorithms_warn_only_enabled()


def _choose(call: _Call, kind: tuple, a: Tensor, b: Tensor, expected: Tensor) -> _Proposal | None:
    """The fastest proposal whose result on these operands is ``expected`` to the bit."""
    m, n, k, device = kind[0], kind[1], kind[2], kind[-1]
    most = 1 if m * n * k < _LEAST else _PROPOSALS
    out = torch.empty_strided(expected.shape, (kind[-2], 1), dtype=expected.dtype, device=expected.device)
    fitting: list[_Proposal] = []
    for proposal in _proposals(device, call, most):
        out.fill_(torch.nan)
        try:
            _run(call, proposal, device, a.data_ptr(), b.data_ptr(), out.data_ptr())
        except _Refused:
            continue
        if torch.equal(out, expected):
            fitting.append(proposal)
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    seconds: list[list[float]] = [[] for _ in fitting]
    for _ in range(_ROUNDS):
        for times, proposal in zip(seconds, fitting, strict=True):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            for _ in range(_CALLS):
                _run(call, proposal, device, a.data_ptr(), b.data_ptr(), out.data_ptr())
            marks[1].record()
            marks[1].synchronize()
            times.append(marks[0].elapsed_time(marks[1]))
    best = min(range(len(fitting)), key=lambda i: statistics.median(seconds[i]))
    return fitting[best]


def _prepare(
    kind: tuple, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor
) -> _Call | None:
    """Descriptors and algorithm; None where torch does this product, for good if ``_CHOSEN`` says so."""
    m, n, k = kind[:3]
    call = _Call(
        _description(scale_a.data_ptr(), scale_b.data_ptr()),
        _layout(b.dtype, k, n, b.stride(0)),
        _layout(a.dtype, k, m, a.stride(0)),
        _layout(out.dtype, n, m, out.stride(0)),
        _Proposal(),
    )
    if kind not in _CHOSEN:
        expected = a.new_empty((m, n), dtype=out.dtype)
        torch_product(a, b, scale_a, scale_b, expected)
        # zeros, infinities and NaN tell no two algorithms apart: the next operands may
        if expected.isfinite().all() and expected.any():
            _CHOSEN[kind] = _choose(call, kind, a, b, expected)
    chosen = _CHOSEN.get(kind)
    if chosen is None:
        _destroy(call)
        return None
    call.proposal = chosen
    return call


def torch_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> None:
    """What ``product`` computes, by torch, always; arguments as there, of any alignment."""
    torch._scaled_mm(
        a,
        b.t(),
        scale_a=scale_a.reshape(()),
        scale_b=scale_b.reshape(()),
        out_dtype=out.dtype,
        use_fast_accum=False,
        out=out,
    )


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> bool:
    """out [M, N] = scale_a scale_b (a [M, K] b [N, K]^T), FP32 sums promoted every 128; whether it was done.

    Args:
        a, b: FP8 with unit stride along K, not both E5M2; sizes multiples of 16.
        scale_a, scale_b: FP32 [1] on the device.
        out: BF16 or FP32 with unit stride along N; untouched when the answer is False.
    """
    pa, pb, po = a.data_ptr(), b.data_ptr(), out.data_ptr()
    if (pa | pb | po) % _ALIGNED or library() is None or _strict():
        return False
    (m, k), n, device = a.shape, b.shape[0], a.get_device()
    kind = (m, n, k, a.dtype, b.dtype, out.dtype, a.stride(0), b.stride(0), out.stride(0), device)
    key = (kind, scale_a.data_ptr(), scale_b.data_ptr())
    call = _CALLS_KEPT.get(key)
    if call is None:
        # choosing waits for the device, which a graph that is being captured must not
        if _CHOSEN.get(kind, a) is None or torch.cuda.is_current_stream_capturing():
            return False
        try:
            call = _prepare(kind, a, b, scale_a, scale_b, out)
        except _Refused:
            _CHOSEN[kind] = None
        except torch.OutOfMemoryError:  # room for two more results may be there another time
            pass
        if call is None:
            return False
        if len(_CALLS_KEPT) >= _KEPT:
            _forget()
        _CALLS_KEPT[key] = call
    try:
        _run(call, call.proposal, device, pa, pb, po)
    except _Refused:
        _CHOSEN[kind] = None
        _forget()
        return False
    return True


def _destroy(call: _Call) -> None:
    library().cublasLtMatmulDescDestroy(call.description)
    for layout in (call.left, call.right, call.result):
        library().cublasLtMatrixLayoutDestroy(layout)


def _forget() -> None:
    while _CALLS_KEPT:
        _destroy(_CALLS_KEPT.popitem()[1])
