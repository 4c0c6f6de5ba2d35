"""The controlled Dgrad diagnostic (report sections C.4 and 5.2): which format carries dX = dY W better?

Forward and backward of a BF16 checkpoint give dY of every body linear; from these identical tensors and the
weights, dX is computed unquantised (BF16 operands), with MXFP4 and with CTA-local NVFP4 operands, all with
round to nearest, so that formats are compared and not random bits.

    error energy of a component = sum |dX_format - dX|^2 / sum |dX|^2

over the input gradients that belong to it: `qkv` (one input, the sum of three products),
`attention_output`, `ffn` (the shared input of gate and up, and the input of down).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval import job as jobs
from eval import stream
from fp4core import records

SCHEMA = "fp4core.dgrad"
FORMATS = {"mxfp4": ("mxfp4", "mxfp4_w2d"), "nvfp4_cta": ("nvfp4_cta", "nvfp4_cta_w2d")}
# component -> groups of linears (by index q k v o gate up down) whose products add up to one input gradient
COMPONENTS = {"qkv": ((0, 1, 2),), "attention_output": ((3,),), "ffn": ((4, 5), (6,))}


def measure(
    model: Any, tokens: Any, *, formats: dict[str, tuple[str, str]] = FORMATS
) -> list[dict[str, Any]]:
    """Rows (layer from 1, component, error_<format>...) for one batch of token ids int64 [B, S + 1]."""
    import torch

    import fp4core

    gradients, handles = {}, []
    linears = [module for module in model.modules() if isinstance(module, fp4core.Linear)]

    def keep(module: Any, _: Any, grad_output: tuple[Any, ...]) -> None:
        gradients[module.block, module.index] = grad_output[0].detach().flatten(0, -2)

    for module in linears:
        handles.append(module.register_full_backward_hook(keep))
    try:
        model(tokens[:, :-1], tokens[:, 1:]).float().mean().backward()
    finally:
        for handle in handles:
            handle.remove()
    weights = {(m.block, m.index): m.weight.detach() for m in linears}
    rows = []
    with torch.no_grad():
        for block in sorted({block for block, _ in weights}):
            for component, groups in COMPONENTS.items():
                pairs = [[(gradients[block, i], weights[block, i]) for i in group] for group in groups]
                rows.append({"layer": block + 1, "component": component, **energies(pairs, formats)})
    return rows


def energies(pairs: list[list[tuple[Any, Any]]], formats: dict[str, tuple[str, str]]) -> dict[str, float]:
    """error_<name> of one component; `pairs` holds (dY [T, N], W [N, K]) of each group of linears."""
    import torch

    import fp4core

    def product(group: list[tuple[Any, Any]], encode: Callable[[Any, int], Any]) -> Any:
        return sum(encode(dy, 0) @ encode(w, 1) for dy, w in group)

    exact = [product(group, lambda x, _: x.to(torch.bfloat16).float()) for group in pairs]
    scale = sum(dx.double().square().sum().item() for dx in exact)
    found = {}
    for name, names in formats.items():
        # both operands contract along N: dY's last axis; a 2D weight tile is the same in either direction
        coded = [
            product(group, lambda x, side, names=names: fp4core.quantize(x, names[side]).dequantize())
            for group in pairs
        ]
        error = sum((a.double() - b.double()).square().sum().item() for a, b in zip(coded, exact))
        found[f"error_{name}"] = error / scale if scale else math.nan
    return found


def geometric_mean(values: list[float]) -> float:
    """exp(mean(log)), the report's average of ratios."""
    return math.exp(math.fsum(math.log(v) for v in values) / len(values))


def run(job: jobs.Job) -> Path:
    """Measure the study's batches and write dgrad/s<seed>.json; returns its path."""
    import torch

    from fp4core.model import build_model
    from fp4core.recipe import load_recipe

    config = job.study.dgrad
    out = job.results / "dgrad" / f"s{job.seed}.json"
    manifest, checkpoint = job.manifest(), job.checkpoint(config.step)
    device, described = jobs.pick_device(job.study)
    tokens = stream.validation(job)
    if config.sequence > tokens.rows.shape[1] - 1 or config.batches > len(tokens.rows):
        raise ValueError(
            f"dgrad asks for {config.batches} batches of {config.sequence} tokens, the validation stream "
            f"has {tokens.rows.shape[0]} sequences of {tokens.rows.shape[1] - 1}; lower dgrad.sequence "
            "or dgrad.batches"
        )
    model_config, state = checkpoint.weights()
    model = build_model(model_config, load_recipe("bf16"), device, seed=None)
    model.load_state_dict(state)
    rows = []
    for batch in range(config.batches):
        ids = torch.from_numpy(tokens.rows[batch : batch + 1, : config.sequence + 1]).to(device)
        model.zero_grad(set_to_none=True)
        for row in measure(model, ids):
            ratio = row["error_mxfp4"] / row["error_nvfp4_cta"]
            rows.append({"batch": batch, **row, "ratio": ratio})
        print(f"dgrad: batch {batch + 1} of {config.batches}", flush=True)
    mean = geometric_mean([row["ratio"] for row in rows])
    lower = sum(row["ratio"] > 1 for row in rows)
    record = {
        **job.envelope(
            SCHEMA,
            "dgrad",
            device=described,
            backend=manifest.get("backend", ""),
            inputs={"checkpoint_sha256": checkpoint.sha256, "stream_sha256": tokens.sha256},
        ),
        "step": config.step,
        "sequence": config.sequence,
        "rounding": "nearest",
        "geometric_mean_ratio": mean,
        "nvfp4_cta_lower": lower,
        "comparisons": len(rows),
        "rows": rows,
    }
    records.archive_stale(out, job.results, recipe_hash=job.recipe.hash, stage_hash=record["stage_hash"])
    records.write_json(out, record)
    print(f"dgrad: CTA-local lower in {lower} of {len(rows)}, geometric-mean ratio {mean:.3f}", flush=True)
    return out


def main(arguments: list[str]) -> None:
    """python -m eval dgrad --study S --seed N --results DIR --done MARK"""
    parser = argparse.ArgumentParser(prog="python -m eval dgrad", description="Dgrad error by format")
    jobs.add_arguments(parser, route=False)
    parsed = parser.parse_args(arguments)
    study = jobs.recipes.load_study(parsed.study, parsed.recipes)
    job = jobs.from_arguments(parsed, study.dgrad.route)
    if job.skip(study.dgrad.step, parsed.done, "dgrad"):
        return
    out = run(job)
    if parsed.done:
        records.write_marker(
            parsed.done, out, recipe_hash=job.recipe.hash, stage_hash=study.stage_hash("dgrad")
        )
