"""A study: the model, data, training and evaluation that every route shares.

``Study.stage_hash`` names, per stage, exactly the fields that can change that stage's numbers, so that
an edit elsewhere (a description, how many checkpoints are kept) reruns nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from fp4core._recipe_load import ConfigError, build, entry, fail, nearest, to_plain
from fp4core._recipe_route import _SLUG, digest

# activation_checkpoint; fp4core.model.recompute says what each means
_RECOMPUTED = "none|selective|full|selective-[1-9][0-9]*"
# settings of training that change no number beyond the order of sums over ranks
_BESIDE_THE_NUMBERS = (
    *("keep_last", "segments", "checkpoint_every", "endpoint_step", "keep_gathered", "replicas"),
    *("exchange", "async_checkpoint", "tensorboard"),
)
STAGES = ("data", "train", "probe", "validation", "downstream", "dgrad", "output_head", "boundary")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Llama-3.1 rotary embedding scaling; ``factor: 1.0`` is plain RoPE."""

    theta: float = entry(500000.0, above=0)
    factor: float = entry(8.0, min=1)
    low_freq_factor: float = entry(1.0, above=0)
    high_freq_factor: float = entry(4.0, above=0)
    original_max_position: int = entry(8192, doc="context length the scaling starts from", min=1)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama decoder: grouped-query attention, RMSNorm, SiLU-gated feed-forward."""

    blocks: int = entry(doc="transformer blocks", min=1)
    hidden: int = entry(min=1)
    ffn: int = entry(doc="inner width of the feed-forward layer", min=1)
    heads: int = entry(doc="query heads", min=1)
    kv_heads: int = entry(doc="key and value heads", min=1)
    head_dim: int = entry(min=2)
    vocab: int = entry(min=2)
    max_position: int = entry(doc="longest context", min=1)
    rope: RopeConfig = entry(RopeConfig())
    rms_eps: float = entry(1.0e-5, above=0)
    tie_embeddings: bool = entry(False)
    output_head: Literal["bf16", "lowp", "lowp_mxfp8_wgrad"] = entry("bf16")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where text and tokens come from."""

    source: Literal["embedded", "bound"] = entry(
        doc="embedded: English in a PyPI package; bound: inputs.yaml"
    )
    seed: int = entry(0, doc="of the shuffle of training sequences", min=0)
    validation_documents: int = entry(8, doc="embedded: last documents, kept out of training", min=1)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Fused AdamW with warmup, then a constant rate (WSD)."""

    sequence: int = entry(doc="tokens per sequence", min=2)
    global_batch: int = entry(doc="sequences per optimizer step", min=1)
    local_batch: int = entry(doc="sequences per device and micro-step", min=1)
    steps: int = entry(min=1)
    warmup: int = entry(doc="steps of linear warmup", min=0)
    lr: float = entry(doc="peak learning rate", above=0)
    cuts: tuple[int, ...] = entry(doc="steps whose checkpoints are kept and evaluated, ascending", min=1)
    endpoint_step: int = entry(doc="last shared logged step, for the endpoint table", min=1)
    betas: tuple[float, float] = entry((0.9, 0.95), min=0, max=1)
    eps: float = entry(1.0e-8, above=0)
    weight_decay: float = entry(0.1, min=0)
    clip: float = entry(1.0, doc="global gradient norm", above=0)
    schedule: Literal["constant"] = entry("constant", doc="after warmup")
    log_every: int = entry(10, doc="steps between logged rows", min=1)
    keep_last: int = entry(1, doc="resume checkpoints kept besides the cuts", min=1)
    activation_checkpoint: str = entry(
        "none",
        doc="recomputed in backward: nothing, all but products and attention, whole blocks, every N-th block",
        pattern=_RECOMPUTED,
    )
    compile: bool = entry(False)
    threads: int = entry(1, doc="CPU threads of one process", min=1)
    device: Literal["auto", "cpu", "cuda"] = entry("auto")
    segments: Literal["one", "per_cut"] = entry(
        "one", doc="per_cut: a job per cut, so that evaluation need not wait"
    )
    checkpoint_every: int = entry(1000, doc="steps between resume checkpoints", min=1)
    gather: Literal["fp32", "bf16"] = entry(
        "fp32", doc="type of gathered weights; bf16 also rounds each micro-step's dW before the FP32 sum"
    )
    keep_gathered: bool = entry(False, doc="gather weights once per step: faster, more memory")
    replicas: int = entry(1, doc="copies of the sharded model (HSDP); 1 shards over all ranks", min=1)
    exchange: bool = entry(
        True, doc="ranks of a node swap BF16 gradients and sum in FP32: half the bytes; needs gather: bf16"
    )
    deterministic: bool = entry(False, doc="attention that gives the same bits again on a GPU, but slower")
    async_checkpoint: bool = entry(False, doc="write checkpoints beside the training steps")
    tensorboard: bool = entry(False, doc="write TensorBoard events beside the metrics")


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How a throughput probe splits the global batch."""

    local_batch: int = entry(doc="sequences per device and micro-step", min=1)
    activation_checkpoint: str = entry("none", pattern=_RECOMPUTED)


