"""The ``te`` backend of ``fp4core.Linear``: Transformer Engine's own NVFP4 linears.

The contract is that of ``fp4core.ops.linear``. Every layer call goes through a
``transformer_engine.pytorch.Linear`` inside its autocast with ``NVFP4BlockScaling``: 2D weights, stochastic
rounding of dY, Hadamard on Wgrad's operands, as that recipe manages them. Layers whose recipe is BF16 (the
last blocks of ``te_nvfp4_bf16x4``) and the output head never enter the autocast. Weights are handed over in
BF16 at each call, so our parameters stay the only ones: same state_dict, same optimizer, same sharding;
Transformer Engine's modules hold none (they live on the meta device) and are seen by nobody.

Its stochastic rounding draws from torch's CUDA generator. ``fp4core.set_sr_state`` seeds that from the same
three numbers as ours (``seed_generator``), so a resumed run goes on as if it had not stopped; the bits are
Transformer Engine's, not ours, and depend on how the batch is split. Not traced by torch.compile: each call
is a graph break.

Importing this module where Transformer Engine cannot run raises ValueError with the reason. It has never
run: this project has had no GPU that could. Its calls are checked against the released package's
signatures.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp4core.ops import spec as specs
from fp4core.ops import te_support
from fp4core.ops.linear import register_backend
from fp4core.recipe import Dgrad, Fprop, LinearRecipe, Operand, Wgrad

_W = Operand("nvfp4_te_w2d")
# what NVFP4BlockScaling computes, in our words; the only FP4 recipe this backend accepts
NUMERICS = LinearRecipe(
    Fprop(Operand("nvfp4_te"), _W),
    Dgrad(Operand("nvfp4_te", "stochastic"), _W),
    Wgrad(Operand("nvfp4_te", "stochastic", "fixed16"), Operand("nvfp4_te", "nearest", "fixed16")),
)


@functools.lru_cache(maxsize=4096)
def _layer(producer: int, n: int, k: int) -> nn.Module:
    """Transformer Engine's module of one of our layers, without storage for its weight."""
    linear = te_support.calls().linear
    return linear(k, n, bias=False, params_dtype=torch.bfloat16, device="meta")


@torch._dynamo.disable
def linears(x: Tensor, weights: list[Tensor], state: Tensor, spec: str, producers: list[int]) -> list[Tensor]:
    """Outputs Y_i of linears of one input; arguments as in ``fp4core.ops.linear``."""
    recipe = specs.decode(spec)
    rounded = [w.to(torch.bfloat16) for w in weights]
    if specs.is_plain_bf16(recipe):
        return [F.linear(x, w) for w in rounded]
    if recipe != NUMERICS:
        raise ValueError(
            f"te: got the recipe {spec!r}; Transformer Engine computes {specs.encode(NUMERICS)!r} or BF16; "
            "use backend='auto', 'carrier' or 'reference' for this route"
        )
    with te_support.calls().autocast():
        return [
            torch.func.functional_call(_layer(producer, *w.shape), {"weight": w}, (x,))
            for producer, w in zip(producers, rounded)
        ]


def seed_generator(seed: int, step: int, token_offset: int) -> None:
    """Seed the CUDA generator that Transformer Engine draws from, by the run's own three numbers."""
    digest = hashlib.sha256(f"te/{seed}/{step}/{token_offset}".encode()).digest()
    torch.cuda.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


_reason = te_support.problem()
if _reason:
    raise ValueError(f"linear backend 'te' cannot run here: {_reason}")
register_backend("te", linears)
