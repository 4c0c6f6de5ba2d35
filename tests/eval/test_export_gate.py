"""Export and its gate: a right directory passes, every way of losing the rotation is caught."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval import export, gate, oracle
from eval.__main__ import main
from fp4core import records
from fp4core.model import rope_inv_freq
from fp4core.recipe import RopeConfig

LONGEST = 256


@pytest.fixture(scope="module")
def exported(pristine, tmp_path_factory):
    """(directory, what `gate.check` needs) of the tiny run's last checkpoint."""
    job = pristine.job()
    config, state = job.checkpoint(20).weights()
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    tokenizer = pristine.results / "data" / "tokenizer.json"
    out = tmp_path_factory.mktemp("export")
    export.write_directory(out, config, weights, tokenizer=tokenizer, end_of_text=0)
    needs = {
        "weights": weights,
        "native_logits": export.native_fp32(config, weights, "cpu"),
        "table": rope_inv_freq(config),
        "tokenizer": tokenizer,
        "longest_used": LONGEST,
    }
    return out, config, needs


def judge(exported, directory):
    _, config, needs = exported
    return gate.check(directory, config, **needs)


@pytest.fixture
def directory(exported, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(exported[0], tmp_path / "hf")


def edit_config(directory, change):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_right_directory_passes(exported):
    found = judge(exported, exported[0])
    assert found["passed"] is True, found["failures"]
    assert found["inv_freq_sha256"]["training"] == found["inv_freq_sha256"]["exported"]
    assert found["probe"]["length"] == LONGEST > found["probe"]["original_max_position"]
    assert len(found["error_by_position"]) == LONGEST
    assert found["exported_error"] <= found["exported_bound"] < 1e-3


@pytest.mark.parametrize("form", ["rope_parameters", "legacy"])
def test_either_form_of_rope_alone_is_enough_for_this_transformers(exported, directory, form):
    """Version 5 reads both; the file holds both for the versions that read one."""
    drop = ("rope_theta", "rope_scaling") if form == "rope_parameters" else ("rope_parameters",)
    edit_config(directory, lambda c: [c.pop(key) for key in drop])
    assert judge(exported, directory)["passed"] is True


def _no_scaling(config):
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    config["rope_scaling"] = None


def _wrong_theta(config):
    for part in (config, config["rope_parameters"], config["rope_scaling"]):
        part["rope_theta"] = 10000.0


def _no_rope_type(config):
    for key in ("rope_parameters", "rope_scaling"):
        del config[key]["rope_type"]


def _no_original_length(config):
    for key in ("rope_parameters", "rope_scaling"):
        del config[key]["original_max_position_embeddings"]


def _nothing(config):
    for key in ("rope_parameters", "rope_theta", "rope_scaling"):
        del config[key]


@pytest.mark.parametrize(
    "change",
    [_no_scaling, _wrong_theta, _no_rope_type, _no_original_length, _nothing],
    ids=lambda f: f.__name__,
)
def test_wrong_rotation_is_caught_twice(exported, directory, change):
    """By the frequencies, and independently by the logits, which are far outside the bound."""
    edit_config(directory, change)
    found = judge(exported, directory)
    assert found["passed"] is False
    assert any("rotation frequencies differ" in line for line in found["failures"])
    assert any("logits differ" in line for line in found["failures"])
    assert found["exported_error"] > 100 * found["exported_bound"]


def test_wrong_rotation_does_not_show_at_the_first_position(exported, directory):
    """Why the probe is long: position 0 rotates by nothing."""
    edit_config(directory, _no_scaling)
    found = judge(exported, directory)
    assert found["error_by_position"][0] <= found["exported_bound"]
    assert max(found["error_by_position"][-8:]) > found["exported_bound"]


def test_permuted_queries_and_keys_are_caught_by_logits_alone(exported, directory):
    """The interleaved layout that other exporters write; frequencies are right, so only logits can tell."""
    _, config, _ = exported
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tensor.view(-1, 2, config.head_dim // 2, config.hidden)
            tensors[name] = heads.transpose(1, 2).reshape(tensor.shape).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    found = judge(exported, directory)
    assert [line.split(" by ")[0] for line in found["failures"]] == ["logits differ"]


def test_missing_tensor_is_named(exported, directory):
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    failures = judge(exported, directory)["failures"]
    assert any("missing keys: model.layers.1.mlp.up_proj.weight" in line for line in failures)


def test_other_context_length_is_caught(exported, directory):
    edit_config(directory, lambda c: c.update(max_position_embeddings=512))
    assert any("max_position_embeddings is 512" in line for line in judge(exported, directory)["failures"])


def test_other_tokenizer_is_caught(exported, directory):
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(content))
    assert any("tokens of the sample text differ" in line for line in judge(exported, directory)["failures"])


def test_native_model_that_is_wrong_itself_is_caught(exported):
    """A bound derived from the native error would be void if that error were not bounded too."""
    out, config, needs = exported
    right = needs["native_logits"]
    found = gate.check(out, config, **needs | {"native_logits": lambda t: right(t).bfloat16().float()})
    assert any("native FP32 logits" in line for line in found["failures"])


def test_training_table_off_the_formula_is_caught(exported):
    out, config, needs = exported
    found = gate.check(out, config, **needs | {"table": needs["table"].bfloat16().float()})
    assert any("off the formula" in line for line in found["failures"])


@pytest.mark.parametrize("original", [32, 8192], ids=["short", "llama 3.1"])
def test_oracle_frequencies_equal_the_models(original, pristine):
    from dataclasses import replace

    rope = RopeConfig(original_max_position=original)
    config = replace(pristine.study.model, rope=rope, head_dim=128)
    exact = oracle.inv_freq(rope, 128)
    torch.testing.assert_close(rope_inv_freq(config).double(), exact, rtol=16 * 2.0**-24, atol=0)


def test_large_models_are_written_in_shards_that_load(exported, tmp_path, monkeypatch):
    _, config, needs = exported
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    export.write_directory(tmp_path, config, needs["weights"], tokenizer=needs["tokenizer"], end_of_text=0)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert judge(exported, tmp_path)["passed"] is True


def test_command_exports_and_keeps_what_is_up_to_date(project, capsys, monkeypatch):
    assert main(["export", *project.cli()]) == 0
    out = project.results / "export/bf16/s3"
    record = export.require(out)
    assert record["inputs"]["checkpoint_sha256"] == project.job().checkpoint(20).sha256
    assert set(record["files"]) == set(export.directory_files(out))
    assert "gate passed" in capsys.readouterr().out
    monkeypatch.setattr(gate, "check", lambda *_, **__: pytest.fail("gated an up-to-date directory again"))
    assert main(["export", *project.cli()]) == 0


def test_failed_gate_stays_on_record_and_blocks_scores(project, capsys, monkeypatch):
    right = export.native_fp32
    monkeypatch.setattr(export, "native_fp32", lambda *a: lambda t: right(*a)(t) + 1)
    assert main(["export", *project.cli()]) == 2
    assert "the export gate failed: " in capsys.readouterr().err
    out = project.results / "export/bf16/s3"
    assert records.read_json(out / "gate.json")["passed"] is False
    with pytest.raises(ValueError, match="export gate failed"):
        export.require(out)


@pytest.mark.parametrize("change", ["edited", "added", "removed"])
def test_directory_changed_after_the_gate_is_refused(project, change):
    assert main(["export", *project.cli()]) == 0
    out = project.results / "export/bf16/s3"
    if change == "edited":
        edit_config(out, lambda c: c.update(rope_theta=10000.0))
    elif change == "added":
        (out / "adapter.json").write_text("{}")
    else:
        (out / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="export again"):
        export.require(out)


def test_directory_without_a_gate_is_refused(directory):
    with pytest.raises(ValueError, match=r"no gate.json"):
        export.require(directory)
