"""The unchecked divisions of the fast scale chain against correctly rounded ones, for every mantissa."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from fp4core.kernels._launch import interpreted
from fp4core.kernels.device import approximate_reciprocal, divide_by, reciprocal, round_e4m3, six_over

pytestmark = pytest.mark.skipif(interpreted(), reason="needs a CUDA GPU: compares PTX instructions (sm_90)")
MANTISSAS = 1 << 23


@triton.jit
def _six_kernel(wrong_ptr, EXPONENT, BLOCK: tl.constexpr):
    bits = (EXPONENT << 23) + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = bits.to(tl.float32, bitcast=True)
    fast = round_e4m3(six_over(d), True)
    exact = round_e4m3(tl.div_rn(tl.zeros_like(d) + 6.0, d), False)
    tl.atomic_add(wrong_ptr, tl.sum((fast != exact).to(tl.int32)))


@triton.jit
def _reciprocal_kernel(wrong_ptr, EXPONENT, BLOCK: tl.constexpr):
    bits = (EXPONENT << 23) + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = bits.to(tl.float32, bitcast=True)
    exact = tl.div_rn(tl.zeros_like(d) + 1.0, d)
    tl.atomic_add(wrong_ptr, tl.sum((reciprocal(d) != exact).to(tl.int32)))


@triton.jit
def _divide_kernel(a_ptr, b_ptr, wrong_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i)
    b = tl.load(b_ptr + i)
    r = tl.div_rn(tl.zeros_like(b) + 1.0, b)
    tl.atomic_add(wrong_ptr, tl.sum((divide_by(a, b, r) != tl.div_rn(a, b)).to(tl.int32)))


@triton.jit
def _e4m3_kernel(m_ptr, wrong_ptr, N: tl.constexpr):
    m = tl.load(m_ptr + tl.arange(0, N))
    fast = round_e4m3(approximate_reciprocal(m), True)
    exact = round_e4m3(tl.div_rn(tl.zeros_like(m) + 1.0, m), False)
    tl.atomic_add(wrong_ptr, tl.sum((fast != exact).to(tl.int32)))


@pytest.fixture
def wrong() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("exponent", range(-12, 13))
def test_six_over_rounds_to_the_same_e4m3(exponent: int, wrong: torch.Tensor) -> None:
    _six_kernel[(MANTISSAS // 2048,)](wrong, 127 + exponent, BLOCK=2048)
    assert wrong.item() == 0


@pytest.mark.parametrize("exponent", [-100, -80, -30, -1, 0, 1, 2, 40, 99])
def test_reciprocal_is_correctly_rounded(exponent: int, wrong: torch.Tensor) -> None:
    _reciprocal_kernel[(MANTISSAS // 2048,)](wrong, 127 + exponent, BLOCK=2048)
    assert wrong.item() == 0


def test_division_with_remainder_corrections_is_correctly_rounded(wrong: torch.Tensor) -> None:
    n = 1 << 25
    g = torch.Generator(device="cuda").manual_seed(0)
    a = torch.rand(n, device="cuda", generator=g) + 1.0
    b = torch.rand(n, device="cuda", generator=g) * 1000.0 + 0.5
    b[: n // 4] = (1.0 + torch.arange(n // 4, device="cuda") * 2.0**-23).to(torch.float32)
    b[-1], a[-1] = 2.0 - 2.0**-23, 1.0  # the all-ones mantissa, the exception of Markstein's theorem
    _divide_kernel[(n // 2048,)](a, b, wrong, BLOCK=2048)
    assert wrong.item() == 0


def test_reciprocals_of_e4m3_values_round_alike(wrong: torch.Tensor) -> None:
    m = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    m = torch.nn.functional.pad(m, (0, 2), value=1.0).cuda()
    _e4m3_kernel[(1,)](m, wrong, N=128)
    assert wrong.item() == 0
