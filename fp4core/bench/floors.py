"""What no quantiser can go below: a route's matrix products (and attention) alone, and counted bytes.

A benchmark's ratio to BF16 is bounded by the products, which the power limit slows as it slows the
baseline's, so they are timed here in the same run, back to back, on the carriers that the route multiplies.
Bytes between products, each read and written once, cost at least their number over the copy rate.

    ceiling    baseline / (products [+ attention])                  quantisation costs nothing
    at copy    baseline / (products [+ attention] + bytes / copy)   every boundary runs as fast as a copy
"""

from __future__ import annotations

from typing import Any

import torch

from fp4core.bench import common
from fp4core.bench.workload import GROUPS, GroupData

COPY_BYTES = 2**29


def view_bytes(route: str) -> int:
    """Bytes per value of one carrier of a route: 1 where all its operands are MX (FP8), else 2."""
    from fp4core.ops.carrier_plan import is_mx, operands
    from fp4core.recipe import load_recipe

    return 1 if all(is_mx(op) for op in operands(load_recipe(route).for_block(0, 32)).values()) else 2


def group_bytes(name: str, tokens: int, view: int) -> int:
    """Bytes that quantising x, dY and W of one group moves: BF16 read once, each view written once."""
    k, outs, _ = GROUPS[name]
    weights = 2 + (2 * view if view == 1 else view)  # a 2D weight in BF16 serves both contractions
    return tokens * (k + sum(outs)) * (2 + 2 * view) + k * sum(outs) * weights


def block_bytes(tokens: int, view: int) -> int:
    """Bytes between the products of a Llama 8B block, forward and backward, attention's own left out."""
    d, f, q, kv = 4096, 14336, 4096, 1024
    forward = d * (2 + view) + 4 * (q + kv) + q * (2 + view) + d * (6 + view) + f * (4 + view) + 6 * d
    backward = (
        d * (2 + 2 * view)  # dY of W2
        + f * (6 + 5 * view)  # SiLU: dg, du in two views, h again in one
        + d * (8 + 3 * view)  # norm with the residual's gradient, its output again, dX in two views
        + q * (2 + view)  # attention's output again
        + (q + 2 * kv) * (2 + 2 * view)  # RoPE
        + d * (8 + view)  # the first norm
    )
    weights = sum(k * sum(outs) for k, outs, _ in GROUPS.values()) * (2 + (2 * view if view == 1 else view))
    return tokens * (forward + backward) + weights


class Products:
    """The products of one group of linears, on carriers made once."""

    def __init__(self, data: GroupData, spec: str) -> None:
        from fp4core.ops import carrier_encode as e
        from fp4core.ops import carrier_groups
        from fp4core.ops.carrier_plan import X_COL, X_ROW

        self.group = carrier_groups.group(data.producers, spec, data.x.device)
        state = torch.tensor([1234, 7, 0], dtype=torch.int64, device=data.x.device)
        self.weights = [w.detach() for w in data.weights]
        x = data.x.detach()
        self.x, self.x_col = e.encode(self.group, x, X_ROW, X_COL, state, data.producers[0])
        self.dy, self.dy_cols = e.encode_gradients(self.group, list(data.grads), state, True, True)
        self.encoded = e.encode_weights(self.group, self.weights)

    def forward(self) -> torch.Tensor:
        """Fprop."""
        from fp4core.ops.carrier_block import _project

        return _project(self.group, self.x, self.weights)

    def backward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Dgrad and Wgrad."""
        from fp4core.ops.carrier_block import _weight_gradients
        from fp4core.ops.carrier_gemm import sum_of_products

        dx = sum_of_products(self.dy, self.encoded.columns)
        return dx, _weight_gradients(self.dy_cols, self.x_col, self.weights)


def products_ms(data: GroupData, spec: str) -> float:
    """Milliseconds of a group's three contractions alone."""
    products = Products(data, spec)
    return common.time_ms(lambda: (products.forward(), products.backward()), calls=2, replays=7)


def block_floor_ms(
    spec: str, sequences: int, length: int, blocks: int, device: torch.device, repeats: int
) -> float:
    """Milliseconds of the products and the attention of ``blocks`` 8B blocks, back to back."""
    from fp4core.ops.carrier_attention import attention_backward, attention_forward

    tokens = sequences * length
    groups = [Products(GroupData.make(name, tokens, device), spec) for name in GROUPS]
    generator = torch.Generator(device=device).manual_seed(5)

    def heads(n: int) -> torch.Tensor:
        x = torch.randn(sequences, length, n, 128, device=device, generator=generator)
        return x.to(torch.bfloat16).transpose(1, 2)

    q, k, v, dout = heads(32), heads(8), heads(8), heads(32)

    def step() -> None:
        kept = []
        for _ in range(blocks):
            for i, g in enumerate(groups):
                g.forward()
                if i == 0:
                    kept.append(attention_forward(q, k, v))
        for out, lse in reversed(kept):
            for i in (3, 2, 1):
                groups[i].backward()
            attention_backward(dout, q, k, v, out, lse)
            groups[0].backward()

    return common.time_ms(step, calls=1, replays=repeats, graph=False)


def ceilings(base_ms: float, floor_ms: float, moved: int, copy_tbps: float) -> dict[str, Any]:
    """The two ratios of the module's text, with what they are made of."""
    at_copy = moved / copy_tbps / 1e9
    return {
        "floor_ms": floor_ms,
        "bytes_at_copy_ms": at_copy,
        "ceiling": base_ms / floor_ms,
        "at_copy": base_ms / (floor_ms + at_copy),
    }


def copy_rate(device: torch.device) -> float:
    """TB/s of a large device copy."""
    return common.copy_tbps(COPY_BYTES, device)
