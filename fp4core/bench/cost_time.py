"""Seconds and bytes of a training step from ``cost_work``'s counts and ``cost_chips``'s figures.

Per boundary:      T = T_serial + max(T_gemm, T_weight)

    T_serial   element-wise bytes, then T_reduce + T_quant + T_layout of X or dY, then launches: the product
    waits
               for them
    T_weight   encoding W, which waits for nothing and runs beside the products
    T_quant    max(bytes / bandwidth, instructions / (lane rate x issue))

Per micro-step:    T = max(T_compute, T_exchange),   T_exchange = bytes gathered and scattered / exchange
bandwidth

T_compute adds attention, the output head, and the forward pass of blocks that are recomputed. Two numbers are
calibrated on published rates, ``issue`` and ``exchange_gbps``; nothing else is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from fp4core.bench import cost_chips as chips
from fp4core.bench.cost_chips import Chip
from fp4core.bench.cost_work import Boundary, attention_flops, boundaries, fused_producers, kept_bytes
from fp4core.recipe import ModelConfig, Recipe

GIB = 2**30
_LOGIT_BYTES = 6  # per token and vocabulary entry: logits and their gradient in BF16, FP32 inside the loss


@dataclass(frozen=True)
class Layout:
    """How a run is laid out: batch, recomputation and sharding.

    Attributes:
        local_batch, accumulation: sequences per micro-step, micro-steps per step.
        recompute_every: every n-th block is recomputed (0: none).
        gpus: of the run. shard: GPUs that hold one copy of the parameters.
        reshard: parameters are gathered again in backward, and at every micro-step.
    """

    local_batch: int
    accumulation: int
    recompute_every: int = 0
    gpus: int = 32
    shard: int = 32
    reshard: bool = True

    @classmethod
    def published(cls, row: dict[str, str]) -> Layout:
        """From a route's published facts (local_batch, accumulation, activation_checkpoint,
        parallel_topology).

        "selective-N" is torchtitan's layer option: every N-th block is recomputed.
        """
        every = int(row["activation_checkpoint"].removeprefix("selective-"))
        topology = row["parallel_topology"]
        shard = int(
            topology.rpartition("x")[2] if topology.startswith("HSDP") else topology.rpartition("-")[2]
        )
        gpus = int(row["world_size"])
        return cls(
            int(row["local_batch"]), int(row["accumulation"]), every, gpus, shard, topology.startswith("FSDP")
        )


@dataclass(frozen=True)
class Calibration:
    """The fitted numbers: fraction of issue slots that producers fill; GB/s per GPU of parameter exchange.

    ``overlap``: another formula, in which producers run beside the products and not before them:
    T = T_serial + max(T_gemm, T_reduce + T_quant + T_layout + T_weight).
    """

    issue: float = 0.6
    exchange_gbps: float = 55.0
    fitted_on: tuple[str, ...] = ()
    overlap: bool = False


@dataclass
class Estimate:
    """A model's prediction, never a measurement.

    Attributes:
        tokens_per_s: per GPU. micro_step_s, exchange_s: of one micro-step. memory_gib: at its peak.
        parts: microseconds per token by what they are spent on, before the exchange is waited for.
    """

    tokens_per_s: float
    micro_step_s: float
    exchange_s: float
    memory_gib: float
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Whether the exchange of parameters, not the GPU's work, sets the rate."""
        return self.exchange_s >= self.micro_step_s * (1 - 1e-9)


def _peak(chip: Chip, kind: str) -> float:
    """FLOP/s of a product of a kind, as this project (or the report) computes it on the chip."""
    if kind == "bf16":
        return chip.bf16_tflops * chip.bf16_reached * 1e12
    if chip.fp4_tflops is not None:
        return chip.fp4_tflops * chips.FP4_PRODUCT * 1e12
    if kind == "mx":
        return chip.fp8_tflops * chips.FP8_PRODUCT * 1e12
    return chip.bf16_tflops * chips.BF16_CARRIER_PRODUCT * 1e12


