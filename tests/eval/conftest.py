"""A small project without training: two routes, one study, data, and runs whose weights are drawn at random.

Checkpoints are laid out as the trainer lays them out. The second cut's weights are the first's, moved
towards the data by setting the output head so that frequent tokens are likelier: late beats early.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp4core import recipe as recipes
from fp4core import records

ROOT = Path(__file__).resolve().parents[2]
ROUTES = ("bf16", "mxfp4_sr")
STUDY = """
version: 1
study: tiny
description: "Random weights, real code"
seeds: [3]
routes: all
model: {blocks: 2, hidden: 64, ffn: 96, heads: 4, kv_heads: 2, head_dim: 16, vocab: 320, max_position: 256,
        rope: {original_max_position: 32}}
data: {source: embedded, validation_documents: 1}
train: {sequence: 32, global_batch: 2, local_batch: 2, steps: 20, warmup: 2, lr: 1.0e-3, cuts: [10, 20],
        endpoint_step: 20, log_every: 2, device: cpu}
probe: {steps: 4, window: [2, 4]}
validation: {sequences: 24, batch: 8}
downstream:
  step: 20
  batch: 8
  max_length: 256
  tasks:
    mmlu: {shots: 0, limit: 1}
    hellaswag: {shots: 2, limit: 4}
    winogrande: {shots: 1, limit: 6}
    arc_challenge: {shots: 1, limit: 4}
