"""Hugging Face interchange: the state dict and the config.json of ``LlamaForCausalLM``.

RoPE is written twice. transformers 5 reads ``rope_parameters`` only, 4.x reads ``rope_theta`` and
``rope_scaling`` only, and each silently falls back to theta 10000 without scaling when its own form is
missing; an evaluation without the training scaling voided the report's first results (section C.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp4core.model.llama import Llama
from fp4core.recipe import ModelConfig


def hf_config_dict(config: ModelConfig, dtype: str = "bfloat16", **tokens: int | None) -> dict[str, Any]:
    """config.json of the model; ``dtype`` of the saved weights, ``tokens`` e.g. bos_token_id=1."""
    rope = config.rope
    scaling: dict[str, Any] = {"rope_type": "default"}
    if rope.factor != 1.0:
        scaling = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.blocks,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_eps,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
        "rope_theta": rope.theta,
        # where both forms are given, transformers 5 takes this one: it carries theta too
        "rope_scaling": {"rope_theta": rope.theta, **scaling},
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "use_cache": True,
        "torch_dtype": dtype,
        "dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **tokens,
    }


def to_hf_state_dict(model: Llama, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Weights under Hugging Face's names, detached, in ``dtype`` (None: as stored); no tied head."""
    return {
        name: value.detach().to(dtype or value.dtype).contiguous()
        for name, value in model.state_dict().items()
    }


def from_hf_state_dict(model: Llama, state: Mapping[str, Tensor]) -> None:
    """Copy a LlamaForCausalLM's weights into ``model``. Raises ValueError for missing or foreign tensors."""
    own = model.state_dict()
    given = {name: value for name, value in state.items() if not name.endswith("rotary_emb.inv_freq")}
    if model.config.tie_embeddings:
        given.pop("lm_head.weight", None)
    missing, foreign = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or foreign:
        raise ValueError(
            f"from_hf_state_dict: {len(missing)} tensors missing ({', '.join(missing[:3])}), "
            f"{len(foreign)} unknown ({', '.join(foreign[:3])}); needed a LlamaForCausalLM of the same depth"
        )
    for name, value in given.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"from_hf_state_dict: got {name} of {tuple(value.shape)}, needed {tuple(own[name].shape)}"
            )
    model.load_state_dict(given)
