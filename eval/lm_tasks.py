"""Bound rows as lm-evaluation-harness 0.4.13 tasks, without the hub, its cache or the index of 14,000 tasks.

Each task is the packaged YAML with its dataset replaced by a callable that returns the selected rows
(`custom_dataset`), inside one inline group: only there does lm-eval merge overrides into the packaged
task. Splits that the rows lack are set to null, or lm-eval looks for them; shots come from the split
`pool`, which is never the scored one, so that lm-eval's own fallback (shots from the scored items) cannot
happen.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from eval.benchmarks import Row, Selection

GROUP = "fp4core"
_FOLDERS = {
    "mmlu": "mmlu/default",
    "hellaswag": "hellaswag",
    "winogrande": "winogrande",
    "arc_challenge": "arc",
}


def go_offline(scratch: Path) -> None:
    """Keep every library of this process off the network, its caches inside `scratch`, its bars off.

    Must run before `datasets`, `transformers` or `lm_eval` is imported. None of these variables changes a
    number.
    """
    os.environ.update(
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_HOME=str(scratch),
        LM_HARNESS_CACHE_PATH=str(scratch / "lm_cache"),
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_DISABLE_TELEMETRY="1",
        TQDM_DISABLE="1",
    )


def task_name(benchmark: str, subject: str) -> str:
    """lm-eval's name of one leaf task."""
    return f"{benchmark}_{subject}" if subject else benchmark


def build(selections: dict[str, Selection]) -> tuple[Any, list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """(TaskManager, argument `tasks` of simple_evaluate, leaf task -> (benchmark, subject)).

    The shots are set per task, so `simple_evaluate` needs no `num_fewshot`.
    """
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    root = Path(lm_eval.tasks.__file__).parent
    manager = TaskManager(include_path=[root / _FOLDERS[name] for name in selections], include_defaults=False)
    leaves: dict[str, tuple[str, str]] = {}
    tasks = []
    for name, selection in selections.items():
        for subject, rows in selection.scored.items():
            leaf = task_name(name, subject)
            leaves[leaf] = (name, subject)
            tasks.append(_task(leaf, selection, rows, selection.pool.get(subject, [])))
    return manager, [{"group": GROUP, "task": tasks}], leaves


def _task(leaf: str, selection: Selection, scored: list[Row], pool: list[Row]) -> dict[str, Any]:
    split = selection.source.benchmark.scored_split
    splits = {split: _columns(scored)}
    if selection.shots:
        splits["pool"] = _columns(pool)

    def rows(**_: Any) -> Any:
        import datasets

        return datasets.DatasetDict({k: datasets.Dataset.from_dict(v) for k, v in splits.items()})

    return {
        "task": leaf,
        "training_split": None,
        "validation_split": split if split == "validation" else None,
        "test_split": split if split == "test" else None,
        "fewshot_split": "pool" if selection.shots else None,
        "num_fewshot": selection.shots,
        "custom_dataset": rows,
    }


def _columns(rows: list[Row]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in rows[0]}