def _producers(b: Boundary, chip: Chip, cal: Calibration) -> tuple[float, float, float]:
    """(reduce, quantise, layout) seconds per token."""
    bandwidth = chip.memory_tbps * chips.MEMORY * 1e12
    if chip.fp4_tflops is None:  # carriers: measured producers
        seconds = sum(size / (chips.CARRIER_PRODUCERS[kind] * 1e12) for kind, size in b.views)
        return b.reduce_bytes / bandwidth, seconds, 0.0
    quantise = max(b.quantise_bytes / bandwidth, b.instructions / (chip.lane_rate * cal.issue))
    return b.reduce_bytes / bandwidth, quantise, b.layout_bytes / bandwidth


def boundary_seconds(b: Boundary, chip: Chip, cal: Calibration, tokens: int) -> dict[str, float]:
    """Seconds per token of one boundary by stage; ``exposed`` is what outlasts the products beside it,
    ``total`` the formula's T."""
    bandwidth = chip.memory_tbps * chips.MEMORY * 1e12
    gemm = sum(flops / _peak(chip, kind) for kind, flops in b.flops.items())
    reduce, quantise, layout = _producers(b, chip, cal)
    if chip.fp4_tflops is None:  # half of one producer that reads W once and writes both views
        weight = bool(b.weight_bytes) * 2 * b.weights / bandwidth / tokens
    else:
        issued = b.weight_instructions / (chip.lane_rate * cal.issue)
        weight = max(b.weight_bytes / bandwidth, issued) / tokens
    element = b.element_bytes / bandwidth
    launch = b.launches * chips.LAUNCH_US * 1e-6 / tokens
    before = element + launch
    producers = reduce + quantise + layout
    # what runs beside the products, and what waits for it
    beside = weight + producers if cal.overlap else weight
    before += 0.0 if cal.overlap else producers
    return {
        "element": element,
        "reduce": reduce,
        "quantise": quantise,
        "layout": layout,
        "launch": launch,
        "gemm": gemm,
        "weight": weight,
        "exposed": max(0.0, beside - gemm),
        "total": before + max(gemm, beside),
    }


def _blocks(
    recipe: Recipe,
    model: ModelConfig,
    layout: Layout,
    chip: Chip,
    cal: Calibration,
    tokens: int,
    sequence: int,
) -> dict[str, float]:
    """Seconds per token of all blocks, by part."""
    stages = ("element", "reduce", "quantise", "layout", "launch", "gemm", "exposed")
    parts = dict.fromkeys((*stages, "recompute"), 0.0)
    hidden = ("reduce", "quantise", "layout") if cal.overlap else ()
    flops = attention_flops(model, sequence)
    rates = chips.ATTENTION_FORWARD, chips.ATTENTION_BACKWARD
    forward, backward = (f / (chip.bf16_tflops * r * 1e12) for f, r in zip(flops, rates))
    parts["attention"] = model.blocks * (forward + backward)
    for block in range(model.blocks):
        again = layout.recompute_every and block % layout.recompute_every == 0
        found = boundaries(recipe.for_block(block, model.blocks), model, fused=fused_producers(recipe))
        for b in found:
            t = boundary_seconds(b, chip, cal, tokens)
            for name in stages:
                parts[name] += 0.0 if name in hidden else t[name]
            if again and b.name.endswith("_forward"):
                parts["recompute"] += t["total"]
        if again:
            parts["recompute"] += forward
    return parts


def exchange_bytes(model: ModelConfig, layout: Layout) -> float:
    """Bytes per GPU and micro-step of gathering parameters and scattering gradients, BF16."""
    size = 2.0 * parameters(model) * (layout.shard - 1) / layout.shard
    if layout.reshard:
        return 3 * size
    # one gather and one sum over the copies per step, gradients scattered at every micro-step
    copies = layout.gpus // layout.shard
    across = 2.0 * 2 * parameters(model) / layout.shard * (copies - 1) / copies
    return size + (size + across) / layout.accumulation


