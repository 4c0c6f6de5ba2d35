"""Checked logs -> the rows of every tidy table. A value that was not measured is None, never made up."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval import notes
from eval.logs import Logs, Run
from fp4core import formats
from fp4core.recipe import BlockGroup, Study

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
SCHEMAS = Path(__file__).resolve().parents[1] / "schemas" / "tidy"
# logged rows at the end of a run whose median is its steady-state rate (report table 9)
PRODUCTION_ROWS = 100


def schema(name: str) -> dict[str, Any]:
    """The row schema of table `name`."""
    return json.loads((SCHEMAS / f"{name}.schema.json").read_text())


def columns(name: str) -> dict[str, Any]:
    """Column -> its JSON Schema, in the order of the table."""
    return schema(name)["properties"]


def routes(logs: Logs) -> list[Row]:
    return [
        {
            "route": recipe.route,
            "label": recipe.label,
            "order": order,
            "published_key": recipe.published_key,
            "in_report": recipe.in_report,
            "implementation": recipe.implementation,
            "recipe_hash": recipe.hash,
        }
        for order, recipe in enumerate(logs.recipes.values(), start=1)
    ]


def operands(logs: Logs) -> list[Row]:
    """The recipe of every range of blocks, in the study's own depth, blocks counted from 1."""
    depth, rows = logs.study.model.blocks, []
    for recipe in logs.recipes.values():
        starts = [*recipe.starts(depth), depth]
        for group, first, end in zip(recipe.groups, starts, starts[1:]):
            for contraction, names in (("fprop", ("x", "w")), ("dgrad", ("dy", "w")), ("wgrad", ("dy", "x"))):
                for name in names:
                    operand = getattr(getattr(group, contraction), name)
                    rows.append(
                        {
                            "route": recipe.route,
                            "first_block": first + 1,
                            "last_block": end,
                            "depth": depth,
                            "contraction": contraction,
                            "operand": name,
                            "format": operand.format,
                            "rounding": operand.rounding,
                            "hadamard": operand.hadamard,
                            "exception": _exception(group, contraction, name),
                        }
                    )
    return rows


def _exception(group: BlockGroup, contraction: str, name: str) -> str | None:
    """'down: scale target 2048' where an operand of one linear differs from the group's, else None."""
    usual = getattr(getattr(group, contraction), name)
    found = []
    for linear, recipe in group.linears.items():
        own = getattr(getattr(recipe, contraction), name)
        changed = {
            field: getattr(own, field)
            for field in ("format", "rounding", "hadamard", "scale_target")
            if getattr(own, field) != getattr(usual, field)
        }
        if changed:
            told = (f"{field.replace('_', ' ')} {_plain(value)}" for field, value in changed.items())
            found.append(f"{linear}: {', '.join(told)}")
    return "; ".join(found) or None


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_rows(_: Logs) -> list[Row]:
    return [
        {
            "format": fmt.name,
            "element": fmt.element,
            "block_rows": fmt.block_rows,
            "block_cols": fmt.block_cols,
            "block_scale": fmt.block_scale,
            "outer_scale": fmt.outer,
            "rule": f"{fmt.rule}; outer {fmt.outer_rule}",
            "direction": fmt.direction,
            "source": fmt.source,
        }
        for fmt in map(formats.get, formats.names())
    ]


def runs(logs: Logs) -> list[Row]:
    rows = []
    for (route, seed), run in logs.runs.items():
        manifest, ended = run.manifest, run.summary or {}
        last = metrics(run)[-1:] or [{"step": 0, "tokens": 0}]
        rows.append(
            {
                "route": route,
                "seed": seed,
                "status": run.status,
                "steps": ended.get("steps", last[0]["step"]),
                "tokens": ended.get("tokens", last[0]["tokens"]),
                "recipe_hash": manifest["recipe_hash"],
                "device": manifest["device"]["name"],
                "backend": manifest["backend"],
                "commit": manifest["commit"],
                "started_utc": manifest["date_utc"],
                "wall_s": ended.get("wall_s"),
            }
        )
    return rows


def metrics(run: Run) -> list[Row]:
    """Logged rows of one run, ascending by step."""
    import pyarrow.parquet as pq

    return pq.read_table(run.metrics).to_pylist()


def losses(logs: Logs) -> list[Row]:
    kept = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s")
    return [
        {"route": route, "seed": seed, **{name: row[name] for name in kept}}
        for (route, seed), run in logs.runs.items()
        for row in metrics(run)
    ]


def endpoint(logs: Logs) -> list[Row]:
    """Raw loss at the last shared step; empty where the run did not get there."""
    step, rows = logs.study.train.endpoint_step, []
    for (route, seed), run in logs.runs.items():
        found = next((row["loss"] for row in metrics(run) if row["step"] == step), None)
        rows.append({"route": route, "seed": seed, "step": step, "loss": found})
    return rows


