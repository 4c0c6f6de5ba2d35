"""The native kernels' own sources against the reference: interpreted here, compiled on a GPU.

On a GPU without FP4 Tensor Cores the producers compile with software rounding, and MXFP4 products run through
Triton's emulation of dot_scaled; NVFP4 products need sm_100 (their compiler aborts on sm_90).
"""

from __future__ import annotations

import pytest
import torch

import fp4core
from fp4core import formats
from fp4core.kernels import native
from fp4core.kernels._launch import interpreted
from fp4core.kernels.native.gemm import OVERLAPPED, WIDE
from fp4core.kernels.native.producers import has_fp4_instructions
from fp4core.kernels.producers import View
from fp4core.ops.quantize import SRKey, quantize
from fp4core.reference import casts
from fp4core.reference import quantize as reference

DEVICE = "cpu" if interpreted() else "cuda"
EMULATED = not interpreted() and not has_fp4_instructions(torch.device("cuda"))
NAMES = [n for n in formats.names() if formats.get(n).block_scale != "ue5m3"]
ONE_D = [n for n in NAMES if not formats.get(n).two_d]


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels must write holds garbage before: NaN, and 0xA5 bytes."""
    empty = torch.Tensor.new_empty

    def filled(self: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        made = empty(self, *args, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 0xA5)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


def awkward(rows: int, cols: int) -> torch.Tensor:
    """Zero rows, negative zeros, underflow, near overflow, subnormals, and zero blocks."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(rows, cols, generator=g) * torch.exp(2 * torch.randn(rows, 1, generator=g))
    x[3], x[5], x[9], x[11] = 0.0, -0.0, 3e38, 1e-39
    x[7, 3] = -1e-30
    x[20:30, cols // 2 :] = 0.0
    return x


def expected(x: torch.Tensor, fmt: formats.Format, axis: int, **options: object) -> tuple[torch.Tensor, ...]:
    q = reference.quantize_2d(x, fmt, axis=axis, **options)
    codes, scale = casts.e2m1_codes(q.values), q.scales.byte
    if axis == 0:
        codes, scale = codes.mT, scale.mT
    return reference.pack(codes.contiguous()), scale.contiguous(), q.scales.outer


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bytes of x, every NaN the same one (a GPU's differ from a CPU's)."""
    x = x.detach().cpu().reshape(-1)
    x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x) if x.is_floating_point() else x
    return x.view(torch.uint8)


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], what: str) -> None:
    for part, a, b in zip(("codes", "scales", "outer scales"), got, want):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {part}"
        assert torch.equal(bits(a), bits(b)), f"{what}: {part}"


@pytest.mark.parametrize("axis", [1, 0], ids=["row", "column"])
@pytest.mark.parametrize("name", NAMES)
def test_views_equal_the_reference(name: str, axis: int) -> None:
    # 130 x 92: a second, nearly empty tile in one direction and a ragged one in both
    x, fmt = awkward(130, 92), formats.get(name)
    same(native.quantize(x.to(DEVICE), fmt, axis=axis), expected(x, fmt, axis), name)


@pytest.mark.parametrize("offset", [1600, 12345], ids=["aligned places", "odd places"])
@pytest.mark.parametrize("axis", [1, 0], ids=["row", "column"])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4_te", "nvfp4_cta"])
def test_stochastic_views_draw_the_reference_bytes(name: str, axis: int, offset: int) -> None:
    x, fmt, key = awkward(40, 144), formats.get(name), SRKey((1 << 63) + 5, 3, 9, offset)
    same(native.quantize(x.to(DEVICE), fmt, axis=axis, key=key), expected(x, fmt, axis, key=key), name)


@pytest.mark.parametrize("hadamard", ["plain16", "fixed16", "fixed32"])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4_te", "nvfp4_cta"])
def test_rotated_views_equal_the_reference(name: str, hadamard: str) -> None:
    x, fmt = awkward(72, 40), formats.get(name)  # the last group of 8 tokens stays as it is
    got = native.quantize(x.to(DEVICE), fmt, axis=0, hadamard=hadamard)
    same(got, expected(x, fmt, 0, hadamard=hadamard), name)


def test_a_rotated_row_view_is_the_transposed_matrix_column_view() -> None:
    x, fmt = awkward(36, 64), formats.get("nvfp4_cta")
    got = native.quantize(x.to(DEVICE), fmt, axis=1, hadamard="fixed32")
    same(got, expected(x, fmt, 1, hadamard="fixed32"), "row")


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4_w2d", "nvfp4_te", "nvfp4_cta"])
def test_non_finite_values_stay_in_their_domain(name: str) -> None:
    x, fmt = awkward(40, 64), formats.get(name)
    x[-1, -1], x[0, 0] = float("nan"), float("inf")
    same(native.quantize(x.to(DEVICE), fmt, axis=1), expected(x, fmt, 1), name)


def test_both_views_come_from_one_call_and_poison_survives_nowhere() -> None:
    x = awkward(130, 80).to(torch.bfloat16).to(DEVICE)
    row, col = native.produce(x, View("nvfp4_cta"), View("mxfp4", hadamard="plain16"))
    want = expected(x.cpu().float(), formats.get("nvfp4_cta"), 1)
    same((row.codes[:, :40], native.unswizzle(row.scales, 130, 5), row.outer), want, "row")
    codes, scale, _ = expected(x.cpu().float(), formats.get("mxfp4"), 0, hadamard="plain16")
    same((col.codes[:, :65], native.unswizzle(col.scales, 80, 5)), (codes, scale), "column")
    # beyond K: zero codes, and scale bytes that decode to a number
    assert row.codes.shape == (130, 48) and not row.codes[:, 40:].any()
    assert col.codes.shape == (80, 80) and not col.codes[:, 65:].any()
    padding = native.swizzle(torch.full((130, 5), 255, dtype=torch.uint8)) == 0
    assert not row.scales.cpu()[padding].any()


def exact_operands(name: str, rows: int, k: int, seed: int) -> fp4core.QuantizedTensor:
    """Small integers, so that every partial sum is exact in FP32: the order of summation is free."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, (rows, k), generator=g).float() * torch.exp2(
        torch.randint(-2, 3, (rows, 1), generator=g).float()
    )
    return quantize(x, name)


