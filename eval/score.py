"""Run lm-evaluation-harness 0.4.13 on an exported directory and keep every item's result.

The forward pass is transformers' own LlamaForCausalLM (`HFLM`) with BF16 weights, softmax in FP32, a fixed
batch size and an explicit maximal length. Neither the response cache nor the request cache nor the logits
cache is used: the first two ignore what changed, the third mis-scores requests of equal tokens and other
splits in 0.4.13. The harness truncates long prompts on the left and only logs it; here they are counted.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval import lm_tasks
from eval.benchmarks import Selection

PROGRESS_SECONDS = 15.0


@dataclass(frozen=True)
class Scores:
    """One row per (item, metric), one per (task, metric), and the hash of what was asked per task."""

    items: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    task_hashes: dict[str, str]
    inv_freq_sha256: str


def score(
    directory: Path,
    selections: dict[str, Selection],
    *,
    batch_size: int,
    max_length: int,
    seed: int,
    device: str,
    dtype: str = "bfloat16",
    prepare: Callable[[Any], object] | None = None,
) -> Scores:
    """Score every selected item. `lm_tasks.go_offline` must have run before.

    `prepare` may change the loaded LlamaForCausalLM in place (give it another forward pass).

    Raises ValueError when a shot shows the item that is being scored, when a continuation is longer than
    `max_length`, or when lm-eval's own averages differ from the averages of the items.
    """
    import numpy as np
    import torch
    from lm_eval.evaluator import evaluate

    quiet()
    manager, tasks, leaves = lm_tasks.build(selections)
    loaded = manager.load(tasks)
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    lm = _counting_model(directory, batch_size=batch_size, max_length=max_length, device=device, dtype=dtype)
    if prepare is not None:
        prepare(lm.model)
    result = evaluate(lm=lm, task_dict=loaded, bootstrap_iters=0, log_samples=True)
    samples = {leaf.split("::")[-1]: rows for leaf, rows in result["samples"].items()}
    for leaf, (benchmark, _) in leaves.items():
        if selections[benchmark].shots:
            _refuse_leaks(loaded["tasks"][leaf], samples[leaf])
    items = _items(samples, selections, leaves, lm.truncated)
    rows = _averages(items, selections)
    _compare(rows, result["results"], leaves)
    return Scores(items, rows, _hashes(samples, leaves), _sha256(lm.model.model.rotary_emb.inv_freq))


def quiet() -> None:
    """Turn off the libraries' progress bars and informational messages."""
    from functools import partial

    import datasets
    import lm_eval.api.task
    import transformers
    from tqdm import tqdm

    # of the building of prompts, a bar a task: lm-eval has no setting for it
    lm_eval.api.task.tqdm = partial(tqdm, disable=True)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    for name in ("lm_eval", "datasets", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _counting_model(directory: Path, *, batch_size: int, max_length: int, device: str, dtype: str) -> Any:
    """HFLM that remembers which documents did not fit into `max_length`."""
    from lm_eval.models.huggingface import HFLM

    class CountingHFLM(HFLM):
        truncated: set[tuple[str, int]]

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            self._asked = [(r.task_name.split("::")[-1], r.doc_id) for r in requests]
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

        def _loglikelihood_tokens(
            self, requests: list[Any], *args: Any, **kwargs: Any
        ) -> list[tuple[float, bool]]:
            require_fit(max((len(continuation) for *_, continuation in requests), default=0), self.max_length)
            lengths = (len(context) + len(continuation) for _, context, continuation in requests)
            longest = self.max_length + 1  # the last token is only a target
            self.truncated = {doc for doc, length in zip(self._asked, lengths) if length > longest}
            self._batches, self._done, self._told = -(-len(requests) // batch_size), 0, time.monotonic()
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

        def _model_call(self, *args: Any, **kwargs: Any) -> Any:
            self._done += 1
            if time.monotonic() - self._told > PROGRESS_SECONDS:
                self._told = time.monotonic()
                print(f"lm-eval: batch {self._done} of {self._batches}", flush=True)
            return super()._model_call(*args, **kwargs)

    return CountingHFLM(
        pretrained=str(directory),
        dtype=dtype,
        softmax_dtype="float32",
        batch_size=batch_size,
        max_length=max_length,
        device=device,
        logits_cache=False,
        use_fast_tokenizer=True,
    )


def require_fit(longest: int, max_length: int) -> None:
    """ValueError when a continuation of `longest` tokens cannot be scored within `max_length` of them."""
    if longest > max_length:
        raise ValueError(
            f"downstream.max_length: got {max_length} tokens, needed {longest}, the longest continuation of "
            "the study's items; raise it in the study (unset, it is train.sequence)"
        )


def _refuse_leaks(task: Any, samples: list[dict[str, Any]]) -> None:
    """No prompt may hold the item's own question before the question itself."""
    for sample in samples:
        own = task.doc_to_text(sample["doc"])
        texts = (
            task.doc_to_choice(sample["doc"]) if isinstance(own, int) else [own] * len(sample["arguments"])
        )
        for (context, *_), text in zip(sample["arguments"], texts):
            if not context.endswith(text):
                raise ValueError(
                    f"{task.task_name}: item {sample['doc_id']} is not at the end of its own prompt"
                )
            if text in context[: -len(text)]:
                raise ValueError(f"{task.task_name}: item {sample['doc_id']} is among its own shots")


def _items(
    samples: dict[str, list[dict[str, Any]]],
    selections: dict[str, Selection],
    leaves: dict[str, tuple[str, str]],
    truncated: set[tuple[str, int]],
) -> list[dict[str, Any]]:
    rows = []
    for leaf, (benchmark, subject) in leaves.items():
        selection = selections[benchmark]
        for sample in samples[leaf]:
            shared = {
                "task": benchmark,
                "item": selection.ids[subject][sample["doc_id"]],
                "truncated": (leaf, sample["doc_id"]) in truncated,
                "loglikelihoods": [float(response[0][0]) for response in sample["resps"]],
                "target": int(_target(sample, benchmark)),
            }
            rows += [
                {**shared, "metric": metric, "correct": int(sample[metric])}
                for metric in selection.source.benchmark.metrics
            ]
    return rows


def _target(sample: dict[str, Any], benchmark: str) -> int:
    """Number of the right choice (WinoGrande's answers count from one)."""
    if benchmark == "winogrande":
        return int(sample["doc"]["answer"]) - 1
    return int(sample["target"])


def _averages(items: list[dict[str, Any]], selections: dict[str, Selection]) -> list[dict[str, Any]]:
    """Mean over items (MMLU: over all items, not over subjects) and its standard error, s / sqrt(n)."""
    rows = []
    for name, selection in selections.items():
        for metric in selection.source.benchmark.metrics:
            mine = [row for row in items if row["task"] == name and row["metric"] == metric]
            values = [row["correct"] for row in mine]
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
            rows.append(
                {
                    "task": name,
                    "metric": metric,
                    "value": statistics.fmean(values),
                    "se": error,
                    "n": len(values),
                    "shots": selection.shots,
                    "truncated": sum(row["truncated"] for row in mine),
                    "chance": chance(selection),
                }
            )
    return rows


def chance(selection: Selection) -> float:
    """Expected accuracy of a uniform guess: the mean of 1/options over the scored items."""
    benchmark = selection.source.benchmark
    if benchmark.name != "arc_challenge":
        return 1 / benchmark.choices
    options = [len(row["choices"]["text"]) for rows in selection.scored.values() for row in rows]
    return statistics.fmean(1 / count for count in options)


def _compare(rows: list[dict[str, Any]], results: dict[str, Any], leaves: dict[str, tuple[str, str]]) -> None:
    """Our averages against lm-eval's, weighted by size over a benchmark's leaves."""
    own = {leaf.split("::")[-1]: values for leaf, values in results.items()}
    for row in rows:
        parts = [own[leaf] for leaf, (benchmark, _) in leaves.items() if benchmark == row["task"]]
        total = sum(part["sample_len"] * part[f"{row['metric']},none"] for part in parts)
        theirs = total / sum(part["sample_len"] for part in parts)
        if abs(theirs - row["value"]) > 1e-9:
            raise ValueError(
                f"{row['task']} {row['metric']}: lm-eval says {theirs}, the items say {row['value']}"
            )


def _hashes(samples: dict[str, list[dict[str, Any]]], leaves: dict[str, tuple[str, str]]) -> dict[str, str]:
    """SHA-256 per benchmark over document, prompt and target hashes of its items in order."""
    digests: dict[str, Any] = {}
    for leaf, (benchmark, _) in leaves.items():
        digest = digests.setdefault(benchmark, hashlib.sha256())
        for sample in samples[leaf]:
            digest.update((sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"]).encode())
    return {benchmark: digest.hexdigest() for benchmark, digest in digests.items()}


def _sha256(tensor: Any) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
