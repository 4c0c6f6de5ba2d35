"""Facts about a study as a whole: what was run, on what, and what a reader must know (meta.csv)."""

from __future__ import annotations

from typing import Any

from eval import validate
from eval.logs import Logs
from fp4core.recipe import Study, to_dict

REFERENCE = "bf16"


def settings(study: Study) -> dict[str, str]:
    """The training configuration that all routes share, as text, in table order."""
    model, train, rope = study.model, study.train, study.model.rope
    tokens = train.steps * train.global_batch * train.sequence
    scaling = f"{rope.factor:g} / {rope.low_freq_factor:g} / {rope.high_freq_factor:g}"
    return {
        "blocks": str(model.blocks),
        "hidden size": str(model.hidden),
        "feed-forward size": str(model.ffn),
        "query heads / key-value heads / head size": f"{model.heads} / {model.kv_heads} / {model.head_dim}",
        "vocabulary": str(model.vocab),
        "RMSNorm epsilon": f"{model.rms_eps:g}",
        "RoPE theta": f"{rope.theta:g}",
        "RoPE scaling (factor / low / high)": scaling,
        "RoPE original context (tokens)": str(rope.original_max_position),
        "sequence (tokens)": str(train.sequence),
        "global batch (sequences)": str(train.global_batch),
        "steps": str(train.steps),
        "tokens": str(tokens),
        "optimizer": "AdamW, FP32 state",
        "betas": ", ".join(f"{beta:g}" for beta in train.betas),
        "Adam epsilon": f"{train.eps:g}",
        "weight decay": f"{train.weight_decay:g}",
        "gradient clip": f"{train.clip:g}",
        "peak learning rate": f"{train.lr:g}",
        "warmup (steps)": str(train.warmup),
        "schedule after warmup": train.schedule,
        "evaluated checkpoints (steps)": ", ".join(map(str, study.all_cuts)),
    }


def gate(logs: Logs) -> tuple[bool | None, str]:
    """Does the late BF16 checkpoint beat the early one, for every seed? None without two of them."""
    cuts, verdicts, texts = logs.study.all_cuts, [], []
    for seed in logs.study.seeds:
        ends = [logs.validation.get((REFERENCE, seed, cut)) for cut in (cuts[0], cuts[-1])]
        if len(cuts) < 2 or None in ends:
            continue
        found = validate.gate(*ends, logs.study.validation.gate_standard_errors)
        verdicts.append(found["passed"])
        if "gain" in found:
            texts.append(
                f"seed {seed}: step {found['late_step']} beats step {found['early_step']} by "
                f"{found['gain']:.4f} nats, {found['gain'] / found['se']:.1f} standard errors"
            )
        else:
            texts.append(f"seed {seed}: {found['reason']}")
    return (all(verdicts) if verdicts else None), "; ".join(texts)


def comparable(logs: Logs) -> bool:
    """False when the gate failed: then no route's validation enters a table (DESIGN section 9)."""
    return gate(logs)[0] is not False


def meta(logs: Logs) -> list[dict[str, Any]]:
    """Rows of meta.csv."""
    study, train = logs.study, logs.study.train
    every = [run.manifest for run in logs.runs.values()]
    every += [
        *logs.probes.values(),
        *logs.validation.values(),
        *logs.downstream.values(),
        *logs.single.values(),
    ]
    manifests = [run.manifest for run in logs.runs.values()]
    parameters = next((m["starts"][-1]["parameters"] for m in manifests), None)
    tokens = train.steps * train.global_batch * train.sequence
    facts: dict[str, Any] = {
        "study": study.study,
        "description": study.description,
        "device": _joined(m["device"]["name"] for m in manifests),
        "device_kind": _joined(m["device"]["kind"] for m in manifests),
        "backend": _joined(m["backend"] for m in manifests),
        "seeds": " ".join(map(str, study.seeds)),
        "scale": f"{_count(parameters)} parameters, {_count(tokens)} tokens, sequences of {train.sequence}",
        "tokens": tokens,
        "date": max(record["date_utc"] for record in every),
        "commit": _joined(record["commit"] or "unknown" for record in every),
        "uncommitted_edits": "yes" if any(record["dirty"] for record in every) else "no",
        "study_settings": _compact(to_dict(study)),
        "data_sha256": logs.data["data_sha256"],
        "data_source": logs.data.get("source"),
        "validation_stream_sha256": logs.data["validation"]["stream_sha256"],
        "validation_unigram_entropy": logs.data["validation"].get("unigram_entropy"),
    }
    for record in list(logs.downstream.values())[:1]:
        facts["evaluation_data_sha256"] = record["inputs"].get("evaluation_sha256")
        facts["evaluation_data_source"] = _joined(record.get("sources", {}).values())
    passed, text = gate(logs)
    facts["validation_gate"] = {True: "passed", False: "failed", None: "not applicable"}[passed]
    facts["validation_gate_detail"] = text
    for package in sorted({name for record in every for name in record["versions"]}):
        facts[f"version_{package}"] = _joined(
            record["versions"][package] for record in every if package in record["versions"]
        )
    facts |= _notes(logs, passed, text)
    return [{"key": key, "value": None if value is None else str(value)} for key, value in facts.items()]


def _notes(logs: Logs, passed: bool | None, text: str) -> dict[str, str]:
    """What the report's first page must say, where it applies."""
    found = {}
    if passed is False:
        found["note_validation"] = (
            f"The late-beats-early gate failed ({text}): validation of the routes is not compared."
        )
    subsets = [
        f"{name}: {part['scored']:,} of {part['available']:,} questions"
        for record in list(logs.downstream.values())[:1]
        for name, part in record["selection"].items()
        if part["scored"] < part["available"]
    ]
    if subsets:
        found["note_downstream"] = f"Benchmarks are scored on fixed subsets ({'; '.join(subsets)})."
    emulated = sorted(
        {
            route
            for (route, _), run in logs.runs.items()
            if logs.recipes[route].implementation == "te" and run.manifest["backend"] != "te"
        }
    )
    if emulated:
        found["note_te"] = (
            f"{', '.join(emulated)}: Transformer Engine's numerics on this project's backends, "
            "not Transformer Engine itself."
        )
    diverged = [
        f"{route} (seed {seed}, step {run.failure['step']})"
        for (route, seed), run in logs.runs.items()
        if run.failure
    ]
    if diverged:
        found["note_diverged"] = (
            f"Training ended in non-finite numbers: {', '.join(diverged)}. What comes after is blank."
        )
    if "dgrad" not in logs.single:
        found["note_dgrad"] = (
            f"The Dgrad diagnostic was not made: {logs.study.dgrad.route} diverged before step "
            f"{logs.study.dgrad.step}."
        )
    unmeasured = [line for record in logs.probes.values() for line in record.get("failed", {}).values()]
    unmeasured += logs.single["output_head"].get("failed", {}).values()
    if unmeasured:
        found["note_rates"] = f"Not measured, for non-finite numbers: {'; '.join(unmeasured)}."
    return found


def _joined(values: Any) -> str:
    """Distinct values in order of appearance."""
    return "; ".join(dict.fromkeys(map(str, values)))


def _count(number: int | None) -> str:
    """1311872 -> '1.31M'."""
    if number is None:
        return "an unknown number of"
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _compact(value: Any) -> str:
    import json

    return json.dumps(value, separators=(",", ":"), sort_keys=True)
