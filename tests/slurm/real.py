"""A study of seconds with the real commands, its training on two nodes."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from fp4core import recipe
from tests.workflow.pipeline import ROOT

# two nodes of one process each, as a site would ask for two nodes of eight GPUs
TWO_NODES = (
    *("train:nodes=2", "train:tasks=2", "train:tasks_per_gpu=0", "train:mpi=srun", "train:gres=gpu:1"),
    *("train:slurm_partition=gpu", "train:launch=torchrun-nodes 2 1", "train:runtime=10"),
)


def make_study(folder: Path) -> None:
    """recipes/ with the route bf16 and a study ``tiny``, in ``folder``."""
    for name in ("routes", "studies"):
        (folder / "recipes" / name).mkdir(parents=True)
    shutil.copy(ROOT / "recipes" / "routes" / "bf16.yaml", folder / "recipes" / "routes")
    data = recipe.to_dict(recipe.load_study("smoke"))
    data.update(study="tiny", description="of a test", routes=["bf16"])
    data["model"].update(blocks=2, hidden=64, ffn=128, heads=2, kv_heads=1, head_dim=32, vocab=300)
    data["train"].update(sequence=64, global_batch=2, local_batch=1, steps=4, cuts=[2, 4], warmup=1)
    data["train"].update(endpoint_step=4, log_every=1, checkpoint_every=2)
    data["probe"] = {"steps": 3, "window": [2, 3]}
    data["validation"].update(sequences=4, batch=4)
    data["downstream"] = {"step": 4, "max_length": 1024, "tasks": {"winogrande": {"limit": 4}}}
    data["dgrad"] = {"route": "bf16", "step": 4, "batches": 1, "sequence": 64}
    data["output_head"] = {"route": "bf16", "steps": 3, "window": [2, 3]}
    (folder / "recipes" / "studies" / "tiny.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
