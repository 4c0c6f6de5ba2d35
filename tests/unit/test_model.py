"""The Llama: equal to transformers' in FP32, deterministic, recomputable, compilable, shardable."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fp4core
from fp4core.model import (
    Llama,
    build_model,
    count_parameters,
    flops_per_token,
    from_hf_state_dict,
    hf_config_dict,
    init_weights,
    load_weights,
    materialise,
    peak_tflops,
    rope_inv_freq,
    to_hf_state_dict,
)
from fp4core.recipe import RopeConfig, load_study, to_dict

SMOKE = load_study("smoke").model
CONFIG = dataclasses.replace(SMOKE, blocks=2, hidden=64, ffn=96, head_dim=16, vocab=97)
REPORT = load_study("report").model
POLICIES = ("none", "selective", "full")


def tokens(config=CONFIG, sequences: int = 2, length: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    drawn = torch.randint(0, config.vocab, (sequences, length + 1), generator=g)
    return drawn[:, :-1], drawn[:, 1:]


def hugging_face(config=CONFIG):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(hf_config_dict(config)))
    for parameter in model.parameters():  # norms away from 1, logits of order 1
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    return model.eval()


def gradients(model: torch.nn.Module, step: int = 5) -> list[torch.Tensor]:
    x, y = tokens()
    model.zero_grad()
    fp4core.set_sr_state(model, 1, step, 128)
    loss = model(x, y)
    fp4core.set_sr_state(model, 2, step + 1, 0)  # a recomputation must not see this
    loss.mean().backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


# --- equality with transformers ---------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("factor", [1.0, 8.0], ids=["plain-rope", "scaled-rope"])
def test_fp32_logits_equal_transformers(tied, factor):
    """Our FP32 error against an FP64 run is at most twice that of transformers' own FP32 run.

    512 positions with scaling from 64 on: past the length where the scaling acts.
    """
    rope = dataclasses.replace(CONFIG.rope, factor=factor)
    config = dataclasses.replace(CONFIG, tie_embeddings=tied, rope=rope)
    theirs = hugging_face(config)
    mine = Llama(config, compute_dtype=torch.float32)
    from_hf_state_dict(mine, theirs.state_dict())
    x, _ = tokens(config, length=512)
    with torch.no_grad():
        logits, reference = mine(x), theirs(x, use_cache=False).logits
        # FP32 tables also in the FP64 run: the comparison is about the rest of the model
        exact = theirs.double()(x, use_cache=False).logits
    own, allowed = (logits - exact).abs().max().item(), (reference - exact).abs().max().item()
    assert logits.dtype == torch.float32
    assert own <= 2 * allowed, f"ours is off by {own:.2e}, transformers' by {allowed:.2e}"
    assert exact.std() > 0.5


def test_fp32_loss_and_gradients_equal_transformers():
    theirs = hugging_face()
    mine = Llama(CONFIG, compute_dtype=torch.float32)
    from_hf_state_dict(mine, theirs.state_dict())
    x, y = tokens()
    losses = mine(x, y)
    losses.mean().backward()
    logits = theirs(x, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    expected.mean().backward()
    assert losses.shape == y.shape and losses.dtype == torch.float32
    torch.testing.assert_close(losses.flatten(), expected, rtol=1e-5, atol=1e-5)
    expected_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in mine.named_parameters():
        # the same FP32 sums over 128 tokens and up to 97 features, in another order
        want = expected_gradients[name]
        assert (p.grad - want).norm() <= 1e-5 * want.norm(), name


@pytest.mark.parametrize(
    "config",
    [CONFIG, REPORT, dataclasses.replace(REPORT, rope=RopeConfig(factor=1.0))],
    ids=["smoke", "llama-3.1-8b", "plain"],
)
def test_rope_frequencies_equal_transformers_bit_for_bit(config):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    written = hf_config_dict(config)
    legacy = {k: v for k, v in written.items() if k != "rope_parameters"}
    current = {k: v for k, v in written.items() if k not in ("rope_theta", "rope_scaling")}
    for form in (written, legacy, current):
        theirs = LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(json.loads(json.dumps(form))))
        assert torch.equal(theirs.inv_freq, rope_inv_freq(config))
        assert theirs.attention_scaling == 1.0


def test_a_cast_of_the_model_cannot_touch_the_frequencies():
    model = build_model(CONFIG, "bf16")
    x, _ = tokens()
    with torch.no_grad():
        before = model(x)
        for name, parameter in model.named_parameters():
            parameter.copy_(parameter.bfloat16()) if "norm" not in name else None
        rounded = model(x)
        after = model.to(torch.bfloat16)(x)
    assert torch.equal(model.inv_freq, rope_inv_freq(CONFIG)) and model.inv_freq.dtype == torch.float32
    assert torch.equal(rounded, after)
    assert not torch.equal(before, torch.zeros_like(before))
    assert [name for name, _ in model.named_buffers() if not name.endswith("sr_state")] == []


def test_state_dict_is_transformers():
    theirs, mine = hugging_face(), Llama(CONFIG)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    init_weights(mine, 0)
    saved = to_hf_state_dict(mine, torch.bfloat16)
    assert {v.dtype for v in saved.values()} == {torch.bfloat16}
    theirs.load_state_dict(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.norm.weight"), r"1 tensors missing \(model.norm.weight\)"),
        (lambda s: s.update(extra=torch.ones(1)), r"1 unknown \(extra\)"),
        (
            lambda s: s.update({"model.norm.weight": torch.ones(3)}),
            r"got model.norm.weight of \(3,\), needed \(64,\)",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_foreign_state_dict_is_one_clear_error(change, message):
    model = build_model(CONFIG, None)
    state = dict(model.state_dict())
    change(state)
    with pytest.raises(ValueError, match=message):
        from_hf_state_dict(model, state)


# --- initialisation and arithmetic ------------------------------------------------------------------------


def test_initialisation_is_deterministic_and_scaled():
    model = build_model(SMOKE, "mxfp4_sr", seed=4)
    again = build_model(SMOKE, "bf16", seed=4, activation_checkpoint="full")
    other = build_model(SMOKE, "bf16", seed=5)
    for (name, a), b, c in zip(model.named_parameters(), again.parameters(), other.parameters()):
        assert a.dtype == torch.float32 and torch.equal(a, b)
        if a.dim() == 1:
            assert torch.equal(a, torch.ones_like(a))
            continue
        assert not torch.equal(a, c)
        std = 0.02
        if name.endswith(("o_proj.weight", "up_proj.weight", "down_proj.weight")):
            std = 0.02 / (2 * (int(name.split(".")[2]) + 1)) ** 0.5
        elif "embed_tokens" in name:
            std = 1.0
        elif "lm_head" in name:  # a normal distribution cut at three of its standard deviations
            std = 0.98658 * SMOKE.hidden**-0.5
        # five standard errors of an estimated standard deviation
        assert abs(a.std().item() / std - 1) < 5 / (2 * a.numel()) ** 0.5
    assert not torch.equal(model.blocks[0].self_attn.q_proj.weight, model.blocks[1].self_attn.q_proj.weight)


def test_meta_model_costs_nothing_until_it_is_materialised():
    model = build_model(CONFIG, "mxfp4_sr", "meta")
    assert all(p.is_meta for p in model.parameters())
    materialise(model, "cpu", 0)
    expected = build_model(CONFIG, "mxfp4_sr", "cpu", 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(expected)))


def test_parameters_and_flops_of_the_report():
    assert count_parameters(REPORT) == 8_030_261_248
    assert flops_per_token(REPORT, 8192) == 57_914_449_920
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    for config in (CONFIG, tied):
        with torch.device("meta"):
            assert count_parameters(config) == sum(p.numel() for p in Llama(config).parameters())
    assert flops_per_token(tied, 64) == flops_per_token(CONFIG, 64)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", None),
        ("cpu", None),
    ],
)
def test_peak_by_device_name(name, peak):
    assert peak_tflops(name) == peak


# --- recomputation, compilation, sharding -----------------------------------------------------------------


@pytest.mark.parametrize("route", ["bf16", "te_nvfp4"])
def test_recomputation_gives_identical_gradients(route):
    model = build_model(CONFIG, route)
    expected = gradients(model)
    for policy in ("selective", "full", "selective-2"):
        model.activation_checkpoint = policy
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected)), policy
    assert not torch.equal(gradients(model, step=6)[2], expected[2]) or route == "bf16"


def test_every_nth_block_is_recomputed_counted_from_one():
    model = build_model(dataclasses.replace(CONFIG, blocks=5), "bf16", activation_checkpoint="selective-2")
    assert model.activation_checkpoint == "selective-2"
    own = [block.activation_checkpoint for block in model.blocks]
    assert own == ["none", "full", "none", "full", "none"]
    for wrong in ("selective-0", "selective-", "every-2"):
        with pytest.raises(ValueError, match=f"got '{wrong}', needed none, selective, full or selective-N"):
            model.activation_checkpoint = wrong
    assert model.activation_checkpoint == "selective-2"


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_and_loss_compile_without_graph_break(policy):
    """The default CPU and GPU set-up: block.forward compiled, recomputation inside it."""
    config = dataclasses.replace(CONFIG, blocks=1)
    model = build_model(config, "mxfp4_sr_h32", activation_checkpoint=policy)
    expected = gradients(model)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
    for _ in range(2):
        got = gradients(model)
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
    assert counter.frame_count == 1


def test_blocks_compile_one_by_one():
    model = build_model(CONFIG, "mxfp4_sr", activation_checkpoint="selective")
    expected = gradients(model)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected))


def test_micro_batches_make_the_global_batch():
    """Stochastic bits depend on the token's place only; dW is a sum, so it agrees to FP32 rounding."""
    model = build_model(CONFIG, "mxfp4_sr")
    x, y = tokens(sequences=4)
    fp4core.set_sr_state(model, 0, 1, 0)
    whole = model(x, y)
    whole.sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    parts = []
    for first in (0, 2):
        fp4core.set_sr_state(model, 0, 1, first * x.shape[1])
        parts.append(model(x[first : first + 2], y[first : first + 2]))
        parts[-1].sum().backward()
    assert torch.equal(torch.cat(parts), whole)
    for (name, p), want in zip(model.named_parameters(), expected):
        assert (p.grad - want).norm() <= 1e-5 * want.norm(), name


