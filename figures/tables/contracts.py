"""Tables 01-05: what is compared, before anything is measured."""

from __future__ import annotations

import csv
from pathlib import Path

from figures import captions
from figures.data import Tidy
from figures.tables.model import Column, Table

PRIOR_WORK = Path(__file__).resolve().parents[1] / "prior_work.csv"
OPERANDS = (("fprop", "x"), ("fprop", "w"), ("dgrad", "dy"), ("dgrad", "w"), ("wgrad", "dy"), ("wgrad", "x"))
SYMBOLS = {"x": "X", "w": "W", "dy": "dY"}
HADAMARD = {"plain16": "plain H16", "fixed16": "fixed H16", "fixed32": "fixed H32"}
STAR = "*"  # an operand that differs in one of the linears
SCALE_BITS = {"e8m0": 8, "e4m3": 8, "ue5m3": 8}


def prior_work(tidy: Tidy) -> Table:
    """table01: component, existing method, here, source."""
    with PRIOR_WORK.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return Table(
        name="table01_prior_work",
        title="Prior work",
        caption="What existing software does for each component, and what this project does. Stated from "
        "the named sources, read in August 2026; nothing in this table was measured here.",
        columns=[
            Column("component", "Component", width=0.14),
            Column("existing", "Existing method", width=0.33),
            Column("here", "Here", width=0.27),
            Column("source", "Source", width=0.18),
        ],
        rows=rows,
    )


def format_contracts(tidy: Tidy) -> Table:
    """table02: one row per format descriptor."""
    rows = []
    for row in tidy.table("formats").itertuples():
        per_value = 4 + SCALE_BITS.get(row.block_scale, 8) / (row.block_rows * row.block_cols)
        rows.append(
            {
                "format": row.format,
                "element": row.element.upper(),
                "block": f"{row.block_rows}×{row.block_cols}",
                "block_scale": row.block_scale.upper(),
                "outer_scale": row.outer_scale,
                "bits": per_value,
                "direction": row.direction,
                "rule": row.rule,
                "source": row.source,
            }
        )
    return Table(
        name="table02_format_contracts",
        title="Format contracts",
        caption="Scale contract of every format. A value is code × block scale × outer scale (FP32). "
        "Blocks run along the contraction; a two-dimensional block encodes a weight and its transpose "
        "alike.",
        columns=[
            Column("format", "Format"),
            Column("element", "Element"),
            Column("block", "Block"),
            Column("block_scale", "Block scale"),
            Column("outer_scale", "Outer scale"),
            Column("bits", "Bits/value", decimals=3),
            Column("direction", "Direction"),
            Column("rule", "Rule", width=0.34),
            Column("source", "Source", width=0.14),
        ],
        rows=rows,
        notes=[
            "Bits per value: four for the code and the block's share of its scale byte; outer scales "
            "add less than 0.01."
        ],
    )


def base_recipe(tidy: Tidy) -> Table:
    """table03: the shared training configuration beside the report's."""
    rows = [
        {
            "key": row.key.replace("_", " "),
            "value": _grouped(row.value),
            "report_value": _grouped(row.report_value),
        }
        for row in tidy.table("training").itertuples()
    ]
    missing = any(row["report_value"] is None or row["value"] is None for row in rows)
    return Table(
        name="table03_base_recipe",
        title="Base training recipe",
        caption=captions.join(
            "Training configuration that all routes share, beside the report's.",
            captions.setting(tidy),
            captions.seeds(tidy),
        ),
        columns=[
            Column("key", "Setting", width=0.3),
            Column("value", "This study", width=0.3),
            Column("report_value", "Report", width=0.3),
        ],
        rows=rows,
        notes=["Blank: does not apply, or the report does not state it."] if missing else [],
    )


def _grouped(value: str | None) -> str | None:
    """Whole numbers of five digits and more with separators."""
    return f"{int(value):,}" if value and value.isdigit() and len(value) > 4 else value


Cell = tuple[str, str, str, str | None]  # format, rounding, Hadamard, exception


