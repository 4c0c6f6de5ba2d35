"""Checkpoint -> Hugging Face directory that stock tools read, gated before anyone scores it.

    config.json            generated from the training ModelConfig, never copied: transformers 5 reads
                           `rope_parameters`, 4.x reads `rope_theta` and `rope_scaling`; both are written,
                           since a missing form is not an error there but theta 10000 without scaling
    model*.safetensors     BF16 weights under Hugging Face names (the model rotates the pairs (i, i + D/2),
                           as transformers does, so Q and K need no permutation)
    tokenizer.json, tokenizer_config.json
    gate.json              what `gate.check` found; a directory without a passed gate is never scored

The directory is built beside its place and put there by a rename.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval import gate
from eval import job as jobs
from fp4core import records
from fp4core.recipe import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = "fp4core.gate"
SHARD_BYTES = 5_000_000_000


def write_directory(
    out: Path, config: ModelConfig, weights: dict[str, Tensor], *, tokenizer: Path, end_of_text: int
) -> None:
    """Write everything but the gate into the existing directory `out`."""
    from tokenizers import Tokenizer

    from fp4core.model import hf_config_dict

    token = Tokenizer.from_file(str(tokenizer)).id_to_token(end_of_text)
    if token is None:
        raise ValueError(f"{tokenizer}: has no token {end_of_text}, which data.json names as the end of text")
    _write_weights(out, weights)
    ids = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    texts = {
        "config.json": hf_config_dict(config, dtype="bfloat16", **ids),
        "generation_config.json": ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": token,
            "eos_token": token,
            "model_max_length": config.max_position,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in texts.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    shutil.copyfile(tokenizer, out / "tokenizer.json")


def _write_weights(out: Path, weights: dict[str, Tensor]) -> None:
    """One safetensors file, or several of at most SHARD_BYTES with the index that transformers expects."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in weights.items():
        held = sum(t.nbytes for t in shards[-1].values())
        if shards[-1] and held + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor.contiguous()
    if len(shards) == 1:
        save_file(shards[0], out / "model.safetensors", metadata={"format": "pt"})
        return
    placed = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in weights.values())}, "weight_map": placed}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def directory_files(directory: Path) -> dict[str, str]:
    """SHA-256 of every file that defines the exported model (all but the gate's record)."""
    files = sorted(p for p in directory.iterdir() if p.is_file() and p.name != "gate.json")
    return {path.name: records.sha256_file(path) for path in files}


def native_fp32(config: ModelConfig, weights: dict[str, Tensor], device: str) -> Callable[[Tensor], Tensor]:
    """The trained model on the exported (BF16) weights, computing in FP32: int64 [T] -> FP32 [T, V].

    It lives only as long as a call, so that it and transformers' copy never fill a GPU together.
    """
    import torch

    from fp4core.model import Llama

    def logits(tokens: Tensor) -> Tensor:
        model = Llama(config, compute_dtype=torch.float32).to(device).eval()
        model.load_state_dict(weights)  # copies BF16 values into FP32 parameters: exact
        return model(tokens[None])[0].float()

    return logits


def run(job: jobs.Job, step: int, out: Path) -> dict[str, Any]:
    """Export the checkpoint of `step` to `out` and gate it; returns the gate's record.

    An up-to-date directory is kept. Raises ValueError when the gate does not pass; the directory then stays
    in place with its gate.json saying why, and nothing scores it.
    """
    import torch

    from fp4core.model import rope_inv_freq

    manifest, checkpoint = job.manifest(), job.checkpoint(step)
    tokenizer, tokenizer_sha256 = job.data_file("tokenizer.json")
    stage_hash = job.study.stage_hash("train")  # the benchmarks' settings change nothing in here ...
    longest = max(job.study.train.sequence, job.study.downstream.max_length or 0)  # ... but for this
    inputs = {
        "checkpoint_sha256": checkpoint.sha256,
        "tokenizer_sha256": tokenizer_sha256,
        "longest_context": longest,
    }
    records.archive_stale(out, job.results, recipe_hash=job.recipe.hash, stage_hash=stage_hash)
    if (kept := _kept(out, inputs)) is not None:
        return kept
    device, described = jobs.pick_device(job.study)
    config, state = checkpoint.weights()
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    end_of_text = job.data()["tokenizer"]["end_of_text"]
    work = out.with_name(f".{out.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        write_directory(work, config, weights, tokenizer=tokenizer, end_of_text=end_of_text)
        found = gate.check(
            work,
            config,
            weights=weights,
            native_logits=native_fp32(config, weights, device),
            table=rope_inv_freq(config),
            tokenizer=tokenizer,
            longest_used=longest,
            device=device,
        )
        head = job.envelope(
            SCHEMA, "train", device=described, backend=manifest.get("backend", ""), inputs=inputs
        )
        record = {**head, "step": step, **found, "files": directory_files(work)}
        records.write_json(work / "gate.json", record)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    require(out)
    print(
        f"export: {job.route} seed {job.seed} step {step}: gate passed, logits within "
        f"{found['exported_error']:.1e} (bound {found['exported_bound']:.1e}) over "
        f"{found['probe']['length']} tokens",
        flush=True,
    )
    return record


def require(directory: Path) -> dict[str, Any]:
    """The gate's record of `directory`. ValueError unless it passed and every file is the one it judged."""
    path = directory / "gate.json"
    if not path.is_file():
        raise ValueError(
            f"{directory}: no gate.json; export the checkpoint with `python -m eval export` first"
        )
    record = records.read_json(path)
    if record.get("passed") is not True:
        raise ValueError(f"{directory}: the export gate failed: {'; '.join(record.get('failures', ['?']))}")
    for name, found in directory_files(directory).items():
        if record["files"].get(name) != found:
            raise ValueError(
                f"{directory / name}: sha256 expected {record['files'].get(name)}, found {found}; "
                "the file changed after the gate, export again"
            )
    gone = sorted(set(record["files"]) - set(directory_files(directory)))
    if gone:
        raise ValueError(f"{directory / gone[0]}: missing, the gate judged it; export again")
    return record


def _kept(out: Path, inputs: dict[str, str]) -> dict[str, Any] | None:
    """The record of `out` when it is whole, passed, and made from the same bytes."""
    try:
        record = require(out)
    except ValueError:
        return None
    return record if record["inputs"] == inputs else None


def main(arguments: list[str]) -> None:
    """python -m eval export --study S --route R --seed N --step K --results DIR --out DIR"""
    parser = argparse.ArgumentParser(
        prog="python -m eval export", description="checkpoint -> Hugging Face directory"
    )
    jobs.add_arguments(parser)
    parser.add_argument("--step", type=int, help="cut to export (default: downstream.step of the study)")
    parser.add_argument(
        "--out", type=Path, help="directory to write (default: results/export/<route>/s<seed>)"
    )
    parsed = parser.parse_args(arguments)
    job = jobs.from_arguments(parsed)
    step = parsed.step or job.study.downstream.step
    out = parsed.out or job.results / "export" / job.place
    if job.skip(step, parsed.done, "train"):
        return
    run(job, step, out)
    if parsed.done:
        stage_hash = job.study.stage_hash("train")
        records.write_marker(
            parsed.done, out / "gate.json", recipe_hash=job.recipe.hash, stage_hash=stage_hash
        )
