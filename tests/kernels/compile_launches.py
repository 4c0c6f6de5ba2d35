"""Compile, for a Hopper GPU that is not there, every kernel that blocks and layers would launch on one.

    python -m tests.kernels.compile_launches [--machine-code] ROUTE...

The ops run on CPU tensors; each launch is specialised as Triton's own launcher does it and compiled for sm_90
instead of being run: to Triton's IR, which finds what only the compiler refuses, or with ``--machine-code``
to the end. Results are garbage and nobody looks at them. Every pair of carrier types that a plan may choose
is gone through, not only those that a training starts with. Prints {"kernels": {name: variants}} as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections import Counter
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fp4core.kernels import _launch

# before the launchers import them: they are to believe that they face a GPU
_launch.packed_instructions = lambda device: True
_launch.check_matrix = lambda x: None

from fp4core.model.build import build_model, init_weights  # noqa: E402
from fp4core.model.rope import rope_tables  # noqa: E402
from fp4core.ops import (  # noqa: E402
    carrier_boundary,
    carrier_groups,
    carrier_linear,  # noqa: F401
)
from fp4core.ops.carrier_plan import CONTRACTIONS  # noqa: E402
from fp4core.recipe import load_recipe  # noqa: E402
from tests.kernels.carriers import CONFIG  # noqa: E402

TYPES = [("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2"), ("bf16", "bf16")]
CONFIG = dataclasses.replace(CONFIG, blocks=28, hidden=256, ffn=512, heads=2)


class Driver:
    """The little that specialising and compiling ask of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def to_ir(src: Any, target: GPUTarget, options: dict[str, Any], **_: Any) -> object:
    """Triton's IR of a kernel, all that `triton.compile` does before its passes."""
    backend = triton.compiler.make_backend(target)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return src.make_ir(
        target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    )


def instead_of_launching(found: Counter[str], machine_code: bool) -> None:
    """From here on a launch compiles its kernel, once per variant, and counts it."""
    triton.runtime.driver.set_active(Driver())
    run, compile_one = JITFunction.run, JITFunction._do_compile

    def warm(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> object:
        return run(self, *args, grid=grid, warmup=True, **options)

    def counted(self: JITFunction, *args: Any, **options: Any) -> object:
        found[self.fn.__name__] += 1
        if not machine_code:
            self.compile = to_ir
        return compile_one(self, *args, **options)

    JITFunction.run, JITFunction._do_compile = warm, counted


def steps(route: str) -> None:
    """Forward and backward of a first and a last block, fused and layer by layer, under every plan."""
    carrier_groups.forget()
    model = build_model(CONFIG, load_recipe(route), "cpu", backend="carrier")
    init_weights(model, 0)
    cos, sin = rope_tables(model._inv_freq, 64, torch.device("cpu"))
    state = torch.tensor([1, 2, 0], dtype=torch.int64)
    h = torch.randn(1, 64, CONFIG.hidden, dtype=torch.bfloat16, requires_grad=True)

    def step(block: torch.nn.Module) -> None:
        y = block(h, cos, sin, state)
        torch.autograd.grad(y, [h, *block.parameters()], torch.ones_like(y), allow_unused=True)

    def plan(types: dict[str, tuple[str, str]]) -> None:
        for group in carrier_groups.groups(model):
            for name in types.keys() & group.plan.mx:
                left, right, _ = CONTRACTIONS[name]
                group.plan.kinds[left], group.plan.kinds[right] = types[name]

    def set_apart(rows: bool) -> None:
        for group in carrier_groups.groups(model):
            group.plan.set_apart = rows

    for block in (model.model.layers[0], model.model.layers[-1]):
        layers = (block.self_attn.q_proj, block.mlp.down_proj)
        step(block)  # makes the groups
        for layer in layers:
            step_of(layer, state)
        for dgrad, wgrad in itertools.product(TYPES, TYPES):
            # in a block rows and columns of a gradient come from one kernel
            plan({"dgrad": dgrad, "wgrad": wgrad, "fprop": dgrad})
            for name in carrier_boundary.SCHEDULES:
                with carrier_boundary.schedule(name):
                    step(block)
            set_apart(True)
            step(block)
            set_apart(False)
            for fprop in TYPES:  # in a layer those of an activation and of a weight do so too
                plan({"fprop": fprop})
                for layer in layers:
                    step_of(layer, state)


def step_of(layer: torch.nn.Module, state: torch.Tensor) -> None:
    """Forward and backward of one layer."""
    x = torch.randn(64, layer.weight.shape[1], dtype=torch.bfloat16, requires_grad=True)
    y = layer(x, state)
    torch.autograd.grad(y, [x, layer.weight], torch.ones_like(y))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("routes", nargs="+")
    parser.add_argument("--machine-code", action="store_true")
    options = parser.parse_args()
    found: Counter[str] = Counter()
    instead_of_launching(found, options.machine_code)
    for route in options.routes:
        steps(route)
        print(route, dict(found), flush=True)
    print(json.dumps({"kernels": found}))


if __name__ == "__main__":
    main()