def _runs(name: str) -> None:
    if EMULATED and formats.get(name).block_scale == "e4m3":
        pytest.skip("NVFP4 products need a GPU with FP4 Tensor Cores (sm_100, sm_103)")


PAIRS = [
    ("mxfp4", "mxfp4_w2d", OVERLAPPED),
    ("mxfp4_ocp", "mxfp4", WIDE),
    ("nvfp4", "nvfp4_w2d", WIDE),
    ("nvfp4_te", "nvfp4_te", OVERLAPPED),
    ("nvfp4_cta", "nvfp4_cta", WIDE),
    ("nvfp4_cta", "nvfp4_cta_w2d", OVERLAPPED),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("left", "right", "schedule"), PAIRS, ids=[f"{a}-{b}" for a, b, _ in PAIRS])
def test_products_equal_the_reference_bit_for_bit(left, right, schedule, dtype) -> None:
    _runs(left)
    # 272 is one K step and a block; 270 rows reach into a second stripe of 256
    a, b = exact_operands(left, 270, 272, 1), exact_operands(right, 40, 272, 2)
    want = fp4core.matmul(a, b, dtype=dtype, backend="reference")
    got = native.native_gemm(_packed(a), _packed(b), dtype, schedule=schedule)
    assert torch.equal(got.cpu(), want), (got.cpu() - want).abs().max()


def _packed(q: fp4core.QuantizedTensor) -> native.Packed:
    p = native.pack(q)
    return native.Packed(p.codes.to(DEVICE), p.scales.to(DEVICE), p.outer.to(DEVICE), p.format, p.shape)


