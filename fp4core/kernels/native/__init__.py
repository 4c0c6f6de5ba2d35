"""The ``native`` backend: FP4 Tensor Cores of sm_100 and sm_103 (``tcgen05.mma`` kind mxf4 and mxf4nvf4).

``layout`` swizzles block scales, ``producers`` writes packed codes and swizzled scales of both views,
``gemm`` multiplies them, ``aot`` compiles all of it without a GPU. The functions here are what
``fp4core.quantize`` and ``fp4core.matmul`` call. None of it has ever run on the hardware it is for; the
same sources run in the Triton interpreter, where they give the reference's bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4core import formats
from fp4core.formats import Format
from fp4core.kernels._launch import round_up
from fp4core.kernels.native.gemm import native_gemm
from fp4core.kernels.native.layout import swizzle, unswizzle
from fp4core.kernels.native.producers import Packed, Stream, check_view, produce
from fp4core.kernels.producers import View

__all__ = ["Packed", "Stream", "matmul", "native_gemm", "produce", "quantize", "swizzle", "unswizzle"]


def quantize(
    x: Tensor,
    fmt: Format,
    *,
    axis: int = 1,
    hadamard: str | None = None,
    key: Any | None = None,
    held_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, row-major block scales and outer scales of one view; arguments and results as ``kernels.codes``.

    A rotated row view, which no step of training makes, is the rotated column view of the transposed matrix.

    Raises:
        ValueError: a format without FP4 Tensor Core support, or a row view both rotated and stochastic.
    """
    x = x.to(torch.bfloat16).contiguous()
    view = View(fmt.name, rounding="nearest" if key is None else "stochastic", hadamard=hadamard or "none")
    check_view(view, "quantize")
    stream = None
    if key is not None:
        seed = key.seed - (1 << 64) if key.seed >= 1 << 63 else key.seed
        words = [torch.as_tensor(v, dtype=torch.int64).to(x.device) for v in (seed, key.step, key.offset)]
        known = isinstance(key.offset, int) and key.offset % 16 == 0
        stream = Stream(torch.stack(words), key.producer, known)
    if axis == 1 and view.hadamard != "none":
        if stream is not None:
            raise ValueError(
                f"native: got hadamard {hadamard!r} and stochastic rounding for a row view; needed one of "
                "them, a column view (transposed=True), or backend='reference'"
            )
        _, packed = produce(x.t().contiguous(), col=view)
    elif axis == 1:
        packed, _ = produce(x, row=view, row_stream=stream)
    else:
        _, packed = produce(x, col=view, col_stream=stream)
    r, c = packed.shape
    scales = unswizzle(packed.scales, r, -(-c // fmt.block_cols), fmt.block_rows)
    outer = packed.outer if fmt.outer == "stripe" else packed.outer[0]
    return packed.codes[:, : (c + 1) // 2].contiguous(), scales, outer


def pack(q: Any) -> Packed:
    """A ``QuantizedTensor`` (leading axes flattened) in the layout of the GEMM."""
    fmt = formats.get(q.format)
    check_view(View(fmt.name), "matmul")
    k = q.shape[-1]
    codes = q.codes.reshape(-1, q.codes.shape[-1])
    rows = codes.shape[0]
    padded = torch.nn.functional.pad(codes, (0, round_up(k, 32) // 2 - codes.shape[1]))
    scales = q.block_scale.reshape(-1, q.block_scale.shape[-1])
    outer = q.outer_scale.reshape(-1).to(torch.float32)
    return Packed(padded.contiguous(), swizzle(scales, fmt.block_rows, rows), outer, fmt.name, (rows, k))


def matmul(a: Any, b: Any, *, dtype: torch.dtype) -> Tensor:
    """A B^T of two ``QuantizedTensor``s, a's leading axes restored, in ``dtype`` (BF16, or FP32 rounded to
    it)."""
    wanted = dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
    out = native_gemm(pack(a), pack(b), wanted).to(dtype)
    return out.reshape(*a.shape[:-1], b.shape[0])