@pytest.fixture
def one_process_mesh(tmp_path):
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("route", ["bf16", "mxfp4_sr_h32"])
def test_fully_sharded_model_is_the_same_model(one_process_mesh, route):
    """FSDP2 from a meta model, with FP32 and with BF16 gathered: the linears round weights to BF16 anyway."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def sharded(policy):
        model = build_model(CONFIG, route, "meta", activation_checkpoint="full")
        for block in model.blocks:
            fully_shard(block, mesh=one_process_mesh, mp_policy=policy)
        fully_shard(model, mesh=one_process_mesh, mp_policy=policy)
        return materialise(model, "cpu", 0)

    expected = gradients(build_model(CONFIG, route, "cpu", 0))
    full = MixedPrecisionPolicy()
    got = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients(sharded(full))]
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    half = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    low = gradients(sharded(half))
    # norm weights are 1 at the start and the embedding is rounded on its way in: the forward pass is the same
    assert torch.equal(low[0], expected[0])
    for a, b in zip(low[1:], expected[1:]):
        assert (a.full_tensor() - b).norm() <= 2**-8 * b.norm()


# --- checkpoints and errors -------------------------------------------------------------------------------


def write_checkpoint(path, config=CONFIG, *, extra=(), drop=()):
    import torch.distributed.checkpoint as dcp

    model = build_model(config, "mxfp4_sr", seed=9)
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters() if name not in drop}
    tensors |= {f"optim.exp_avg.{name}": p.detach() * 0 for name, p in model.named_parameters()}
    tensors |= {f"model.{name}": torch.ones(2) for name in extra}
    writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group
        dcp.save(tensors, storage_writer=writer, no_dist=True)
    (path / "checkpoint.json").write_text(json.dumps({"step": 3, "model": to_dict(config)}))
    return model


def test_load_weights_reads_a_training_checkpoint(tmp_path):
    model = write_checkpoint(tmp_path)
    config, state = load_weights(tmp_path)
    assert config == CONFIG
    loaded = build_model(config, "bf16", seed=None)
    loaded.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters()))
    (tmp_path / "checkpoint.json").rename(tmp_path / "other.json")
    (tmp_path / "model_config.json").write_text(json.dumps(to_dict(CONFIG)))
    assert load_weights(tmp_path)[0] == CONFIG


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: (p / "checkpoint.json").unlink(), "needed one of them"),
        (lambda p: (p / "checkpoint.json").write_text("{"), "cannot be read as JSON"),
        (lambda p: (p / "checkpoint.json").write_text("{}"), "no field 'model'"),
        (
            lambda p: (p / "checkpoint.json").write_text(json.dumps({"model": to_dict(SMOKE)})),
            "weights missing",
        ),
        (lambda p: [f.unlink() for f in p.glob("*.safetensors")], "no .*safetensors file"),
    ],
    ids=["no-config", "bad-json", "no-model", "other-model", "no-tensors"],
)
def test_bad_checkpoint_is_one_clear_error(tmp_path, spoil, message):
    write_checkpoint(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_weights(tmp_path)


def test_bad_checkpoint_tensors_are_named(tmp_path):
    write_checkpoint(tmp_path, extra=["foreign"], drop=["model.norm.weight"])
    with pytest.raises(ValueError, match=r"1 weights missing \(model.norm.weight\), 1 unknown \(foreign\)"):
        load_weights(tmp_path)
    with pytest.raises(ValueError, match="no such checkpoint directory"):
        load_weights(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Llama(dataclasses.replace(CONFIG, kv_heads=3)), "heads, 3 kv_heads"),
        (lambda: Llama(CONFIG, activation_checkpoint="some"), "activation_checkpoint: got 'some'"),
        (
            lambda: build_model(CONFIG, "bf16")(torch.zeros(1, CONFIG.max_position + 1, dtype=torch.int64)),
            "1025",
        ),
    ],
    ids=["heads", "policy", "length"],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_autocast_is_refused():
    model = build_model(CONFIG, "bf16")
    with pytest.raises(ValueError, match="got an autocast region"), torch.autocast("cpu", torch.bfloat16):
        model(tokens()[0])
