"""Philox4x32-10, the counter-based generator behind stochastic rounding.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11); the known
answers of their Random123 library are in the tests.

Every element of a global batch owns one byte per (seed, step, producer):

    place   = offset + row * features + feature        row-major index in the [tokens, features] tensor
    key     = (seed mod 2^32, seed div 2^32)
    counter = (place16 mod 2^32, place16 div 2^32, step, producer)      place16 = place div 16
    byte    = byte (place mod 16) of the four output words, each little-endian, in order

The place is the element's place in the *global* batch (``offset`` = global token of the first row x
features), so sharding, accumulation, recomputation and resuming draw the same bytes, and a transposed
view uses the places of the untransposed tensor. No state exists that could be lost or reused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4core.reference.pieces import slices

MASK32 = 0xFFFFFFFF
_MUL0, _MUL1 = 0xD2511F53, 0xCD9E8D57
_BUMP0, _BUMP1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


@dataclass(frozen=True)
class SRKey:
    """What identifies one stream of stochastic-rounding bytes.

    Attributes:
        seed: run seed, 64 bits.
        step: optimizer step, an int or a 0-dim int64 tensor, 32 bits.
        producer: which quantiser draws, 32 bits: ((block * 8 + linear) * 4 + view), so that no two
            views of a run share a stream.
        offset: place of the first element in the global batch, in elements (global token of the first
            row times features), an int or a 0-dim int64 tensor.
    """

    seed: int
    step: int | torch.Tensor
    producer: int
    offset: int | torch.Tensor = 0

    def __post_init__(self) -> None:
        for name in ("seed", "step", "producer", "offset"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                if value.dim() or value.is_floating_point():
                    raise ValueError(
                        f"SRKey.{name}: got a {value.dtype} tensor of shape {tuple(value.shape)}; "
                        "needed an int or a 0-dim integer tensor"
                    )
            elif not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"SRKey.{name}: got {value!r}; needed an int or a 0-dim integer tensor")
            elif value < 0:
                raise ValueError(f"SRKey.{name}: got {value}; needed a non-negative integer")


def _mul_hi_lo(a: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    # int64 wraps modulo 2^64, which leaves the bits of the unsigned product; the mask drops the sign
    # that the arithmetic shift drags in.
    product = a * multiplier
    return (product >> 32) & MASK32, product & MASK32


def philox4x32_10(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten Philox rounds.

    Args:
        counter: four int64 tensors of 32-bit words, of shapes that broadcast.
        key: two 32-bit words.

    Returns:
        Four int64 tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        hi0, lo0 = _mul_hi_lo(c0, _MUL0)
        hi1, lo1 = _mul_hi_lo(c2, _MUL1)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _BUMP0) & MASK32, (k1 + _BUMP1) & MASK32
    return c0, c1, c2, c3


def random_bytes(rows: int, features: int, key: SRKey, device: torch.device | str = "cpu") -> torch.Tensor:
    """The bytes of a [rows, features] tensor whose first element has place ``key.offset``.

    Returns:
        uint8 [rows, features].
    """
    count = rows * features
    first = int(key.offset)
    if count == 0:
        return torch.empty(rows, features, dtype=torch.uint8, device=device)
    groups = torch.arange(first // 16, (first + count + 15) // 16, dtype=torch.int64, device=device)
    step = torch.as_tensor(key.step, dtype=torch.int64).to(device) & MASK32
    producer = torch.full((), key.producer & MASK32, dtype=torch.int64, device=device)
    out = torch.empty(groups.numel(), 4, dtype=torch.int32, device=device)
    for s in slices(out):
        counter = (groups[s] & MASK32, (groups[s] >> 32) & MASK32, step, producer)
        words = philox4x32_10(counter, (key.seed & MASK32, (key.seed >> 32) & MASK32))
        for i, word in enumerate(words):
            out[s, i] = word  # int64 -> int32 keeps the low 32 bits
    skip = first % 16
    # the byte view is little-endian, as on every machine that torch supports
    return out.view(torch.uint8).view(-1)[skip : skip + count].view(rows, features)
