"""What the tests of the carrier backend share: a small model, its inputs, a linear's step."""

from __future__ import annotations

import dataclasses

import torch

import fp4core.ops.carrier_linear  # noqa: F401  (registers the backend without a GPU)
from fp4core.bench.scale_job import Job, Pairs, fill
from fp4core.kernels._launch import interpreted
from fp4core.model.build import build_model
from fp4core.model.rope import rope_tables
from fp4core.recipe import ModelConfig, RopeConfig, load_recipe
from fp4core.train.distributed import World
from fp4core.train.engine import Engine

DEVICE = "cpu" if interpreted() else "cuda"
STATE = (11, 5, 64)


def state() -> torch.Tensor:
    return torch.tensor(STATE, dtype=torch.int64, device=DEVICE)


def draw(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * scale).to(torch.bfloat16).to(DEVICE)


CONFIG = ModelConfig(
    blocks=2,
    hidden=128,
    ffn=128,
    heads=1,
    kv_heads=1,
    head_dim=128,
    vocab=64,
    rms_eps=1e-5,
    max_position=64,
    rope=RopeConfig(500000.0, 1.0, 1.0, 4.0, 8192),
    output_head="bf16",
)


def model(route: str):
    return build_model(CONFIG, load_recipe(route), DEVICE, seed=0, backend="carrier")


def one_linear(m):
    layer = m.model.layers[0].mlp.down_proj
    return layer, draw(64, 128)


def run(layer, x: torch.Tensor, scale: float = 1.0):
    y = layer((x * scale).requires_grad_(), state())
    return [y, *torch.autograd.grad(y, [layer.weight], torch.ones_like(y))]


def block_inputs(tokens: int = 32):
    h = draw(1, tokens, CONFIG.hidden).requires_grad_()
    return h, draw(1, tokens, CONFIG.hidden, scale=0.1, seed=3)


def results(m, blocks, h, grad):
    cos, sin = rope_tables(m._inv_freq, h.shape[1], h.device)
    y = h
    for block in blocks:
        y = block(y, cos, sin, state())
    return [y, *torch.autograd.grad(y, [h, *m.model.layers[: len(blocks)].parameters()], grad)]


def engine(accumulation: int = 1) -> Engine:
    """A trainer of one small block, alone or, where torch.distributed is there, through FSDP."""
    job = Job(
        "mxfp4_sr",
        gpus=1,
        blocks=1,
        accumulation=accumulation,
        deterministic=True,
        device=DEVICE,
        compile=False,
        size="tiny",
        sequence=32,
    )
    study = job.study()
    small = dataclasses.replace(study.model, hidden=32, ffn=32, heads=1, vocab=64)
    study = dataclasses.replace(study, backend="carrier", model=small)
    world = World(0, 1, torch.device(DEVICE))
    return Engine(study, load_recipe("mxfp4_sr"), 0, world=world, stream=Pairs(32, 64), initialise=fill)
