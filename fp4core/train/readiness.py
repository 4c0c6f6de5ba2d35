"""What a study asks of a machine, in bytes and GPU-days, for `fp4core doctor`. Estimates, and named as such.

    state        16 N / W                    FP32 parameters, gradients and two moments, sharded over W GPUs
    gathered     8 (N_root + 2 N_block)      FP32 parameters and gradients of units that are whole at a time
    or, kept,    g N + 4 (N_root + 2 N_block)    with keep_gathered: g bytes per weight, 4 in FP32, 2 in BF16
                                             or in the two FP8 encodings that then stand in for it
    activations  L b S a + one block's own   a bytes per token and block that the policy keeps (BF16)
    head         10 C V                      logits and their gradient, one chunk of C tokens

N parameters, L blocks, b sequences per GPU and micro-step, S tokens. Kernels' workspaces and the allocator's
slack are not in it, nor, without keep_gathered, the encoded weights of FP4 routes on the carriers, up to two
bytes per weight on every GPU. Fused blocks keep fewer activations than this says (94 of 128 KB per token at
8B). A checkpoint holds 12 N bytes (weights and moments in FP32). GPU-days are the study's tokens at the
route's rate: that of this study's own probe where there is one, else the published one.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from fp4core.model.recompute import block_policy
from fp4core.recipe import Geometry, ModelConfig, Recipe, Study

GIB = 2**30
HEAD_CHUNK = 4096
_DAY = 86400.0
_PUBLISHED_ON = "GB200 (published)"


@dataclass(frozen=True)
class Rate:
    """tokens/s per GPU of a route, and where the number is from."""

    tokens_per_s: float
    source: str


def decoder_block_parameters(model: ModelConfig) -> int:
    """Parameters of one block."""
    attention = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
    return attention + 3 * model.hidden * model.ffn + 2 * model.hidden


def parameters(model: ModelConfig) -> int:
    """N of the table above; equal to fp4core.model's count (a test compares) without importing torch."""
    embedding = model.vocab * model.hidden * (1 if model.tie_embeddings else 2)
    return embedding + model.blocks * decoder_block_parameters(model) + model.hidden


def kept_bytes_per_token(model: ModelConfig, policy: str, *, compiled: bool = False) -> int:
    """Bytes per token that stay of one block for the backward pass; policy none, selective or full.

    A compiled (or fused) block keeps no more than its products, attention and SiLU's output under "none": the
    compiler makes the element-wise rest again. Eight compiled BF16 blocks of 8B shape on an H200 held 120 KB
    per token and block (``bench/results/step.json``, less weights and gradients); this says 128 KB.
    """
    hidden, ffn = model.hidden, model.ffn
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if policy == "full":
        return 2 * hidden
    # q k v, attention, o, W1 and W3, W2
    products = 2 * (wide + 2 * narrow) + 2 * wide + 2 * hidden + 4 * ffn + 2 * hidden
    if policy == "selective":
        return 2 * hidden + products
    if compiled:
        return 2 * hidden + products + 2 * ffn
    norms, rotated, inner = 2 * (2 * hidden + 4 * hidden), 2 * (wide + narrow), 2 * ffn + 12 * ffn
    return 2 * hidden + products + norms + rotated + inner


def memory(study: Study, gpus: int, geometry: Geometry) -> dict[str, float]:
    """Estimated GiB per GPU by part, and their "total", for FSDP over `gpus`."""
    model, tokens = study.model, geometry.local_batch * study.train.sequence
    block, whole = decoder_block_parameters(model), parameters(model)
    policies = [block_policy(geometry.activation_checkpoint, i) for i in range(model.blocks)]
    compiled = study.train.compile
    kept = sum(kept_bytes_per_token(model, policy, compiled=compiled) for policy in policies)
    some = whole - model.blocks * block + 2 * block
    kept_whole = (2 if study.train.gather == "bf16" else 4) * whole
    gathered = kept_whole + 4 * some if study.train.keep_gathered else 8 * some
    parts = {
        "state": 16 * whole / gpus,
        "gathered": gathered if gpus > 1 else 0.0,
        "activations": tokens * (kept + kept_bytes_per_token(model, "none", compiled=compiled)),
        "head": 10 * min(HEAD_CHUNK, tokens) * model.vocab,
    }
    return {**{k: v / GIB for k, v in parts.items()}, "total": sum(parts.values()) / GIB}


def disk(study: Study, routes: int) -> float:
    """GiB of checkpoints that the whole study leaves, with the resume checkpoints of one run under way."""
    each = 12 * parameters(study.model)
    kept = len(study.all_cuts) * routes * len(study.seeds)
    return each * (kept + study.train.keep_last + 1) / GIB


def free_disk(path: Path) -> float:
    """GiB free where `path` is or will be."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free / GIB


def tokens(study: Study) -> int:
    """Tokens of one run."""
    return study.train.steps * study.train.global_batch * study.train.sequence


def rates(study: Study, recipes: dict[str, Recipe], results: Path) -> dict[str, Rate]:
    """Rate per route: of this study's probes in `results`, else the published one where the model is its."""
    published = _published() if _is_published_shape(study) else {}
    found = {}
    for route, recipe in recipes.items():
        path = results / "probes" / route / f"s{study.seeds[0]}.json"
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            mine = (record.get("recipe_hash"), record.get("stage_hash"))
            if mine == (recipe.hash, study.stage_hash("probe")):
                best = max(row["tokens_per_s"] for row in record["measurements"])
                found[route] = Rate(best, f"{record['device']['name']} (this study's probe)")
                continue
        if route in published:
            found[route] = Rate(published[route], _PUBLISHED_ON)
    return found


def _is_published_shape(study: Study) -> bool:
    model = study.model
    return (model.blocks, model.hidden, model.ffn, study.train.sequence) == (32, 4096, 14336, 8192)


def _published() -> dict[str, float]:
    """Route -> published tokens/s per GPU, from the figures package's table of facts; read as a file."""
    spec = importlib.util.find_spec("figures")
    path = Path(spec.origin).with_name("published.csv") if spec and spec.origin else None
    if path is None or not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {
            row["route"]: float(row["value"])
            for row in csv.DictReader(file)
            if row["table"] == "table06_throughput" and row["metric"] == "tokens_per_s"
        }


def geometries(study: Study) -> dict[str, Geometry]:
    """Name -> every geometry that the study runs in: training's, then the probes' own ones, each once."""
    found = {"training": Geometry(study.train.local_batch, study.train.activation_checkpoint)}
    probes = [study.probe.matched, *study.probe.selected.values()]
    for geometry in probes:
        if geometry is not None and geometry not in found.values():
            name = f"probe, local batch {geometry.local_batch}, {geometry.activation_checkpoint}"
            found[name] = geometry
    return found
