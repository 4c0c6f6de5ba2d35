"""What a training run writes, as types: the JSON Schema of manifests, summaries, markers and metrics.

The trainer builds these records as plain data; a test reads them against the schemas.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from fp4core._recipe_inputs import Binding
from fp4core._recipe_load import entry
from fp4core._recipe_route import Recipe
from fp4core._recipe_study import Study

_HEX12 = "[0-9a-f]{12}"
_SHA256 = "[0-9a-f]{64}"
_UTC = r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z"


@dataclasses.dataclass(frozen=True)
class SchemaName:
    """Which record this is."""

    name: str
    version: Literal[1]


@dataclasses.dataclass(frozen=True)
class Device:
    """What it ran on."""

    name: str
    kind: Literal["cpu", "cuda"]


@dataclasses.dataclass(frozen=True)
class Start:
    """One process that trained a part of the run."""

    date_utc: str = entry(pattern=_UTC)
    device: Device = entry(doc="what it ran on")
    backend: str = entry(doc="which implementation of the quantisers and GEMMs")
    versions: dict[str, str] = dataclasses.field(metadata={"doc": "package -> version"})
    commit: str | None = entry(doc="of the checkout; null where unknown")
    dirty: bool | None = entry(doc="whether tracked files were edited")
    command: str = entry()
    first_step: int = entry(min=1)
    world_size: int = entry(min=1)
    local_batch: int = entry(min=1)
    accumulation: int = entry(min=1)
    activation_checkpoint: str = entry()
    compile: bool = entry()
    threads: int = entry(min=1)
    parameters: int = entry(min=1)


@dataclasses.dataclass(frozen=True)
class _Record:
    schema: SchemaName = entry(doc="which record this is")
    study: str = entry()
    route: str = entry()
    seed: int = entry(min=0)
    recipe_hash: str = entry(pattern=_HEX12)
    stage_hash: str = entry(pattern=_HEX12)
    device: Device = entry(doc="what it ran on")
    backend: str = entry(doc="which implementation of the quantisers and GEMMs")
    versions: dict[str, str] = dataclasses.field(metadata={"doc": "package -> version"})
    commit: str | None = entry(doc="of the checkout; null where unknown")
    dirty: bool | None = entry(doc="whether tracked files were edited")
    date_utc: str = entry(pattern=_UTC)
    command: str = entry()
    inputs: dict[str, str] = dataclasses.field(metadata={"doc": "input -> SHA-256"})
    data_sha256: str = entry(doc="of the shards and the tokenizer", pattern=_SHA256)


@dataclasses.dataclass(frozen=True)
class RunManifest(_Record):
    """runs/ROUTE/sSEED/manifest.json: written at the start, grown by every resume."""

    recipe: Recipe = entry(doc="resolved")
    study_settings: Study = entry(doc="resolved")
    bindings: dict[str, Binding] = dataclasses.field(
        metadata={"doc": "kind -> bound directory and hashes; empty for embedded data"}
    )
    starts: tuple[Start, ...] = entry(doc="every process that trained a part")


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Loss at the last step that all routes share."""

    step: int
    loss: float


@dataclasses.dataclass(frozen=True)
class RunSummary(_Record):
    """runs/ROUTE/sSEED/summary.json: written last, the run is complete."""

    status: Literal["complete"] = entry()
    finished_utc: str = entry(pattern=_UTC)
    steps: int = entry(min=1)
    tokens: int = entry(min=1)
    wall_s: float = entry(doc="seconds of training, all starts together", min=0)
    final_loss: float = entry()
    endpoint: Endpoint = entry(doc="loss at the last step that all routes share")
    metrics_sha256: str = entry(pattern=_SHA256)
    checkpoints: dict[str, str] = dataclasses.field(metadata={"doc": "step-N -> SHA-256 of its record"})


@dataclasses.dataclass(frozen=True)
class RunFailure(_Record):
    """runs/ROUTE/sSEED/failure.json: the run ended in non-finite numbers, and that is its result."""

    status: Literal["diverged"] = entry()
    step: int = entry(doc="whose loss or gradient norm was not finite; it left no update", min=1)
    loss: str = entry(doc="nan, inf, or a number")
    grad_norm: str = entry(doc="nan, inf, or a number")
    first_bad_tensor: str = entry(doc="in the order of computation")
    last_good_checkpoint: str = entry(doc="step-N, or none")
    metrics_sha256: str = entry(pattern=_SHA256)


@dataclasses.dataclass(frozen=True)
class Marker:
    """results/STUDY/done/...json: the only output that a heavy rule declares."""

    record: str = entry(doc="what was finished")
    sha256: str = entry(doc="of the record", pattern=_SHA256)
    recipe_hash: str | None = entry(doc="null for stages without a route")
    stage_hash: str | None = entry(doc="null for stages without settings")
    note: str | None = entry(None, doc="what was left out, and why")


@dataclasses.dataclass(frozen=True)
class MetricsRow:
    """One logged step of runs/ROUTE/sSEED/metrics.parquet."""

    step: int = entry(min=1)
    loss: float = entry(doc="mean over the global batch, nats per token")
    grad_norm: float = entry(doc="global, before clipping")
    lr: float = entry(min=0)
    tokens: int = entry(doc="trained on so far", min=1)
    tokens_per_s: float = entry(doc="of all devices together", min=0)
    seconds: float = entry(doc="of this step", min=0)
    memory_gib: float = entry(doc="peak of the first device, or of the process on a CPU", min=0)
    time_utc: float = entry(doc="seconds since 1970")
    replays: int | None = entry(None, doc="steps so far that were made again to be exact", min=0)


RECORDS = {
    "run_manifest": (RunManifest, "runs/ROUTE/sSEED/manifest.json"),
    "run_summary": (RunSummary, "runs/ROUTE/sSEED/summary.json"),
    "run_failure": (RunFailure, "runs/ROUTE/sSEED/failure.json"),
    "marker": (Marker, "results/STUDY/done/...json"),
    "metrics": (MetricsRow, "One row of runs/ROUTE/sSEED/metrics.parquet"),
}