def parameters(model: ModelConfig) -> int:
    """Parameters of the whole model."""
    attention = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
    block = attention + 3 * model.hidden * model.ffn + 2 * model.hidden
    embedding = model.vocab * model.hidden * (1 if model.tie_embeddings else 2)
    return embedding + model.blocks * block + model.hidden


def memory_gib(recipe: Recipe, model: ModelConfig, layout: Layout, chip: Chip, sequence: int) -> float:
    """Peak memory: sharded state, what is gathered, kept activations, the head's logits. No allocator
    slack."""
    carriers = chip.fp4_tflops is None
    n, tokens = parameters(model), layout.local_batch * sequence
    block = n / model.blocks
    state = n * (2 + 8 + 4) / layout.shard  # BF16 weights, two FP32 moments, FP32 gradients
    gathered = 2 * n if not layout.reshard else 4 * block
    kept = 0.0
    for i in range(model.blocks):
        again = layout.recompute_every and i % layout.recompute_every == 0
        linear = recipe.for_block(i, model.blocks)
        kept += 2 * model.hidden if again else kept_bytes(linear, model, carriers=carriers)
    return (state + gathered + tokens * (kept + _LOGIT_BYTES * model.vocab)) / GIB


def estimate(
    recipe: Recipe, model: ModelConfig, layout: Layout, chip: Chip, cal: Calibration, sequence: int = 8192
) -> Estimate:
    """Predicted rate of a route on a chip, in a layout."""
    tokens = layout.local_batch * sequence
    parts = _blocks(recipe, model, layout, chip, cal, tokens, sequence)
    bandwidth = chip.memory_tbps * chips.MEMORY * 1e12
    head = 6.0 * model.vocab * model.hidden / _peak(chip, "bf16")
    parts["head"] = head + 2 * _LOGIT_BYTES * model.vocab / bandwidth
    optimizer = 28.0 * parameters(model) / layout.shard / bandwidth
    parts["optimizer"] = optimizer / (tokens * layout.accumulation)
    compute = tokens * sum(parts.values())
    exchange = exchange_bytes(model, layout) / (cal.exchange_gbps * 1e9) if layout.gpus > 1 else 0.0
    micro = max(compute, exchange)
    return Estimate(
        tokens_per_s=tokens / micro,
        micro_step_s=micro,
        exchange_s=exchange,
        memory_gib=memory_gib(recipe, model, layout, chip, sequence),
        parts={name: 1e6 * seconds for name, seconds in parts.items()},
    )


def blocks_ms(
    recipe: Recipe,
    model: ModelConfig,
    chip: Chip,
    cal: Calibration,
    *,
    tokens: int,
    sequence: int,
    blocks: int = 1,
    head: bool = False,
    linears_only: bool = False,
) -> float:
    """Milliseconds, forward and backward, of some blocks on one GPU; what ``bench block`` and ``step`` time.

    ``linears_only``: the products and everything they need encoded, as ``bench linear`` times them.
    """
    one = dataclasses.replace(model, blocks=blocks)
    parts = _blocks(recipe, one, Layout(1, 1, gpus=1, shard=1), chip, cal, tokens, sequence)
    if linears_only:
        names = ("reduce", "quantise", "layout", "launch", "gemm", "exposed")
        return 1e3 * tokens * sum(parts[name] for name in names)
    seconds = sum(parts.values())
    if head:
        bandwidth = chip.memory_tbps * chips.MEMORY * 1e12
        seconds += 6.0 * model.vocab * model.hidden / _peak(chip, "bf16")
        seconds += 2 * _LOGIT_BYTES * model.vocab / bandwidth
    return 1e3 * tokens * seconds