def test_smallest_and_nan_scale_bytes_keep_their_meaning() -> None:
    a, b = exact_operands("mxfp4", 8, 64, 1), exact_operands("mxfp4", 16, 64, 2)
    a.block_scale[0, 0], a.block_scale[1, 1] = 0, 255
    want = fp4core.matmul(a, b, backend="reference")
    got = native.matmul(_on_device(a), _on_device(b), dtype=torch.float32).cpu()
    assert want[1].isnan().all()
    if EMULATED:
        # Triton decodes byte 0 as 0 instead of 2^-127, and 255 as NaN or infinity: never a number where the
        # reference has none, and otherwise 64 terms of at most 36 x 2^-127 apart
        assert torch.equal(got.isfinite(), want.isfinite())
        assert ((got - want).nan_to_num(0.0).abs() <= 64 * 36 * 2.0**-127).all()
        return
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_matmul_keeps_leading_axes() -> None:
    g = torch.Generator().manual_seed(0)
    a = quantize(torch.randint(-4, 5, (2, 3, 48), generator=g).float(), "mxfp4")
    b = exact_operands("mxfp4", 5, 48, 2)
    got = native.matmul(*(_on_device(q) for q in (a, b)), dtype=torch.bfloat16)
    assert torch.equal(got.cpu(), fp4core.matmul(a, b, dtype=torch.bfloat16, backend="reference"))


def _on_device(q: fp4core.QuantizedTensor) -> fp4core.QuantizedTensor:
    parts = (q.codes.to(DEVICE), q.block_scale.to(DEVICE), q.outer_scale.to(DEVICE))
    return fp4core.QuantizedTensor(*parts, q.format, q.shape)


@pytest.mark.parametrize("shape", [(0, 64), (5, 0)], ids=["no rows", "no columns"])
def test_empty_matrices(shape: tuple[int, int]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    row, col = native.produce(x, View("mxfp4"), View("nvfp4_cta"))
    assert row.shape == shape and col.shape == shape[::-1]
    b, _ = native.produce(torch.ones(3, shape[1], dtype=torch.bfloat16, device=DEVICE), View("mxfp4"))
    assert native.native_gemm(row, b).shape == (shape[0], 3)


@pytest.mark.parametrize(
    ("view", "stream", "text"),
    [
        (View("ue5m3"), None, "E8M0 or E4M3 only"),
        (View("mxfp4", hadamard="fixed32"), None, "needed 'none'"),
        (View("mxfp4", rounding="stochastic"), None, "without a stream"),
        (View("mxfp4"), native.Stream(torch.zeros(3, dtype=torch.int64), 0), "with a stream"),
    ],
    ids=["ue5m3", "rotated row", "no stream", "needless stream"],
)
def test_producers_say_what_they_cannot_do(view: View, stream: native.Stream | None, text: str) -> None:
    x = torch.zeros(16, 32, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match=text):
        native.produce(x, view, row_stream=stream)


def test_products_of_unlike_block_scales_are_refused() -> None:
    x = torch.ones(16, 32, dtype=torch.bfloat16, device=DEVICE)
    (a, _), (b, _) = native.produce(x, View("mxfp4")), native.produce(x, View("nvfp4"))
    with pytest.raises(ValueError, match="one type of block scale"):
        native.native_gemm(a, b)


def test_e4m3_products_are_refused_without_fp4_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their compilation would abort the process."""
    x = torch.ones(16, 32, dtype=torch.bfloat16, device=DEVICE)
    a, _ = native.produce(x, View("nvfp4"))
    monkeypatch.setattr("fp4core.kernels.native.gemm.interpreted", lambda: False)
    monkeypatch.setattr("fp4core.kernels.native.gemm.has_fp4_instructions", lambda device: False)
    with pytest.raises(ValueError, match=r"nvfp4 on .*only E8M0 ones can be emulated; use backend='carrier'"):
        native.native_gemm(a, a)
