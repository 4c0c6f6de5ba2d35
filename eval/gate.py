"""The gate between an exported directory and any score (report section C.2).

The report's first evaluator dropped the RoPE scaling, which no weight can reveal, and its numbers were
void. So before a score the directory is loaded the way every user loads it, by transformers in FP32, and
must agree with the trained model holding the same BF16-rounded weights:

1. every tensor is used and none is missing; rotation frequencies FP32 and bit-equal to training's,
   attention scaling 1, context length equal; the tokenizer gives the training tokenizer's tokens;
   training's frequencies themselves are within 16 FP32 roundings of the formula in FP64;
2. logits over a fixed probe as long as the longest context that is trained or scored, and longer than the
   context the RoPE scaling starts from (errors of a wrong rotation are 0 at the first position and grow):

       e_native = max |native FP32 - truth|,  e_hf = max |transformers FP32 - truth|,  truth FP64 (oracle)
       e_native <= prior,  prior = 8 u sqrt(4 L H) max |truth|   (u = 2^-24, L blocks of four products in a
                                    row, each a sum of about H terms, random signs; 8 for the tail)
       e_hf     <= 4 e_native + 8 u max |truth|                  (same maths, other order of summation)

   Measured e is near 5e-7 on models whose wrong rotations move logits by 1e-3 and more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4core.recipe import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

PROBE_SEED = 20531
_UNIT = 2.0**-24
_BINS = 512  # at most so many entries of the per-position error are kept, each the maximum of its positions
SAMPLE_TEXT = "The 1st state of the Union: 3.14% of “naïve” people\n\n\tagree — don't they?"


def probe_length(config: ModelConfig, longest_used: int) -> int:
    """Tokens of the probe: the longest context in use and, where positions allow, past the original one."""
    return min(config.max_position, max(longest_used, config.rope.original_max_position + 1))


def probe_tokens(length: int, vocab: int) -> Tensor:
    """Fixed token ids int64 [length], from SHA-256 in counter mode: the same on every machine and version."""
    import torch

    digests = (hashlib.sha256(f"{PROBE_SEED}:{i}".encode()).digest() for i in range(length))
    return torch.tensor([int.from_bytes(digest[:8], "little") % vocab for digest in digests])


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, row-major, little-endian."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def check(
    directory: Path,
    config: ModelConfig,
    *,
    weights: dict[str, Tensor],
    native_logits: Callable[[Tensor], Tensor],
    table: Tensor,
    tokenizer: Path,
    longest_used: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """Compare `directory` with the trained model; returns the record's fields, `passed` and `failures` first.

    Args:
        weights: BF16 tensors under Hugging Face names, as exported.
        native_logits: the trained model on these weights in FP32: int64 [T] -> FP32 [T, V].
        table: training's rotation frequencies, FP32 [head_dim / 2].
        tokenizer: training's tokenizer.json.
        longest_used: tokens of the longest training sequence or scored prompt.
    """
    import torch

    from eval import oracle

    failures: list[str] = []
    tokens = probe_tokens(probe_length(config, longest_used), config.vocab).to(device)
    with torch.inference_mode():
        truth = oracle.logits(weights, config, tokens, table=table.to(device))
        native = native_logits(tokens).to(truth.dtype)
        e_native = (native - truth).abs().amax(-1)
        del native
        loaded, frequencies = _load(directory, config, table, device, failures)
        positions = truth.new_full((len(tokens),), float("nan"))
        if loaded is not None:
            positions = (loaded(tokens[None]).logits[0].to(truth.dtype) - truth).abs().amax(-1)
        scale = truth.abs().max().item()
    _check_table(table, config, failures)
    prior = 8 * _UNIT * (4 * config.blocks * config.hidden) ** 0.5 * scale
    bound = 4 * e_native.max().item() + 8 * _UNIT * scale
    if not e_native.max().item() <= prior:
        failures.append(
            f"the native FP32 logits are {e_native.max().item():.2e} from the truth, bound {prior:.2e}"
        )
    if not positions.max().item() <= bound:
        first = int((~(positions <= bound)).nonzero()[0])
        failures.append(
            f"logits differ by {positions.max().item():.2e}, bound {bound:.2e}, first at position {first}"
        )
    _check_tokenizer(directory, tokenizer, config, failures)
    finite = bool(torch.isfinite(positions).all())
    return {
        "passed": not failures,
        "failures": failures,
        "inv_freq_sha256": {"training": tensor_sha256(table), "exported": frequencies},
        "probe": {
            "length": len(tokens),
            "seed": PROBE_SEED,
            "sha256": tensor_sha256(tokens),
            "original_max_position": config.rope.original_max_position,
        },
        "logits_max": scale,
        "native_error": e_native.max().item(),
        "native_bound": prior,
        "exported_error": positions.max().item() if finite else None,
        "exported_bound": bound,
        "positions_per_bin": -(-len(tokens) // _BINS),
        "error_by_position": _binned(positions) if finite else [],
    }


def _load(
    directory: Path, config: ModelConfig, table: Tensor, device: str, failures: list[str]
) -> tuple[Any, str | None]:
    """(model, inv_freq's hash) of the directory as transformers reads it, None when it cannot be read."""
    import torch
    from transformers import LlamaForCausalLM

    try:
        model, info = LlamaForCausalLM.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        failures.append(f"transformers cannot load the directory: {type(error).__name__}: {error}")
        return None, None
    model = model.to(device).eval()
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            failures.append(f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, info[kind])))}")
    rotary = model.model.rotary_emb
    found = rotary.inv_freq
    if found.dtype != torch.float32 or not torch.equal(found.cpu(), table.cpu()):
        worst = ((found.cpu().double() - table.cpu().double()) / table.cpu().double()).abs().max().item()
        failures.append(f"rotation frequencies differ from training's by up to {worst:.2%}")
    if rotary.attention_scaling != 1.0:
        failures.append(f"attention scaling is {rotary.attention_scaling}, needed 1.0")
    if model.config.max_position_embeddings != config.max_position:
        failures.append(
            f"max_position_embeddings is {model.config.max_position_embeddings}, needed {config.max_position}"
        )
    return model, tensor_sha256(found)


def _check_table(table: Tensor, config: ModelConfig, failures: list[str]) -> None:
    """Training's own frequencies against the formula in FP64: a dozen FP32 roundings at most."""
    from eval import oracle

    true = oracle.inv_freq(config.rope, config.head_dim)
    worst = ((table.cpu().double() - true) / true).abs().max().item()
    if not worst <= 16 * _UNIT:
        failures.append(f"training's rotation frequencies are off the formula by {worst:.1e}")


def _check_tokenizer(directory: Path, tokenizer: Path, config: ModelConfig, failures: list[str]) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    trained = Tokenizer.from_file(str(tokenizer))
    loaded = AutoTokenizer.from_pretrained(directory)
    expected, found = trained.encode(SAMPLE_TEXT).ids, loaded.encode(SAMPLE_TEXT)
    if found != expected:
        failures.append(f"tokens of the sample text differ: {found[:8]}..., needed {expected[:8]}...")
    if len(loaded) > config.vocab:
        failures.append(f"the tokenizer has {len(loaded)} tokens, the model only {config.vocab}")


def _binned(values: Tensor) -> list[float]:
    width = -(-len(values) // _BINS)
    return [float(f"{max(values[i : i + width].tolist()):.3e}") for i in range(0, len(values), width)]
