"""Weights out of a training checkpoint, without its optimizer and without a pickle.

A checkpoint is a directory of torch.distributed.checkpoint safetensors files, whole or sharded over ranks,
with tensors ``model.<parameter>`` beside the optimizer's, and the ModelConfig as JSON: ``model_config.json``,
or the field ``model`` of ``checkpoint.json``. Only the weights are read from disk.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from fp4core._recipe_load import build
from fp4core.model.llama import Llama
from fp4core.recipe import ModelConfig

_PREFIX = "model."


def load_weights(checkpoint_dir: str | Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """(config, state dict of ``Llama(config)``) on the CPU, in the dtype they were saved in.

    Raises ValueError when the directory, its configuration or a tensor is missing, foreign or of another
    shape. Hashes are the run's to check, not this function's.
    """
    path = Path(checkpoint_dir)
    if not path.is_dir():
        raise ValueError(f"{path}: no such checkpoint directory")
    config = _read_config(path)
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{path}: no *.safetensors file; needed a checkpoint written by fp4core.train")
    reader = HuggingFaceStorageReader(str(path))
    found = reader.read_metadata().state_dict_metadata
    with torch.device("meta"):
        expected = {name: value.shape for name, value in Llama(config).state_dict().items()}
    _compare(path, expected, {name: entry.size for name, entry in found.items()})
    tensors = {
        _PREFIX + name: torch.empty(shape, dtype=found[_PREFIX + name].properties.dtype)
        for name, shape in expected.items()
    }
    with warnings.catch_warnings():  # that there is no process group is the point of no_dist
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return config, {name: tensors[_PREFIX + name] for name in expected}


def _read_config(path: Path) -> ModelConfig:
    own, manifest = path / "model_config.json", path / "checkpoint.json"
    if own.is_file():
        return build(ModelConfig, _json(own), str(own))
    if manifest.is_file():
        content = _json(manifest)
        if not isinstance(content, dict) or "model" not in content:
            raise ValueError(f"{manifest}: got no field 'model', needed the model's configuration")
        return build(ModelConfig, content["model"], f"{manifest}: model")
    raise ValueError(f"{path}: neither model_config.json nor checkpoint.json; needed one of them")


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as JSON ({error})") from None


def _compare(path: Path, expected: dict[str, torch.Size], found: dict[str, torch.Size]) -> None:
    given = {name.removeprefix(_PREFIX): size for name, size in found.items() if name.startswith(_PREFIX)}
    missing, foreign = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or foreign:
        raise ValueError(
            f"{path}: {len(missing)} weights missing ({', '.join(missing[:3])}), {len(foreign)} unknown "
            f"({', '.join(foreign[:3])}); its configuration and its tensors belong to different models"
        )
    for name, shape in expected.items():
        if given[name] != shape:
            raise ValueError(f"{path}: got {name} of {tuple(given[name])}, needed {tuple(shape)}")
