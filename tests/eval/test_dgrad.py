"""The Dgrad diagnostic: the energies are what the formula says, on the tensors the model really had."""

from __future__ import annotations

import pytest
import torch

import fp4core
from eval import dgrad
from eval.__main__ import main
from fp4core import records
from fp4core.model import build_model


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_energy_is_the_formula_spelled_out():
    """Two groups as in the FFN: one of two linears whose products add, one alone."""
    pairs = [
        [(draw(64, 32, seed=1), draw(32, 48, seed=2)), (draw(64, 32, seed=3), draw(32, 48, seed=4))],
        [(draw(64, 48, seed=5), draw(48, 96, seed=6))],
    ]
    found = dgrad.energies(pairs, {"mxfp4": ("mxfp4", "mxfp4_w2d")})
    error = scale = 0.0
    for group in pairs:
        exact = sum(dy.bfloat16().double() @ w.bfloat16().double() for dy, w in group)
        coded = sum(
            fp4core.quantize(dy, "mxfp4").dequantize().double()
            @ fp4core.quantize(w, "mxfp4_w2d").dequantize().double()
            for dy, w in group
        )
        error += (coded - exact).square().sum().item()
        scale += exact.square().sum().item()
    assert found["error_mxfp4"] == pytest.approx(error / scale, rel=1e-5)  # FP32 sums of < 100 terms


def test_outliers_cost_the_block_of_32_more_than_the_block_of_16():
    dy = draw(256, 128, seed=1)
    dy[::7, ::29] *= 30
    found = dgrad.energies([[(dy, draw(128, 128, seed=2))]], dgrad.FORMATS)
    assert found["error_mxfp4"] > found["error_nvfp4_cta"] > 0


def test_gradients_are_those_of_the_loss(pristine, monkeypatch):
    """Captured dY of q, k, v times W give the gradient that autograd has at their common input.

    Autograd rounds three BF16 products and their sums, each by at most 2^-8 of a part.
    """
    model = build_model(pristine.study.model, "bf16", "cpu", seed=1)
    ids = torch.randint(0, 320, (1, 33), generator=torch.Generator().manual_seed(0))
    inputs, captured = [], []
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_hook(lambda module, args, out: out.retain_grad() or inputs.append(out))
    monkeypatch.setattr(dgrad, "energies", lambda pairs, formats: captured.append(pairs) or {})
    rows = dgrad.measure(model, ids)
    assert [(row["layer"], row["component"]) for row in rows] == [
        (layer, component) for layer in (1, 2) for component in ("qkv", "attention_output", "ffn")
    ]
    qkv = captured[3][0]
    parts = [dy.float() @ w.bfloat16().float() for dy, w in qkv]
    slack = 3 * 2**-8 * max(part.abs().max().item() for part in parts)
    torch.testing.assert_close(sum(parts), inputs[0].grad[0].float(), rtol=0, atol=slack)


def test_geometric_mean():
    assert dgrad.geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)


def test_command_writes_every_comparison(project):
    done = project.results / "done.json"
    assert main(["dgrad", *project.cli(route=None), "--done", str(done)]) == 0
    record = records.read_json(project.results / "dgrad/s3.json")
    assert record["comparisons"] == len(record["rows"]) == 2 * 3 * 2  # layers, components, batches
    for row in record["rows"]:
        assert row["ratio"] == pytest.approx(row["error_mxfp4"] / row["error_nvfp4_cta"])
        assert 0 < row["error_nvfp4_cta"] < 0.1
    ratios = [row["ratio"] for row in record["rows"]]
    assert record["geometric_mean_ratio"] == pytest.approx(dgrad.geometric_mean(ratios))
    assert record["nvfp4_cta_lower"] == sum(r > 1 for r in ratios)
    path = project.results / "dgrad/s3.json"
    assert records.read_json(done)["sha256"] == records.sha256_file(path)
    records.write_json(path, record | {"stage_hash": "0123456789ab"})
    assert main(["dgrad", *project.cli(route=None)]) == 0
    (kept,) = (project.results / "archive" / "bf16").rglob("s3.json")
    assert records.read_json(kept)["stage_hash"] == "0123456789ab"
    assert records.read_json(path)["stage_hash"] == record["stage_hash"]


def test_more_tokens_than_the_stream_has_is_one_error(project, capsys):
    path = project.recipes_dir / "studies" / "tiny.yaml"
    text = path.read_text()
    try:
        path.write_text(text.replace("batches: 2, sequence: 32", "batches: 25, sequence: 32"))
        assert main(["dgrad", *project.cli(route=None)]) == 2
    finally:
        path.write_text(text)
    assert "lower dgrad.sequence or dgrad.batches" in capsys.readouterr().err