@dataclasses.dataclass(frozen=True)
class ProbeConfig:
    """Throughput probe: medians over a window of steps."""

    steps: int = entry(min=1)
    window: tuple[int, int] = entry(doc="first and last step of the medians", min=1)
    matched: Geometry | None = entry(None, doc="one geometry for every route, besides the selected ones")
    selected: dict[str, Geometry] = dataclasses.field(
        default_factory=dict, metadata={"doc": "route -> its own geometry; others use that of training"}
    )


@dataclasses.dataclass(frozen=True)
class ValidationConfig:
    """NLL of every cut on one fixed stream."""

    sequences: int = entry(doc="sequences of train.sequence + 1 tokens", min=2)
    batch: int = entry(8, doc="sequences per forward pass", min=1)
    gate_standard_errors: float = entry(
        5.0, doc="a late BF16 checkpoint must beat an early one by this", min=0
    )


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """One benchmark."""

    shots: int = entry(0, min=0)
    limit: int | None = entry(None, doc="questions (per subject for mmlu); null: all", min=1)


TASKS = ("mmlu", "hellaswag", "winogrande", "arc_challenge")


@dataclasses.dataclass(frozen=True)
class DownstreamConfig:
    """lm-eval on the exported checkpoint of one cut."""

    step: int = entry(doc="the cut that is scored", min=1)
    tasks: dict[str, TaskConfig] = dataclasses.field(
        metadata={"doc": "benchmark -> settings", "keys": lambda: TASKS}
    )
    batch: int = entry(8, min=1)
    max_length: int | None = entry(None, doc="tokens; null: train.sequence", min=8)