def _groups(tidy: Tidy) -> list[tuple[str, int, int, int, dict[tuple[str, str], Cell]]]:
    """(route, first block, last block, depth, {(contraction, operand): Cell}) in order."""
    frame = tidy.table("operands")
    result = []
    for route in tidy.ordered(frame["route"]):
        mine = frame[frame["route"] == route]
        for (first, last), group in mine.groupby(["first_block", "last_block"]):
            cells = {
                (r.contraction, r.operand): (
                    r.format,
                    r.rounding,
                    r.hadamard,
                    r.exception if isinstance(r.exception, str) else None,
                )
                for r in group.itertuples()
            }
            result.append((route, int(first), int(last), int(group["depth"].iloc[0]), cells))
    return result


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def exceptions(tidy: Tidy) -> list[str]:
    """'* UE5M3, blocks 28-32, Wgrad dY: down: scale target 2048.' for every starred operand."""
    frame = tidy.table("operands")
    return [
        f"{STAR} {tidy.label(row.route)}, {'block' if row.first_block == row.last_block else 'blocks'} "
        f"{_span(row.first_block, row.last_block)}, {row.contraction.capitalize()}'s {SYMBOLS[row.operand]}: "
        f"{row.exception}."
        for row in frame[frame["exception"].notna()].itertuples()
    ]


def recipe_ledger(tidy: Tidy) -> Table:
    """table04: format of each operand, per route and group of blocks."""
    info = {route.slug: route for route in tidy.routes}
    rows = []
    for route, first, last, depth, cells in _groups(tidy):
        row: dict[str, object] = {
            "label": tidy.label(route),
            "route": route,
            "blocks": f"{_span(first, last)} of {depth}",
            "published_key": info[route].published_key if route in info else None,
            "recipe_hash": info[route].recipe_hash if route in info else None,
        }
        for contraction, operand in OPERANDS:
            name, *_, exception = cells.get((contraction, operand), (None, None))
            row[f"{contraction}_{operand}"] = f"{name}{STAR}" if exception else name
        rows.append(row)
    return Table(
        name="table04_recipe_ledger",
        title="Recipe ledger",
        caption="Format of every operand of the three contractions of a body linear, Y = XWᵀ, dX = dY W, "
        "dW = dYᵀX. Embedding, norms, attention, output head and optimizer are not quantised in any route. "
        "Ledger key: the route's name in the report's published ledgers.",
        columns=[
            Column("label", "Route"),
            Column("route", "Slug"),
            Column("blocks", "Blocks"),
            *[
                Column(
                    f"{c}_{o}", SYMBOLS[o], group={"fprop": "Fprop", "dgrad": "Dgrad", "wgrad": "Wgrad"}[c]
                )
                for c, o in OPERANDS
            ],
            Column("published_key", "Ledger key"),
            Column("recipe_hash", "Recipe hash"),
        ],
        rows=rows,
        notes=[
            *exceptions(tidy),
            *(
                ["Blank ledger key: the report gives no result for this route."]
                if any(row["published_key"] is None for row in rows)
                else []
            ),
        ],
    )


def rounding_policy(tidy: Tidy) -> Table:
    """table05: stochastic rounding, Hadamard transforms, two-dimensional weights and BF16 blocks per
    route."""
    rows = []
    routes: dict[str, list] = {}
    for route, first, last, depth, cells in _groups(tidy):
        routes.setdefault(route, []).append((first, last, depth, cells))
    for route, groups in routes.items():
        bf16 = [_span(a, b) for a, b, _, cells in groups if all(cell[0] == "bf16" for cell in cells.values())]
        stochastic = sorted(
            {
                f"{SYMBOLS[operand]} in {contraction.capitalize()}"
                for *_, cells in groups
                for (contraction, operand), cell in cells.items()
                if cell[1] == "stochastic"
            }
        )
        transforms = sorted(
            {
                f"{HADAMARD.get(cell[2], cell[2])} on {contraction.capitalize()}"
                for *_, cells in groups
                for (contraction, operand), cell in cells.items()
                if cell[2] != "none"
            }
        )
        weights = sorted(
            {
                cell[0]
                for *_, cells in groups
                for key, cell in cells.items()
                if key[1] == "w" and cell[0] != "bf16"
            }
        )
        rows.append(
            {
                "label": tidy.label(route),
                "stochastic": ", ".join(stochastic) or "none",
                "hadamard": ", ".join(transforms) or "none",
                "weights": ", ".join(weights) or "none",
                "bf16_blocks": (", ".join(bf16) + f" of {groups[0][2]}") if bf16 else "none",
            }
        )
    return Table(
        name="table05_rounding_policy",
        title="Rounding policy",
        caption="Where each route rounds stochastically, transforms, quantises weights, and keeps BF16. "
        "All other values are rounded to nearest, ties to even.",
        columns=[
            Column("label", "Route"),
            Column("stochastic", "Stochastic rounding"),
            Column("hadamard", "Hadamard transform (both operands)"),
            Column("weights", "Weight formats"),
            Column("bf16_blocks", "Blocks kept in BF16"),
        ],
        rows=rows,
    )