dgrad: {route: bf16, step: 20, batches: 2, sequence: 32}
output_head: {route: mxfp4_sr, steps: 4, window: [2, 4]}
boundary: {tokens: 64}
"""
TEXT = "The state of the Union is strong, and the people of the United States have kept faith with it. "


@dataclass(frozen=True)
class Project:
    """Where things are, and the study and recipes they belong to."""

    recipes_dir: Path
    results: Path

    @property
    def study(self) -> recipes.Study:
        return recipes.load_study("tiny", self.recipes_dir)

    def recipe(self, route: str) -> recipes.Recipe:
        return recipes.load_recipe(route, self.recipes_dir)

    def job(self, route: str = "bf16"):
        from eval.job import Job

        return Job(self.study, self.recipe(route), 3, self.results)

    def cli(self, route: str | None = "bf16") -> list[str]:
        chosen = ["--route", route] if route else []
        where = ["--recipes", str(self.recipes_dir), "--results", str(self.results)]
        return ["--study", "tiny", *chosen, "--seed", "3", *where]

    def copy(self, target: Path) -> Project:
        """The same project with a results directory of its own."""
        shutil.copytree(self.results, target)
        return Project(self.recipes_dir, target)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Project:
    """Data and runs, no evaluation yet. Not to be written to: take `project`."""
    base = tmp_path_factory.mktemp("eval")
    folder = base / "recipes"
    (folder / "routes").mkdir(parents=True)
    (folder / "studies").mkdir()
    for route in ROUTES:
        shutil.copy(ROOT / "recipes" / "routes" / f"{route}.yaml", folder / "routes")
    (folder / "studies" / "tiny.yaml").write_text(STUDY)
    project = Project(folder, base / "results")
    _make_data(project)
    for route in ROUTES:
        _make_run(project, route)
    return project


@pytest.fixture
def project(pristine, tmp_path) -> Project:
    """A copy of the project that a test may change."""
    return pristine.copy(tmp_path / "results")


def _make_data(project: Project) -> None:
    import numpy as np
    import pyarrow as pa
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    data, study = project.results / "data", project.study
    data.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, TEXT.upper(), TEXT.title()], trainer)
    tokenizer.save(str(data / "tokenizer.json"))
    length, count = study.train.sequence + 1, study.validation.sequences
    # sequences differ in how much of the second half is text: NLLs with a spread
    ids = np.array(tokenizer.encode(TEXT * 60).ids, dtype=np.uint16)
    rows = np.stack([ids[7 * i : 7 * i + length] for i in range(count)])
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), length)
    schema = pa.schema([("tokens", column.type)], metadata={"kind": "validation"})
    with pa.OSFile(str(data / "validation.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))
    names = ("tokenizer.json", "validation.arrow")
    files = {n: {"bytes": (data / n).stat().st_size, "sha256": records.sha256_file(data / n)} for n in names}
    stream_sha256 = records.sha256_bytes(np.ascontiguousarray(rows, dtype="<i4").tobytes())
    record = {
        "schema": {"name": "fp4core.data", "version": 1},
        "study": "tiny",
        "stage_hash": study.stage_hash("data"),
        "source": "a sentence",
        "tokenizer": {"sha256": files["tokenizer.json"]["sha256"], "vocab": 320, "end_of_text": 0},
        "validation": {"sequences": count, "length": length, "stream_sha256": stream_sha256},
        "data_sha256": records.tree_sha256({n: f["sha256"] for n, f in files.items()}),
        "files": files,
    }
    records.write_json(data / "data.json", record)


def _make_run(project: Project, route: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    study, job = project.study, project.job(route)
    head = {
        **records.envelope(
            "fp4core.run",
            study="tiny",
            route=route,
            seed=3,
            recipe_hash=job.recipe.hash,
            stage_hash=study.stage_hash("train"),
            device={"name": "a CPU", "kind": "cpu"},
            backend="reference",
            inputs={},
        ),
        "commit": "0" * 40,
        "dirty": False,
        "date_utc": "2026-01-02T03:04:05Z",
        "data_sha256": job.data()["data_sha256"],
    }
    start = {"world_size": 1, "parameters": 12345}
    records.write_json(job.run_dir / "manifest.json", {**head, "starts": [start]})
    for step in study.all_cuts:
        _make_checkpoint(job, step, route)
    rows = [
        {
            "step": step,
            "loss": 6.0 - 0.1 * step,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "tokens": 64 * step,
            "tokens_per_s": 1000.0 + step,
            "seconds": 0.06,
            "memory_gib": 0.5,
            "time_utc": 1.8e9 + step,
        }
        for step in range(2, 21, 2)
    ]
    pq.write_table(pa.Table.from_pylist(rows), job.run_dir / "metrics.parquet")
    summary = {
        **head,
        "schema": {"name": "fp4core.summary", "version": 1},
        "status": "complete",
        "steps": 20,
        "tokens": 1280,
        "wall_s": 1.5,
        "endpoint": {"step": 20, "loss": 4.0},
        "metrics_sha256": records.sha256_file(job.run_dir / "metrics.parquet"),
    }
    records.write_json(job.run_dir / "summary.json", summary)


def _make_checkpoint(job, step: int, route: str) -> None:
    import torch
    from safetensors.torch import save_file

    from fp4core.model import build_model
    from fp4core.recipe import to_dict

    model = build_model(job.study.model, None, "cpu", seed=len(route))
    with torch.no_grad():
        for parameter in model.parameters():  # away from the tiny initial logits, so that rotations matter
            if parameter.dim() > 1:
                parameter.mul_(4.0)
        if step > 10:  # a constant feature of the final norm carries a bias for the letters of the text
            used = torch.from_numpy(_used_tokens(job))
            model.model.embed_tokens.weight[:, 0] = 2.0
            model.lm_head.weight[used, 0] = 1.0
    path = job.run_dir / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    name = "shard-00001-model-00001-of-00001.safetensors"
    save_file({f"model.{k}": v.contiguous() for k, v in model.state_dict().items()}, path / name)
    entry = {"bytes": (path / name).stat().st_size, "sha256": records.sha256_file(path / name)}
    content = {
        "schema": {"name": "fp4core.checkpoint", "version": 1},
        "step": step,
        "model": to_dict(job.study.model),
        "files": {name: entry},
    }
    (path / "checkpoint.json").write_text(json.dumps(content))


def _used_tokens(job):
    import numpy as np

    from eval import stream

    return np.unique(stream.validation(job).rows)