@dataclasses.dataclass(frozen=True)
class DgradConfig:
    """Dgrad error of MXFP4 and CTA-local NVFP4 on identical saved tensors."""

    route: str = entry(doc="whose checkpoint the tensors come from")
    step: int = entry(doc="the cut they come from", min=1)
    batches: int = entry(3, min=1)
    sequence: int = entry(2048, doc="tokens per batch", min=2)


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Output-head screen: BF16, low-precision forward, plus MXFP8 Wgrad."""

    route: str = entry(doc="body of the screened model")
    steps: int = entry(min=1)
    window: tuple[int, int] = entry(doc="first and last step of the rate's median", min=1)


@dataclasses.dataclass(frozen=True)
class BoundaryConfig:
    """Time of reduce, quantise, layout and GEMM at each producer boundary."""

    tokens: int = entry(doc="rows of the activations", min=1)
    repeats: int = entry(10, min=1)
    warmup: int = entry(2, min=0)


@dataclasses.dataclass(frozen=True)
class Study:
    """Everything but the routes."""

    version: Literal[1] = entry(doc="of this file's schema")
    study: str = entry(doc="slug, equal to the file's name", pattern=_SLUG)
    description: str = entry(doc="one sentence")
    seeds: tuple[int, ...] = entry(doc="one long run per route and seed", min=0)
    routes: Literal["all"] | tuple[str, ...] = entry(doc="all: every file in routes/")
    model: ModelConfig = entry(doc="the Llama")
    data: DataConfig = entry(doc="text and tokens")
    train: TrainConfig = entry(doc="long trajectories")
    probe: ProbeConfig = entry(doc="throughput")
    validation: ValidationConfig = entry(doc="checkpoint-matched validation")
    downstream: DownstreamConfig = entry(doc="benchmarks")
    dgrad: DgradConfig = entry(doc="Dgrad error diagnostic")
    output_head: HeadConfig = entry(doc="output-head screen")
    boundary: BoundaryConfig = entry(doc="boundary budget")
    backend: Literal["auto", "reference", "carrier", "native", "te"] = entry("auto")

    @property
    def all_cuts(self) -> tuple[int, ...]:
        """Steps with a kept checkpoint; the last is always the end of the run."""
        return tuple(sorted({*self.train.cuts, self.train.steps}))

    def stage_fields(self, stage: str) -> dict[str, Any]:
        """The fields that can change the numbers of ``stage``, as plain data."""
        plain = to_plain(self)
        train = plain["train"]
        stream = {"validation_sequences": self.validation.sequences, "sequence": self.train.sequence}
        data = {"data": plain["data"], "vocab": self.model.vocab, **stream}
        body = {"model": plain["model"], "data": data, "backend": self.backend}
        # how a run is cut into jobs and what it keeps for a restart cannot change it: resume is bit-equal
        for name in _BESIDE_THE_NUMBERS:
            del train[name]
        # settings that came later keep the hashes of studies that do not use them
        for name in ("gather", "deterministic"):
            if train[name] == getattr(TrainConfig, name):
                del train[name]
        run = {**body, "train": train}
        # a probe or a screen runs its own number of steps under the same optimizer
        short = {**body, "train": {k: v for k, v in train.items() if k not in ("steps", "cuts", "log_every")}}
        fields = {
            "data": data,
            "train": run,
            "probe": {**short, "probe": plain["probe"]},
            "validation": {**run, "validation": plain["validation"]},
            "downstream": {**run, "downstream": plain["downstream"]},
            "dgrad": {**run, "dgrad": plain["dgrad"]},
            "output_head": {**short, "output_head": plain["output_head"]},
            "boundary": {"model": plain["model"], "boundary": plain["boundary"], "backend": self.backend},
        }
        if stage not in fields:
            raise ValueError(f"unknown stage {stage!r}; allowed: {', '.join(STAGES)}{nearest(stage, STAGES)}")
        return fields[stage]

    def stage_hash(self, stage: str) -> str:
        """First 12 hex digits of the SHA-256 of ``stage_fields(stage)``."""
        return digest(self.stage_fields(stage))


def study_from_dict(data: Any, where: str = "study") -> Study:
    """A checked Study from parsed YAML or JSON."""
    study = build(Study, data, where)
    try:
        _check(study)
    except _Problem as problem:
        fail(where, problem.key, problem.message)
    return study


class _Problem(ConfigError):
    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key, self.message = key, message


def _need(good: bool, key: str, message: str) -> None:
    if not good:
        raise _Problem(key, message)


def _check(s: Study) -> None:
    """Rules between fields; every message says what was found and what is needed."""
    m, t = s.model, s.train
    _need(len(s.seeds) > 0, "seeds", "got an empty list, needed at least one seed")
    _need(len(set(s.seeds)) == len(s.seeds), "seeds", f"got {list(s.seeds)}, needed every seed once")
    if s.routes != "all":
        _need(len(s.routes) > 0, "routes", "got an empty list, needed at least one route, or all")
        _need(len(set(s.routes)) == len(s.routes), "routes", f"got {list(s.routes)}, needed every route once")
    _need(
        m.heads % m.kv_heads == 0,
        "model.kv_heads",
        f"got {m.kv_heads}, needed a divisor of heads = {m.heads}",
    )
    _need(
        m.head_dim % 2 == 0, "model.head_dim", f"got {m.head_dim}, needed an even number (RoPE turns pairs)"
    )
    high, low = m.rope.high_freq_factor, m.rope.low_freq_factor
    _need(high > low, "model.rope.high_freq_factor", f"got {high}, needed more than low_freq_factor = {low}")
    _need(
        t.sequence <= m.max_position,
        "train.sequence",
        f"got {t.sequence}, needed at most model.max_position = {m.max_position}",
    )
    _need(
        t.global_batch % t.local_batch == 0,
        "train.local_batch",
        f"got {t.local_batch}, needed a divisor of global_batch = {t.global_batch}",
    )
    _need(t.warmup <= t.steps, "train.warmup", f"got {t.warmup}, needed at most steps = {t.steps}")
    cuts = list(t.cuts)
    _need(len(cuts) > 0, "train.cuts", "got an empty list, needed at least one step")
    _need(cuts == sorted(set(cuts)), "train.cuts", f"got {cuts}, needed ascending steps, each once")
    _need(cuts[-1] <= t.steps, "train.cuts", f"got {cuts[-1]}, needed at most steps = {t.steps}")
    _need(
        t.endpoint_step <= t.steps and t.endpoint_step % t.log_every == 0,
        "train.endpoint_step",
        f"got {t.endpoint_step}, needed a multiple of log_every = {t.log_every}, at most steps = {t.steps}",
    )
    for name in ("probe", "output_head"):
        part = getattr(s, name)
        first, last = part.window
        _need(
            first <= last <= part.steps,
            f"{name}.window",
            f"got [{first}, {last}], needed first <= last <= {name}.steps = {part.steps}",
        )
    places = [("matched", s.probe.matched)] if s.probe.matched else []
    for name, geometry in [*places, *((f"selected.{r}", g) for r, g in s.probe.selected.items())]:
        _need(
            t.global_batch % geometry.local_batch == 0,
            f"probe.{name}.local_batch",
            f"got {geometry.local_batch}, needed a divisor of train.global_batch = {t.global_batch}",
        )
    for name in ("downstream", "dgrad"):
        step = getattr(s, name).step
        cuts_text = ", ".join(map(str, s.all_cuts))
        _need(step in s.all_cuts, f"{name}.step", f"got {step}, needed a step with a checkpoint: {cuts_text}")
    _need(
        len(s.downstream.tasks) > 0, "downstream.tasks", "got an empty mapping, needed at least one benchmark"
    )
    longest = s.downstream.max_length
    _need(
        longest is None or longest <= m.max_position,
        "downstream.max_length",
        f"got {longest}, needed at most model.max_position = {m.max_position}",
    )
    _need(
        s.dgrad.sequence <= m.max_position,
        "dgrad.sequence",
        f"got {s.dgrad.sequence}, needed at most model.max_position = {m.max_position}",
    )
