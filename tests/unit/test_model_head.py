"""Output head: MXFP8 against ml_dtypes, the variants against their formulas, chunks against the whole."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch

from fp4core.model import build_model
from fp4core.model.head import IGNORE, VARIANTS, OutputHead
from fp4core.model.mxfp8 import mxfp8_dequantize, mxfp8_quantize, mxfp8_round
from fp4core.recipe import load_study

T, D, V = 96, 64, 80
FP32_UNIT, BF16_UNIT = 2.0**-24, 2.0**-8


def drawn(rows: int, columns: int, seed: int) -> torch.Tensor:
    """N(0, 1) rows of very different size, as BF16 values."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) * torch.logspace(-3, 2, rows)[:, None]
    return x.bfloat16().float()


def oracle(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(E4M3 bytes, scale bytes) of x [R, K], K a multiple of 32, in FP64 with ml_dtypes' cast."""
    blocks = x.astype(np.float64).reshape(x.shape[0], -1, 32)
    amax = np.abs(blocks).max(axis=-1)
    exponent = np.where(amax > 0, np.ceil(np.log2(np.maximum(amax, 1e-300) / 448)), -127).clip(-127)
    elements = (blocks / 2.0 ** exponent[..., None]).astype(ml_dtypes.float8_e4m3fn)
    return elements.view(np.uint8).reshape(x.shape), (exponent + 127).astype(np.uint8)


def edges() -> torch.Tensor:
    """Every BF16 magnitude that is 448 x 2^k or its neighbour, where the scale must step."""
    step = torch.tensor([448.0, 446.0, 450.0, 1.0]) * 2.0 ** torch.arange(-100, 100)[:, None].float()
    rows = torch.zeros(step.numel(), 32)
    rows[:, 5] = step.flatten().bfloat16().float()
    rows[:, 7] = rows[:, 5] * 0.37
    return rows.bfloat16().float()


@pytest.mark.parametrize(
    "x",
    [drawn(64, 128, 0), edges(), torch.zeros(3, 64), drawn(8, 32, 1) * 2.0**-120, drawn(8, 32, 2) * 2.0**115],
    ids=["normal", "edges", "zeros", "tiny", "huge"],
)
def test_mxfp8_equals_ml_dtypes(x):
    x = x.bfloat16().float()
    elements, scale = mxfp8_quantize(x)
    want_elements, want_scale = oracle(x.numpy())
    assert np.array_equal(scale.numpy(), want_scale)
    assert np.array_equal(elements.view(torch.uint8).numpy(), want_elements)
    decoded = mxfp8_dequantize(elements, scale)
    exponent = want_scale.astype(np.float64).repeat(32, axis=1) - 127
    assert np.array_equal(
        decoded.double().numpy(),
        want_elements.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0**exponent,
    )
    assert torch.equal(decoded, decoded.bfloat16().float()), "exact in BF16"


def test_mxfp8_never_saturates_and_keeps_three_bits():
    x = drawn(64, 128, 3)
    decoded = mxfp8_round(x)
    # half an E4M3 step for normals, half the smallest subnormal of the block's scale below them
    scale = mxfp8_dequantize(torch.ones(x.shape).to(torch.float8_e4m3fn), mxfp8_quantize(x)[1])
    assert ((decoded - x).abs() <= torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10)).all()


@pytest.mark.parametrize("width", [1, 31, 33, 100])
def test_mxfp8_pads_in_thought_only(width):
    x = drawn(5, width, 4)
    padded = torch.nn.functional.pad(x, (0, -width % 32))
    assert torch.equal(mxfp8_round(x), mxfp8_round(padded)[:, :width])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_mxfp8_non_finite_block_decodes_to_nan_and_no_other(bad):
    x = drawn(2, 64, 5)
    good = mxfp8_round(x)
    x[0, 3] = bad
    decoded = mxfp8_round(x)
    assert decoded[0, :32].isnan().all()
    assert torch.equal(decoded[0, 32:], good[0, 32:]) and torch.equal(decoded[1], good[1])
    assert mxfp8_quantize(x)[1][0, 0] == 255