def throughput(logs: Logs) -> list[Row]:
    absent = ("route", "seed", "mfu", "device")
    same = [name for name in columns("throughput") if name not in absent]
    return [
        {
            "route": route,
            "seed": seed,
            **{name: row[name] for name in same},
            "mfu": row["mfu_percent"],
            "device": record["device"]["name"],
        }
        for (route, seed), record in logs.probes.items()
        for row in record["measurements"]
    ]


def production(logs: Logs) -> list[Row]:
    """Median rate per device over the last PRODUCTION_ROWS logged rows of the last quarter of a long run."""
    from fp4core.model import flops_per_token, peak_tflops

    rows = []
    for (route, seed), run in logs.runs.items():
        if run.summary is None:
            continue
        every = metrics(run)
        window = [row for row in every if row["step"] > 0.75 * every[-1]["step"]][-PRODUCTION_ROWS:]
        rate = (
            statistics.median(row["tokens_per_s"] for row in window)
            / run.manifest["starts"][-1]["world_size"]
        )
        peak = peak_tflops(run.manifest["device"]["name"])
        work = flops_per_token(logs.study.model, logs.study.train.sequence)
        rows.append(
            {
                "route": route,
                "seed": seed,
                "window_first": window[0]["step"],
                "window_last": window[-1]["step"],
                "tokens_per_s": rate,
                "mfu": None if peak is None else 100 * rate * work / (peak * 1e12),
                "memory_gib": max(row["memory_gib"] for row in window),
            }
        )
    return rows


def validation(logs: Logs) -> list[Row]:
    same = ("step", "nll", "se", "sequences", "tokens")
    return [
        {
            "route": route,
            "seed": seed,
            **{name: record[name] for name in same},
            "stream_sha256": record["inputs"]["stream_sha256"],
        }
        for (route, seed, _), record in logs.validation.items()
        if route == notes.REFERENCE or notes.comparable(logs)
    ]


def validation_sequences(logs: Logs) -> list[Row]:
    return [
        {"route": route, "seed": seed, "step": step, "sequence": number, "nll": value}
        for (route, seed, step), record in logs.validation.items()
        if route == notes.REFERENCE or notes.comparable(logs)
        for number, value in enumerate(record["sequence_nll"])
    ]


def downstream(logs: Logs) -> list[Row]:
    return [
        {"route": route, "seed": seed, "step": record["step"], **row}
        for (route, seed), record in logs.downstream.items()
        for row in record["tasks"]
    ]


def downstream_items(logs: Logs) -> list[Row]:
    import pyarrow.parquet as pq

    wanted, folder = list(columns("downstream_items")), logs.root / "downstream"
    return [
        row
        for route, seed in logs.downstream
        for row in pq.read_table(folder / route / f"s{seed}.items.parquet", columns=wanted).to_pylist()
    ]


def dgrad(logs: Logs) -> list[Row]:
    record = logs.single.get("dgrad", {"seed": None, "rows": []})
    return [{"seed": record["seed"], **row} for row in record["rows"]]


def output_head(logs: Logs) -> list[Row]:
    variants = logs.single["output_head"]["variants"]
    return [{name: row[name] for name in columns("output_head")} for row in variants]


def boundary(logs: Logs) -> list[Row]:
    return logs.single["boundary"]["rows"]


def training(logs: Logs, reported: Study | None) -> list[Row]:
    """The shared training configuration, with the report's value where its study is at hand."""
    mine, theirs = notes.settings(logs.study), notes.settings(reported) if reported else {}
    return [{"key": key, "value": value, "report_value": theirs.get(key)} for key, value in mine.items()]


TABLES: dict[str, Callable[[Logs], list[Row]]] = {
    "meta": notes.meta,
    "routes": routes,
    "operands": operands,
    "formats": format_rows,
    "runs": runs,
    "losses": losses,
    "endpoint": endpoint,
    "throughput": throughput,
    "production": production,
    "validation": validation,
    "validation_sequences": validation_sequences,
    "downstream": downstream,
    "downstream_items": downstream_items,
    "dgrad": dgrad,
    "output_head": output_head,
    "boundary": boundary,
}
PARQUET = ("losses", "validation_sequences", "downstream_items")


def parquet_bytes(name: str, rows: list[Row]) -> bytes:
    """Parquet of table `name`, its columns typed by the row schema."""
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    fields = [(column, _arrow_type(kind["type"])) for column, kind in columns(name).items()]
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields)), sink)
    return sink.getvalue()


def _arrow_type(kind: str | list[str]) -> pa.DataType:
    import pyarrow as pa

    name = kind if isinstance(kind, str) else next(k for k in kind if k != "null")
    return {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}[name]
