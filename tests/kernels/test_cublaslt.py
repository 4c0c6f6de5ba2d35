"""FP8 products by an algorithm of our choice: torch's own bits, and torch itself where there is no choice."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fp4core.kernels import _cublaslt, gemm
from fp4core.kernels._launch import interpreted

GPU = pytest.mark.skipif(interpreted(), reason="needs a CUDA GPU with FP8 tensor cores (sm_89+)")
DEVICE = "cpu" if interpreted() else "cuda"


def operands(m: int, n: int, k: int, kinds=(torch.float8_e5m2, torch.float8_e4m3fn)):
    g = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, k, generator=g) + 0.2).to(DEVICE).to(kind) for rows, kind in zip((m, n), kinds)
    ]


def scales(*values: float) -> list[torch.Tensor]:
    return [torch.full((1,), v, device=DEVICE) for v in values]


def torchs(a, b, scale_a, scale_b, dtype):
    return torch._scaled_mm(
        a, b.t(), scale_a=scale_a[0], scale_b=scale_b[0], out_dtype=dtype, use_fast_accum=False
    )


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.setattr(_cublaslt, "_CHOSEN", {})
    monkeypatch.setattr(_cublaslt, "_CALLS_KEPT", {})


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(2048, 4096, 2048), (4096, 1536, 4096), (512, 768, 1024), (272, 48, 16)]
)
def test_results_are_torchs(m, n, k, dtype):
    """Chosen among several where that is worth its time (the first two), and under other scales later."""
    a, b = operands(m, n, k)
    for pair in (scales(2.0, 1 / 36), scales(0.25, 1.0)):
        want = torchs(a, b, *pair, dtype)
        for _ in range(2):
            assert torch.equal(gemm.fp8_gemm(a, b, *pair, dtype), want)
        whole = torch.full((m, n + 512), 7.0, dtype=dtype, device=DEVICE)
        assert torch.equal(gemm.fp8_gemm(a, b, *pair, dtype, whole[:, 256 : 256 + n]), want)
        assert (whole[:, :256] == 7).all() and (whole[:, 256 + n :] == 7).all()
    assert len(_cublaslt._CHOSEN) == 2 and None not in _cublaslt._CHOSEN.values()
    assert len(_cublaslt._CALLS_KEPT) == 4


@GPU
def test_left_and_right_types_may_change_places():
    for kinds in ((torch.float8_e4m3fn, torch.float8_e5m2), (torch.float8_e4m3fn,) * 2):
        a, b = operands(256, 128, 512, kinds)
        one = scales(1.0, 1.0)
        assert torch.equal(gemm.fp8_gemm(a, b, *one), torchs(a, b, *one, torch.bfloat16))
    assert None not in _cublaslt._CHOSEN.values()


@GPU
def test_a_column_slice_is_an_operand():
    a, b = operands(256, 128, 1024)
    one = scales(1.0, 1.0)
    a, b = a[:, 256:768], b[:, 512:]
    assert torch.equal(
        gemm.fp8_gemm(a, b, *one), torchs(a.contiguous(), b.contiguous(), *one, torch.bfloat16)
    )


@GPU
def test_torch_takes_what_is_not_aligned():
    a, b = operands(256, 128, 512)
    one = scales(1.0, 1.0)
    whole = torch.zeros(256, 160, dtype=torch.bfloat16, device=DEVICE)
    assert not _cublaslt.product(a, b, *one, whole[:, 16:144]) and not whole.any()
    want = torchs(a, b, *one, torch.bfloat16)
    assert torch.equal(gemm.fp8_gemm(a, b, *one, out=whole[:, 16:144]), want)


@GPU
def test_torch_does_it_where_kernels_must_repeat(monkeypatch):
    a, b = operands(2048, 4096, 2048)
    one = scales(1.0, 1.0)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for strict in (True, False):
        torch.use_deterministic_algorithms(strict)
        try:
            out = torch.empty(2048, 4096, dtype=torch.bfloat16, device=DEVICE)
            assert _cublaslt.product(a, b, *one, out) is not strict
        finally:
            torch.use_deterministic_algorithms(False)


@GPU
def test_operands_that_tell_nothing_choose_nothing():
    a, b = operands(512, 256, 512)
    one = scales(1.0, 1.0)
    bad = a.clone()
    bad[3, 5] = float("nan")
    for x in (torch.zeros_like(a), bad):
        want = torchs(x, b, *one, torch.bfloat16)
        assert torch.equal(gemm.fp8_gemm(x, b, *one).view(torch.int16), want.view(torch.int16))
        assert _cublaslt._CHOSEN == {}
    gemm.fp8_gemm(a, b, *one)
    assert len(_cublaslt._CHOSEN) == 1


@GPU
def test_descriptors_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(_cublaslt, "_KEPT", 3)
    a, b = operands(64, 64, 64)
    for i in range(8):
        pair = scales(float(i + 1), 1.0)
        assert torch.equal(gemm.fp8_gemm(a, b, *pair), torchs(a, b, *pair, torch.bfloat16))
        assert len(_cublaslt._CALLS_KEPT) <= 3


@pytest.mark.skipif(not interpreted(), reason="needs a machine without a GPU")
def test_without_cuda_nothing_is_done():
    a, b = operands(16, 16, 16)
    out = torch.zeros(16, 16, dtype=torch.bfloat16)
    assert not _cublaslt.product(a, b, *scales(1.0, 1.0), out) and not out.any()


def test_the_record_of_a_proposal_has_cublaslts_size():
    assert ctypes.sizeof(_cublaslt._Proposal) == 96