def head(variant: str = "bf16", chunk: int = 4096) -> OutputHead:
    module = OutputHead(D, V, variant, chunk=chunk)
    with torch.no_grad():
        module.weight.copy_(torch.randn(V, D, generator=torch.Generator().manual_seed(7)) * 0.3)
    return module


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h BF16 [2, T/2, D], targets with two ignored, upstream gradient."""
    g = torch.Generator().manual_seed(8)
    h = torch.randn(2, T // 2, D, generator=g).bfloat16()
    targets = torch.randint(0, V, (2, T // 2), generator=g)
    targets[0, 3] = targets[1, 0] = IGNORE
    return h, targets, torch.rand(2, T // 2, generator=g)


def loss_and_gradients(module: OutputHead, h: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor):
    h = h.clone().requires_grad_()
    module.weight.grad = None
    losses = module(h, targets)
    losses.backward(upstream)
    return losses.detach(), h.grad, module.weight.grad


def within(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, rounded: bool) -> bool:
    """got is a @ b in FP32, rounded to BF16 when ``rounded``."""
    exact = a.double() @ b.double()
    bound = a.shape[1] * FP32_UNIT * (a.double().abs() @ b.double().abs())
    if rounded:
        bound = bound * (1 + BF16_UNIT) + BF16_UNIT * exact.abs()
    return bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_follow_their_formulas(variant):
    module, (h, targets, upstream) = head(variant), batch()
    losses, dh, dw = loss_and_gradients(module, h, targets, upstream)
    logits = module(h)
    assert logits.dtype == torch.bfloat16 and logits.shape == (2, T // 2, V)
    flat, w = h.flatten(0, 1).float(), module.weight.detach()
    w16 = w.bfloat16().float()
    a, b = (flat, w16) if variant == "bf16" else (mxfp8_round(flat), mxfp8_round(w))
    flat_logits = logits.detach().flatten(0, 1).float()
    assert within(flat_logits, a, b.t(), rounded=True)
    # loss and its gradient from the BF16 logits, by autograd
    leaf = flat_logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        leaf, targets.flatten(), reduction="none", ignore_index=IGNORE
    )
    torch.testing.assert_close(losses.flatten(), expected.detach(), rtol=1e-6, atol=1e-6)
    assert losses[0, 3] == losses[1, 0] == 0
    expected.backward(upstream.flatten())
    dlogits = leaf.grad.bfloat16().float()
    # a BF16 rounding of dlogits may fall the other way where autograd's FP32 value is an ulp off
    slack = BF16_UNIT * (dlogits.abs() @ w16.abs()) * 2 + 1e-12
    assert ((dh.flatten(0, 1).float() - dlogits @ w16).abs() <= slack).all()
    left, right = dlogits.t(), flat
    if variant == "lowp_mxfp8_wgrad":
        left, right = mxfp8_round(dlogits.t()), mxfp8_round(flat.t()).t()
    assert (dw - left @ right).norm() <= BF16_UNIT * (left @ right).norm()
    assert dw.dtype == torch.float32


def test_low_precision_variants_differ_where_they_say():
    results = {variant: loss_and_gradients(head(variant), *batch()) for variant in VARIANTS}
    assert not torch.equal(results["bf16"][0], results["lowp"][0])
    assert torch.equal(results["lowp"][0], results["lowp_mxfp8_wgrad"][0])
    assert torch.equal(results["lowp"][1], results["lowp_mxfp8_wgrad"][1])
    assert not torch.equal(results["lowp"][2], results["lowp_mxfp8_wgrad"][2])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [32, 64])
def test_chunks_change_no_loss_and_no_hidden_gradient(variant, chunk):
    whole = loss_and_gradients(head(variant), *batch())
    parts = loss_and_gradients(head(variant, chunk), *batch())
    assert torch.equal(parts[0], whole[0]) and torch.equal(parts[1], whole[1])
    # a sum over T in another order
    assert (parts[2] - whole[2]).norm() <= T * FP32_UNIT * whole[2].norm()


def test_chunks_bound_the_memory_that_backward_keeps():
    """More than one chunk keeps h, w, targets and one number per token, and no logits."""
    for chunk, logits_kept in ((4096, True), (32, False)):
        saved = []
        h, targets, _ = batch()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t) or t, lambda t: t):
            head(chunk=chunk)(h.requires_grad_(), targets)
        assert any(t.shape[-1:] == (V,) for t in saved) is logits_kept
        assert all(t.numel() <= max(T * D, V * D, T * V) for t in saved)


def test_logits_path_has_the_same_gradients():
    module, (h, targets, upstream) = head(), batch()
    _, dh, dw = loss_and_gradients(module, h, targets, upstream)
    module.weight.grad = None
    leaf = h.clone().requires_grad_()
    logits = module(leaf).float()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORE
    )
    losses.backward(upstream.flatten())
    # autograd's dlogits are an FP32 ulp off here and there, and some then round to the other BF16 number
    assert (leaf.grad - dh).float().norm() <= BF16_UNIT * dh.float().norm()
    assert (module.weight.grad - dw).norm() <= BF16_UNIT * dw.norm()


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_trains_with_every_head(variant):
    config = dataclasses.replace(
        load_study("smoke").model, blocks=1, hidden=64, ffn=96, head_dim=16, vocab=97
    )
    model = build_model(dataclasses.replace(config, output_head=variant), "bf16", seed=0)
    x = torch.randint(0, 97, (2, 33), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(x[:, :-1], x[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OutputHead(8, 8, "fp8"), "got 'fp8', needed one of bf16, lowp, lowp_mxfp8_wgrad"),
        (lambda: OutputHead(8, 8, chunk=100), "got chunks of 100 tokens, needed a multiple of 32"),
    ],
    ids=["variant", "chunk"],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("chunk", [32, 96])
def test_logits_stay_in_one_place_and_no_pass_disturbs_another(chunk):
    head = OutputHead(D, V, chunk=chunk)
    head.weight.data = drawn(V, D, 3) / 8
    targets = torch.arange(T) % V
    hs = [drawn(T, D, seed).bfloat16().requires_grad_() for seed in (4, 5)]

    def gradients(losses, h):
        return torch.autograd.grad(losses.sum(), [h, head.weight])

    alone = [gradients(head(h, targets), h) for h in hs]
    place = head._room._free
    assert place.shape == (chunk, V)
    with torch.no_grad():
        assert torch.equal(
            head(hs[0], targets),
            head(hs[0][:40], targets[:40]).new_tensor(
                [*head(hs[0][:40], targets[:40]), *head(hs[0][40:], targets[40:])]
            ),
        )
    assert head._room._free is place
    head._room._free = None
    with torch.inference_mode():
        head(hs[0].detach(), targets)
    both = [head(h, targets) for h in hs]  # both before the first backward pass
    together = [gradients(losses, h) for losses, h in zip(both, hs)]
    for a, b in zip(alone, together):
        assert all(torch.equal(x, y) for x, y in zip(a, b))
