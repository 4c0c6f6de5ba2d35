"""Output-head screen (report table 10, a negative result): what a low-precision head gains and changes.

Three heads on one body: `bf16` (control), `lowp` (low-precision forward), `lowp_mxfp8_wgrad` (and its weight
gradient in MXFP8). Each variant is trained for the screen's steps from the same start on the same data. The
gradient difference is taken where it means something: all variants at the control's final weights, on the
next global batch, ||g - g_control|| / ||g_control|| over all parameters. What non-finite numbers leave
without a value is null in the record, and `failed` says why.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from fp4core.ops.linear import resolve_backend
from fp4core.recipe import Recipe, Study
from fp4core.records import archive_stale, envelope, write_json, write_marker

from .collection import collect_engines
from .distributed import World, device_record
from .engine import Engine
from .errors import NonFinite
from .probe import rates, timed_steps
from .shards import TokenStream, check_data, open_training

SCREEN_SCHEMA = "fp4core.output_head"
# variant -> precision of forward, hidden gradient, weight gradient
VARIANTS = {
    "bf16": ("BF16", "BF16", "BF16"),
    "lowp": ("lowp", "BF16", "BF16"),
    "lowp_mxfp8_wgrad": ("lowp", "BF16", "MXFP8"),
}


def head_screen(
    study: Study, recipe: Recipe, seed: int, *, results: Path, done: Path | None, world: World
) -> Path:
    """Run the three variants and write output_head/s<seed>.json; returns its path."""
    data = check_data(results / "data", share=(world.rank, world.size))
    stream = open_training(results / "data", data, sequence=study.train.sequence)
    rows: list[dict[str, Any]] = []
    control: Engine | None = None
    control_gradients: list[torch.Tensor] | None = None
    failed: dict[str, str] = {}
    for variant, (forward, hidden, weight) in VARIANTS.items():
        engine = None
        collect_engines()
        engine = _engine(study, recipe, seed, variant, stream=stream, world=world)
        losses, times = [], []
        try:
            losses, times = timed_steps(engine, study.output_head.steps, title=f"head-screen {variant}")
        except NonFinite as error:
            failed[variant] = str(error)
        gradients = None
        if control is None:
            control = engine
            if losses:
                gradients = control_gradients = _gradients(engine)
        elif control_gradients is not None:
            with torch.no_grad():
                for mine, theirs in zip(engine.model.parameters(), control.model.parameters(), strict=True):
                    mine.copy_(theirs)
            gradients = _gradients(engine)
        rows.append(
            {
                "variant": variant,
                "forward": forward,
                "hidden_gradient": hidden,
                "weight_gradient": weight,
                **_rates(times, study, engine.tokens_per_step / world.size),
                "final_loss": losses[-1] if losses else None,
                "loss_difference": _apart(losses, rows[0]["losses"] if rows else losses),
                "grad_relative_difference": gradients and _difference(gradients, control_gradients, world),
                "losses": losses,
            }
        )
    path = results / "output_head" / f"s{seed}.json"
    if world.first:
        head = envelope(
            SCREEN_SCHEMA,
            study=study.study,
            route=recipe.route,
            seed=seed,
            recipe_hash=recipe.hash,
            stage_hash=study.stage_hash("output_head"),
            device=device_record(world.device),
            backend=resolve_backend(study.backend, world.device.type),
            inputs={"data": data["data_sha256"]},
        )
        screen = study.output_head
        window = {"steps": screen.steps, "window_first": screen.window[0], "window_last": screen.window[1]}
        archive_stale(path, results, recipe_hash=recipe.hash, stage_hash=head["stage_hash"])
        write_json(path, {**head, **window, "variants": rows, "failed": failed})
        if done:
            note = "; ".join(failed.values()) or None
            write_marker(done, path, recipe_hash=recipe.hash, stage_hash=head["stage_hash"], note=note)
    if failed and not done:
        raise NonFinite("; ".join(failed.values()))
    return path


def _rates(times: list[float], study: Study, tokens_per_device: float) -> dict[str, float | None]:
    if not times:
        return dict.fromkeys(("tokens_per_s", "p10", "p90"))
    return rates(times, study.output_head.window, tokens_per_device)


def _apart(mine: list[float], control: list[float]) -> float | None:
    """Difference of the last losses; None when either has none."""
    return mine[-1] - control[-1] if mine and control else None


def _engine(
    study: Study, recipe: Recipe, seed: int, variant: str, *, stream: TokenStream, world: World
) -> Engine:
    model = dataclasses.replace(study.model, output_head=variant)
    return Engine(dataclasses.replace(study, model=model), recipe, seed, world=world, stream=stream)


def _gradients(engine: Engine) -> list[torch.Tensor]:
    """This rank's gradients of the step after the screen, copied."""
    engine.exact_gradients(engine.study.output_head.steps + 1)
    found = [p.grad for p in engine.model.parameters() if p.grad is not None]
    return [(g.to_local() if hasattr(g, "to_local") else g).detach().clone() for g in found]


def _difference(mine: list[torch.Tensor], control: list[torch.Tensor], world: World) -> float | None:
    """||mine - control|| / ||control|| in FP64 over all ranks; None when that is not finite."""
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(mine, control, strict=True))
    whole = sum(float(b.double().square().sum()) for b in control)
    apart, whole = world.reduce(apart, whole)
    found = (apart / whole) ** 0.5 if whole else math.nan
    return found if math.isfinite(found) else None
