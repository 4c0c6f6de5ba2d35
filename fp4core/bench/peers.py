"""How FP4 training is emulated elsewhere on a GPU without FP4 units: quantise, decode to BF16, multiply.

Every peer here computes the three contractions of a linear layer with MXFP4 operands (1 x 32 blocks along the
contraction), deterministic rounding, in BF16 GEMMs: the same work as route ``mxfp4_sr`` without its
stochastic bits and 2D weights. They are the yardstick of ``python -m fp4core.bench linear``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Decode = Callable[[Tensor], Tensor]  # BF16 [R, K] -> decoded BF16 [R, K], blocks along K


def plain_torch_decode(x_RK: Tensor) -> Tensor:
    """MXFP4 (round-up scales) in straightforward torch operations."""
    blocks = x_RK.float().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(amax.clamp_min(2.0**-126) / 6)))
    y = blocks / scale
    step = torch.exp2(torch.floor(torch.log2(y.abs().clamp_min(1.0)))) / 2
    return (torch.round(y / step) * step * scale).flatten(-2).to(torch.bfloat16)


def torchao_decode() -> Decode | None:
    """``to_mx`` then ``dequantize`` of torchao's MX emulation, or None where torchao cannot be imported."""
    try:
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx
    except ImportError:
        return None

    def decode(x_RK: Tensor) -> Tensor:
        kind = torch.float4_e2m1fn_x2
        scale, data = to_mx(x_RK, kind, 32, ScaleCalculationMode.RCEIL)
        return to_dtype(data, scale, kind, 32, torch.bfloat16)

    return decode


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK: Tensor, w_NK: Tensor, decode: Decode) -> Tensor:
        ctx.save_for_backward(x_TK, w_NK)
        ctx.decode = decode
        return decode(x_TK) @ decode(w_NK).t()

    @staticmethod
    def backward(ctx, dy_TN: Tensor):
        x_TK, w_NK = ctx.saved_tensors
        decode = ctx.decode
        dx_TK = decode(dy_TN) @ decode(w_NK.t().contiguous()).t()
        dw_NK = decode(dy_TN.t().contiguous()) @ decode(x_TK.t().contiguous()).t()
        return dx_TK, dw_NK, None


def peers(*, compiled: bool = True) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Name -> differentiable y = f(x, w); torchao's only where it is installed."""
    decodes: dict[str, Decode] = {"plain torch, eager": plain_torch_decode}
    ao = torchao_decode()
    if ao is not None:
        decodes["torchao to_mx, eager"] = ao
    if compiled:
        # the two casts are what a compiler can fuse; the GEMMs stay cuBLAS's
        decodes["plain torch, compiled"] = torch.compile(plain_torch_decode, dynamic=False)
        if ao is not None:
            decodes["torchao to_mx, compiled"] = torch.compile(ao, dynamic=False)
    return {
        name: (lambda x, w, decode=decode: _EmulatedLinear.apply(x, w, decode))
        for name, decode in decodes.items()
    }
