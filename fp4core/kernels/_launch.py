"""What every launcher needs to know: which instructions exist, and how to pad."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

if triton.knobs.runtime.interpret:
    from fp4core.kernels import _interpreter  # noqa: F401  imported for its effect


def interpreted() -> bool:
    """True when kernels run in the Triton interpreter (on CPU tensors)."""
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def _packed(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def packed_instructions(device: torch.device) -> bool:
    """True where the packed BF16 PTX of the kernels exists (sm_90 and up)."""
    return not interpreted() and device.type == "cuda" and _packed(device.index or 0)


GROUP = {"plain16": 16, "fixed16": 16, "fixed32": 32}  # tokens a Hadamard rotation mixes


def words(x: Tensor) -> Tensor:
    """A matrix as the integers that hold two of its values: int32 for BF16, int64 for FP32."""
    return x.view(torch.int64 if x.dtype == torch.float32 else torch.int32)


def pointer(t: Tensor | None, like: Tensor) -> Tensor:
    """An int32 pointer to the first element of ``t`` whatever its strides; absent tensors lend ``like``'s."""
    if t is None:
        return like
    if t.dtype in (torch.int32, torch.int64, torch.float32):
        return t
    return t.as_strided((1, 4 // t.element_size()), (4, 1)).view(torch.int32)


def check_matrix(x: Tensor) -> None:
    """Raise ValueError unless x is a contiguous BF16 or FP32 matrix on a device the kernels run on."""
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float32) or not x.is_contiguous():
        raise ValueError(
            f"kernels: got a {x.dtype} tensor of shape {tuple(x.shape)}, strides {x.stride()}; "
            "needed a contiguous bfloat16 or float32 matrix"
        )
    if x.device.type != "cuda" and not interpreted():
        raise ValueError(
            f"kernels: got a tensor on {x.device}, needed a CUDA tensor (or TRITON_INTERPRET=1 to interpret "
            "the kernels on the CPU); backend='reference' runs anywhere"
        )


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is >= n."""
    return -(-n // multiple) * multiple


def padded(x: Tensor, rows: int = 32, cols: int = 32) -> Tensor:
    """x with zeros appended up to multiples of ``rows`` and ``cols``; x itself where nothing is missing."""
    pad_rows, pad_cols = -x.shape[0] % rows, -x.shape[1] % cols
    return F.pad(x, (0, pad_cols, 0, pad_rows)) if pad_rows or pad_cols else x
