"""Quantise, decode and multiply: the public functions over the reference and the kernels.

    value = E2M1 code x block_scale x outer_scale

Layout: the contraction axis is the last axis; leading axes are rows, flattened. ``codes`` are packed two per
byte along it (even index in the low nibble), ``block_scale`` has one raw byte per block, ``outer_scale`` is
FP32: 0-dim, or one per 256 rows. Shapes that are no multiple of a block are padded with zeros in thought
only: padding is in no scale that it would change and in no result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from fp4core import formats
from fp4core.ops.backends import resolve
from fp4core.reference import casts
from fp4core.reference import hadamard as _hadamard
from fp4core.reference import quantize as _reference
from fp4core.reference.philox import SRKey

__all__ = ["QuantizedTensor", "SRKey", "fake_quant", "matmul", "quantize", "quantize_dual"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class OperandLike(Protocol):
    """What ``fp4core.recipe.Operand`` looks like."""

    format: str
    rounding: str
    hadamard: str


@dataclass(frozen=True)
class QuantizedTensor:
    """One view of a tensor in FP4.

    Attributes:
        codes: uint8 [..., ceil(K / 2)], packed E2M1 codes.
        block_scale: uint8, raw bytes. 1D formats [..., ceil(K / block)], 2D formats the tile grid
            [ceil(R / block), ceil(K / block)].
        outer_scale: FP32, 0-dim, or [ceil(rows / 256)] for ``nvfp4_cta``.
        format: format name.
        shape: logical shape [..., K].
        hadamard: rotation the values carry along K, or None.
        rounding: "nearest" or "stochastic".
        backend: which implementation made it.
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    outer_scale: torch.Tensor
    format: str
    shape: torch.Size
    hadamard: str | None = None
    rounding: str = "nearest"
    backend: str = "reference"

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    def unpack(self) -> torch.Tensor:
        """uint8 codes 0..15 of the logical shape."""
        return _reference.unpack(self.codes, self.shape[-1])

    def decode_blocks(self) -> torch.Tensor:
        """FP32 [rows, K] of code x block_scale, without the outer scale: exact, and what a GEMM contracts."""
        fmt, values = self._values()
        return _reference.decode_blocks_(values, self._grid(fmt), fmt, 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decoded values of the logical shape, computed in FP32, then cast to ``dtype``.

        A rotated tensor decodes to rotated values.
        """
        fmt, values = self._values()
        decoded = _reference.decode_(values, self._grid(fmt), self.outer_scale, fmt, 1)
        return decoded.view(self.shape).to(dtype)

    def _values(self) -> tuple[formats.Format, torch.Tensor]:
        rows = math.prod(self.shape[:-1])
        return formats.get(self.format), casts.e2m1_decode(self.unpack()).reshape(rows, self.shape[-1])

    def _grid(self, fmt: formats.Format) -> torch.Tensor:
        value = casts.DECODE[fmt.block_scale](self.block_scale)
        return value.reshape(math.prod(value.shape[:-1]), value.shape[-1])


def _check_input(x: torch.Tensor, fmt: formats.Format | None, transposed: bool) -> torch.Tensor:
    """x as [rows, features]."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"quantize: got {type(x).__name__}; needed a torch tensor")
    if x.dtype not in _DTYPES:
        raise ValueError(
            f"quantize: got dtype {x.dtype}; needed one of {', '.join(map(str, _DTYPES))}; x.float() converts"
        )
    if x.dim() == 0:
        raise ValueError("quantize: got a 0-dim tensor; needed at least one axis, the last one to contract")
    if fmt is not None and fmt.two_d and x.dim() != 2:
        raise ValueError(
            f"quantize: {fmt.name} has {fmt.block_rows} x {fmt.block_cols} tiles and needs a 2-dim tensor; "
            f"got shape {tuple(x.shape)}"
        )
    if transposed and x.dim() < 2:
        raise ValueError(f"quantize: transposed needs at least two axes; got shape {tuple(x.shape)}")
    # quantisers are no part of an autograd graph; linears define their own backward
    return x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _check_rounding(rounding: str, key: SRKey | None) -> SRKey | None:
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding: got {rounding!r}; needed 'nearest' or 'stochastic'")
    if rounding == "nearest":
        return None
    if not isinstance(key, SRKey):
        raise ValueError(
            f"stochastic rounding needs key=fp4core.SRKey(seed, step, producer, offset); got {key!r}"
        )
    return key


def _check_amax(amax: torch.Tensor | float | None, fmt: formats.Format) -> torch.Tensor | None:
    if amax is None:
        return None
    if not fmt.sampled_amax:
        takers = [n for n in formats.names() if formats.get(n).sampled_amax]
        raise ValueError(
            f"amax: format {fmt.name} computes its own; only {', '.join(takers)} take a held one"
        )
    amax = torch.as_tensor(amax, dtype=torch.float32)
    if amax.numel() != 1:
        raise ValueError(f"amax: got shape {tuple(amax.shape)}; needed one value, the tensor's amax")
    return amax.reshape(())


def quantize(
    x: torch.Tensor,
    format: str,
    *,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    hadamard: str | None = None,
    key: SRKey | None = None,
    transposed: bool = False,
    amax: torch.Tensor | float | None = None,
    backend: str = "auto",
) -> QuantizedTensor:
    """Quantise ``x`` to FP4 with scales along its last axis.

    Args:
        x: [..., K], BF16, FP16, FP32 or FP64; rounded to BF16 first. 2D formats need [R, K].
        format: one of ``fp4core.formats.names()``.
        rounding: of the E2M1 values; "stochastic" needs ``key``.
        hadamard: None, "plain16", "fixed16" or "fixed32": rotate along the contraction axis first. A last
            group shorter than 16 (32) stays unrotated.
        key: stream of stochastic-rounding bytes.
        transposed: quantise the column view instead: x [T, F] (leading axes flattened) gives a
            QuantizedTensor of shape [F, T] with blocks along T. The random bytes are those of the
            elements' places in x, not in its transpose.
        amax: held amax of formats that sample it (``ue5m3*``), one FP32 value; 0 means nothing was
            seen yet and the tensor's own is used. None takes the tensor's own.
        backend: "auto", or one of ``fp4core.backends()``. All give the same bits.

    Returns:
        QuantizedTensor.

    Raises:
        ValueError: unknown format, rounding, hadamard or backend; a dtype that is not floating point; a
            0-dim tensor; a 2D format on other than two axes; stochastic rounding without a key.

    A NaN or infinity makes its block's scale the NaN byte, and with a tensor- or stripe-wide amax
    everything under that amax decodes to NaN. An all-zero block has scale byte 0 (UE5M3: 1.0) and codes 0.
    """
    fmt = formats.get(format)
    x2d = _check_input(x, fmt, transposed)
    key = _check_rounding(rounding, key)
    rotation = _hadamard.check_hadamard(hadamard)
    held = _check_amax(amax, fmt)
    backend, kernels = resolve(backend, x.device, "quantize")
    shape = torch.Size((x2d.shape[1], x2d.shape[0])) if transposed else x.shape
    axis = 0 if transposed else 1
    if kernels is not None:
        codes, scale, outer = kernels(x2d, fmt, axis=axis, hadamard=rotation, key=key, held_amax=held)
    else:
        q = _reference.quantize_2d(x2d, fmt, axis=axis, hadamard=rotation, key=key, held_amax=held)
        codes, scale, outer = casts.e2m1_codes(q.values), q.scales.byte, q.scales.outer
        if transposed:
            codes, scale = codes.mT, scale.mT
        codes = _reference.pack(codes.contiguous())
    if not fmt.two_d:
        scale = scale.reshape(*shape[:-1], scale.shape[-1])
    return QuantizedTensor(
        codes=codes.reshape(*shape[:-1], codes.shape[-1]),
        block_scale=scale.contiguous(),
        outer_scale=outer,
        format=fmt.name,
        shape=shape,
        hadamard=rotation,
        rounding=rounding,
        backend=backend,
    )


def _view_options(view: str | Mapping[str, Any] | OperandLike, key: SRKey | None) -> dict[str, Any]:
    if isinstance(view, str):
        options: dict[str, Any] = {"format": view}
    elif isinstance(view, Mapping):
        options = dict(view)
    else:
        options = {name: getattr(view, name) for name in ("format", "rounding", "hadamard")}
    allowed = {"format", "rounding", "hadamard", "key", "amax"}
    if "format" not in options or not options.keys() <= allowed:
        raise ValueError(
            f"quantize_dual: a view is a format name, an Operand, or a mapping with 'format' and any of "
            f"{sorted(allowed - {'format'})}; got {view!r}"
        )
    if key is not None:
        options["key"] = key
    return options


def quantize_dual(
    x: torch.Tensor,
    *,
    row: str | Mapping[str, Any] | OperandLike,
    col: str | Mapping[str, Any] | OperandLike,
    row_key: SRKey | None = None,
    col_key: SRKey | None = None,
    backend: str = "auto",
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Both views of one tensor, as a fused producer would emit them from one load.

    Args:
        x: [..., F]; leading axes are T tokens.
        row: options of the row view [..., F], blocks along F: a format name, an Operand, or a mapping with
            ``format`` and any of ``rounding``, ``hadamard``, ``key``, ``amax``.
        col: the same for the column view [F, T], blocks along T.
        row_key, col_key: streams for stochastic views; they must differ in the producer, so that no two
            views share bytes.

    Returns:
        (rows, columns).

    Raises:
        ValueError: as ``quantize``, or when both views would draw the same bytes.
    """
    row_options, col_options = _view_options(row, row_key), _view_options(col, col_key)
    drawn = [
        o["key"] for o in (row_options, col_options) if o.get("rounding") == "stochastic" and o.get("key")
    ]
    if len(drawn) == 2 and drawn[0].producer == drawn[1].producer and drawn[0].seed == drawn[1].seed:
        raise ValueError(
            f"quantize_dual: both views use producer {drawn[0].producer}; give each view its own, so that "
            "their random bytes are independent"
        )
    rows = quantize(x, **row_options, backend=backend)
    return rows, quantize(x, **col_options, transposed=True, backend=backend)


def fake_quant(
    x: torch.Tensor,
    operand: OperandLike,
    key: SRKey | None = None,
    transposed: bool = False,
    *,
    amax: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Decoded values of one operand without the detour through codes: what training on the reference uses.

    Equals ``quantize(...).dequantize()`` bit for bit. ``operand.format`` may also be "bf16": then the values
    are x rounded to BF16, rotated and rounded again if the operand says so.

    Args:
        x: [..., F]; leading axes are flattened to T rows when ``transposed``.
        operand: anything with ``format``, ``rounding``, ``hadamard``.
        key: for stochastic rounding.
        transposed: the column view [F, T], blocks along T, as a transposed (non-contiguous) result.
        amax: held amax of formats that sample it, as in ``quantize``.

    Returns:
        FP32 tensor of x's shape, or [F, T].

    Raises:
        ValueError: as ``quantize``.
    """
    fmt = None if operand.format == "bf16" else formats.get(operand.format)
    x2d = _check_input(x, fmt, transposed)
    key = _check_rounding(operand.rounding, key)
    rotation = _hadamard.check_hadamard(operand.hadamard)
    axis = 0 if transposed else 1
    if fmt is None:
        if key is not None:
            raise ValueError("fake_quant: format bf16 has no stochastic rounding; needed rounding='nearest'")
        values = _hadamard.rotate(_reference.round_to_bf16(x2d), rotation, axis)
    else:
        held = _check_amax(amax, fmt)
        values = _reference.fake_quant_2d(x2d, fmt, axis=axis, hadamard=rotation, key=key, held_amax=held)
    return values.mT if transposed else values.view(x.shape)


def matmul(
    a: QuantizedTensor, b: QuantizedTensor, *, dtype: torch.dtype = torch.float32, backend: str = "auto"
) -> torch.Tensor:
    """FP4 contraction a b^T: FP32 accumulation over code x block_scale, outer scales in the epilogue.

    Every product of the accumulation is exact; the epilogue multiplies once by alpha_i beta_j, itself one
    FP32 product of the outer scales (for two formats with constant outer scales the FP32 nearest to the
    constant: 1/36 for the report's MXFP4). ``nvfp4_cta`` has one alpha or beta per 256 rows.

    Args:
        a: [..., K].
        b: [N, K].
        dtype: of the result; BF16 rounds the FP32 result once.

    Returns:
        [..., N].

    Raises:
        ValueError: different K, different Hadamard rotations (they would not cancel), or b not 2-dim.
    """
    if len(b.shape) != 2 or a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"matmul: got shapes {tuple(a.shape)} and {tuple(b.shape)}; needed [..., K] and [N, K], both "
            "with the contraction axis last"
        )
    if a.hadamard != b.hadamard:
        raise ValueError(
            f"matmul: operands rotated differently ({a.hadamard!r} and {b.hadamard!r}) do not cancel; rotate "
            "both or neither"
        )
    _, kernels = resolve(backend, a.device, "matmul")
    if kernels is not None:
        return kernels(a, b, dtype=dtype)
    acc = a.decode_blocks() @ b.decode_blocks().mT
    return (acc * _alpha_beta(a, b, *acc.shape)).to(dtype).view(*a.shape[:-1], b.shape[0])


def _alpha_beta(a: QuantizedTensor, b: QuantizedTensor, rows: int, cols: int) -> torch.Tensor:
    """FP32 product of the outer scales, broadcastable to [rows, cols]."""
    fa, fb = formats.get(a.format), formats.get(b.format)
    if fa.outer == fb.outer == "constant":
        constant = fa.outer_constant * fb.outer_constant
        return torch.tensor(constant, dtype=torch.float32, device=a.device)
    alpha, beta = a.outer_scale, b.outer_scale
    if fa.outer == "stripe":
        alpha = alpha.repeat_interleave(fa.stripe_rows)[:rows, None]
    if fb.outer == "stripe":
        beta = beta.repeat_interleave(fb.stripe_rows)[None, :cols]
    return alpha * beta
