"""The author's public files -> tidy tables, so that his numbers are drawn by the same code as one's own.

    python -m eval published --published DIR | --inputs inputs.yaml   --out results/published/tidy

Any subset of the files is enough (`fp4core/_recipe_published.py` lists them). Numbers keep their digits: CSV
fields are copied as text once they parse. What the files do not state stays empty. Rows that were
interpolated, and lineages that are no route of this project, are left out and named. Every file's SHA-256 is
compared with the sums that the project knows; files it does not know are flagged in every caption.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval import collect, tidy
from eval import logs as checked
from fp4core import recipe as recipes
from fp4core import records
from fp4core._recipe_published import ENDPOINT_STEP, KNOWN_SUMS, OWN, STUDY, lacking, role_of

SEED = 42
_EXPECTED = "VALIDATION_LEDGER.csv or llama8b_160b_loss_snapshot_20260827.csv"
Row = dict[str, Any]

# the author's names for routes, besides `published_key` of the recipes
NAMES = {
    "mxfp4_rht": "mxfp4_sr_h32",
    "BF16": "bf16",
    "BF16 historical control": "bf16",
    "TE-native NVFP4": "te_nvfp4",
    "TE-native NVFP4 full body": "te_nvfp4",
    "TE F0L4": "te_nvfp4_bf16x4",
    "TE NVFP4 F0L4": "te_nvfp4_bf16x4",
    "pure v5": "nvfp4_global",
    "Pure v5": "nvfp4_global",
    "MXFP4-v4 + row-SR": "mxfp4_sr",
    "MXFP4-v4 + row-SR + fixed H32": "mxfp4_sr_h32",
    "MXFP4 + fixed signed H32 column RHT": "mxfp4_sr_h32",
    "MXFP4 + fixed-sign column RHT": "mxfp4_sr_h32",
    "pure MXFP4 + signed H32": "mxfp4_sr_h32",
    "localCTA-v4 + row-SR": "nvfp4_cta",
    "localCTA-v4 repaired": "nvfp4_cta",
    "repaired localCTA-v4": "nvfp4_cta",
    "repaired localCTA-v4 + row-SR": "nvfp4_cta",
    "localCTA-v4 + row-SR + fixed H16": "nvfp4_cta_h16",
    "localCTA H16 full-route": "nvfp4_cta_h16",
    "localCTA + fixed signed H16 column RHT": "nvfp4_cta_h16",
    "localCTA/MXFP4 hybrid": "depth_hybrid_27_5",
    "localCTA/MXFP4 27/5 hybrid": "depth_hybrid_27_5",
    "Operand hybrid + plain H16": "operand_hybrid_h16",
    "operand hybrid (H16)": "operand_hybrid_h16",
    "operand H16 hybrid": "operand_hybrid_h16",
    "Operand hybrid + fixed H32": "operand_hybrid_h32",
    "operand H32 hybrid": "operand_hybrid_h32",
}
# column of the downstream ledger -> task, metric, items of the whole set, shots, chance
TASKS = {
    "mmlu_acc": ("mmlu", "acc", 14042, 5, 0.25),
    "hellaswag_acc_norm": ("hellaswag", "acc_norm", 10042, 10, 0.25),
    "winogrande_acc": ("winogrande", "acc", 1267, 5, 0.5),
    "arc_challenge_acc_norm": ("arc_challenge", "acc_norm", 1172, 25, 0.25),
}
DEVICES = {"throughput": "GB200", "production": "B300"}
LOG_INTERVAL = 10


class Reader:
    """One bound directory: its files by role, and the notes that captions and the report must carry."""

    def __init__(self, directory: Path, files: list[str], routes: dict[str, recipes.Recipe]) -> None:
        self.directory = directory
        self.routes = {r.published_key: name for name, r in routes.items() if r.published_key} | NAMES
        self.files: dict[str, list[str]] = {}
        self.unused: list[str] = []
        for name in sorted(files):
            role = role_of(name)
            if role is None:
                self.unused.append(name)
            else:
                self.files.setdefault(role.name, []).append(name)
        self.sha256 = {n: records.sha256_file(directory / n) for part in self.files.values() for n in part}
        self.left_out: dict[str, int] = {}

    def rows(self, role: str, *needed: str) -> list[tuple[str, Row]]:
        """("file, row N", fields as text) of every file of a role. ValueError when a column is absent."""
        found = []
        for name in self.files.get(role, []):
            path = self.directory / name
            try:
                text = path.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: no UTF-8 text ({error.reason}); fetch the file again") from None
            table = csv.DictReader(io.StringIO(text))
            absent = [column for column in needed if column not in (table.fieldnames or [])]
            if absent:
                raise ValueError(
                    f"{path}: no column {absent[0]!r}; got {', '.join(table.fieldnames or ['nothing'])}"
                )
            for number, row in enumerate(table, start=1):
                if None in row or None in row.values():
                    raise ValueError(f"{path}, row {number}: got another number of fields than the header")
                found.append((f"{path}, row {number}", row))
        return found

    def route(self, *names: str) -> str | None:
        """Slug of the first name that is known; None, counted as left out, otherwise."""
        for name in names:
            if name in self.routes:
                return self.routes[name]
        label = " / ".join(names)
        self.left_out[label] = self.left_out.get(label, 0) + 1
        return None

    @property
    def unknown(self) -> list[str]:
        """Files whose SHA-256 is none that the project knows."""
        return [name for name, digest in self.sha256.items() if digest not in KNOWN_SUMS]


def number(where: str, row: Row, column: str) -> str:
    """The text of a finite number, unchanged."""
    try:
        if math.isfinite(float(row[column])):
            return row[column].strip()
    except ValueError:
        pass
    raise ValueError(f"{where}: {column} is {row[column]!r}, needed a number")


def whole(where: str, row: Row, column: str) -> int:
    """A whole number, also where it is written 4718592.0."""
    value = float(number(where, row, column))
    if value != int(value):
        raise ValueError(f"{where}: {column} is {row[column]!r}, needed a whole number")
    return int(value)


def validation(reader: Reader) -> list[Row]:
    rows = []
    columns = ("exact_step", "status", "nll", "sequence_level_standard_error", "scored_sequences")
    for where, row in reader.rows("validation", "semantic_route_key", *columns, "target_tokens"):
        route = reader.route(row["semantic_route_key"])
        if route is None or row["status"] != "complete":
            continue
        rows.append(
            {
                "route": route,
                "seed": SEED,
                "step": whole(where, row, "exact_step"),
                "nll": number(where, row, "nll"),
                "se": number(where, row, "sequence_level_standard_error"),
                "sequences": whole(where, row, "scored_sequences"),
                "tokens": whole(where, row, "target_tokens"),
                "stream_sha256": None,
            }
        )
    return rows


def downstream(reader: Reader) -> list[Row]:
    rows = []
    for where, row in reader.rows("downstream", "semantic_route_key", "exact_step", "status", *TASKS):
        route = reader.route(row["semantic_route_key"])
        if route is None or row["status"] != "complete":
            continue
        for column, (task, metric, items, shots, chance) in TASKS.items():
            value = number(where, row, column)
            right = float(value) * items
            if abs(right - round(right)) > 1e-6:
                raise ValueError(f"{where}: {column} is {value}, no count of right answers out of {items}")
            rows.append(
                {
                    "route": route,
                    "seed": SEED,
                    "step": whole(where, row, "exact_step"),
                    "task": task,
                    "metric": metric,
                    "value": value,
                    "se": None,
                    "n": items,
                    "shots": shots,
                    "truncated": None,
                    "chance": chance,
                }
            )
    return rows


def throughput(reader: Reader) -> list[Row]:
    rows = []
    columns = ("world_size", "local_batch", "gradient_accumulation", "probe_seed", "activation_checkpoint")
    numbers = ("tokens_per_second_per_gpu", "bf16_mfu_percent_2500_tflops_peak", "median_memory_gib")
    for where, row in reader.rows("throughput", "route", "window", *columns, *numbers):
        route = reader.route(row["route"])
        if route is None:
            continue
        window = re.search(r"steps (\d+)-(\d+)", row["window"])
        if not window:
            raise ValueError(f"{where}: window is {row['window']!r}, needed one like 'median steps 40-100'")
        rate, mfu, memory = (number(where, row, column) for column in numbers)
        rows.append(
            {
                "route": route,
                "seed": whole(where, row, "probe_seed"),
                "geometry": "selected",
                "tokens_per_s": rate,
                "p10": None,
                "p90": None,
                "mfu": mfu,
                "memory_gib": memory,
                "device": DEVICES["throughput"],
                "world_size": whole(where, row, "world_size"),
                "local_batch": whole(where, row, "local_batch"),
                "accumulation": whole(where, row, "gradient_accumulation"),
                "activation_checkpoint": row["activation_checkpoint"],
                "window_first": int(window[1]),
                "window_last": int(window[2]),
            }
        )
    return rows


def production(reader: Reader) -> list[Row]:
    """Rates inside the long runs; the memory is the upper end of the range that was logged."""
    rows = []
    columns = ("tokens_per_second_per_gpu", "mfu_percent", "terminal_logged_memory_range_gib")
    for where, row in reader.rows("production", "route", "window", *columns):
        route = reader.route(row["route"])
        if route is None:
            continue
        last = re.search(r"step (\d+)", row["window"])
        memory = re.fullmatch(r"([\d.]+)-([\d.]+)", row[columns[2]].strip())
        if not last or not memory:
            wrong = "window" if not last else columns[2]
            raise ValueError(f"{where}: {wrong} is {row[wrong]!r}, needed a step and a range of GiB")
        points = re.search(r"final (\d+) logged points", row["window"])
        first = int(last[1]) - LOG_INTERVAL * (int(points[1]) - 1 if points else 0)
        rows.append(
            {
                "route": route,
                "seed": SEED,
                "window_first": first,
                "window_last": int(last[1]),
                "tokens_per_s": number(where, row, columns[0]),
                "mfu": number(where, row, columns[1]),
                "memory_gib": memory[2],
            }
        )
    return rows


def losses(reader: Reader) -> list[Row]:
    """Observed rows of the loss histories. The same step twice must be the same loss."""
    found: dict[tuple[str, int], tuple[str, Row]] = {}
    columns = ("lineage", "display_name", "step", "loss", "grad_norm", "lr", "n_tokens_seen", "tps_per_gpu")
    for where, row in reader.rows("history", *columns, "is_interpolated"):
        if row["is_interpolated"].strip().lower() not in ("false", "0"):
            reader.left_out["interpolated rows"] = reader.left_out.get("interpolated rows", 0) + 1
            continue
        route = reader.route(row["lineage"], row["display_name"])
        if route is None:
            continue
        step = whole(where, row, "step")
        entry = {
            "route": route,
            "seed": SEED,
            "step": step,
            "loss": float(number(where, row, "loss")),
            "grad_norm": _optional(where, row, "grad_norm"),
            "lr": _optional(where, row, "lr"),
            "tokens": int(tokens) if (tokens := _optional(where, row, "n_tokens_seen")) else None,
            "tokens_per_s": _optional(where, row, "tps_per_gpu"),
        }
        first = found.setdefault((route, step), (where, entry))
        if first[1]["loss"] != entry["loss"]:
            raise ValueError(
                f"{where}: {route} step {step} has loss {entry['loss']}, but {first[0]} says "
                f"{first[1]['loss']}; bind one file per lineage"
            )
    return [entry for _, (_, entry) in sorted(found.items())]


def _optional(where: str, row: Row, column: str) -> float | None:
    return float(number(where, row, column)) if row[column].strip() else None


def endpoint(reader: Reader, history: list[Row]) -> list[Row]:
    """Raw losses at the endpoint step: of a file of endpoints, else of the histories."""
    rows = {r["route"]: r["loss"] for r in history if r["step"] == ENDPOINT_STEP}
    for where, row in reader.rows("endpoint", "route", "step", "loss"):
        route = reader.route(row["route"])
        if route is not None and whole(where, row, "step") == ENDPOINT_STEP:
            rows[route] = number(where, row, "loss")
    return [{"route": r, "seed": SEED, "step": ENDPOINT_STEP, "loss": loss} for r, loss in rows.items()]


def output_head(reader: Reader) -> list[Row]:
    variants = {("BF16", "BF16"): "bf16", ("lowp", "BF16"): "lowp", ("lowp", "MXFP8"): "lowp_mxfp8_wgrad"}
    rows = []
    columns = ("forward", "hidden_gradient", "weight_gradient", "tokens_per_second_per_gpu")
    for where, row in reader.rows("output_head", *columns):
        variant = variants.get((row["forward"], row["weight_gradient"]))
        if variant is None:
            raise ValueError(f"{where}: no variant {row['forward']}/{row['weight_gradient']} is known")
        measured = {"tokens_per_s": number(where, row, columns[3])}
        absent = dict.fromkeys(("final_loss", "loss_difference", "grad_relative_difference"))
        rows.append({"variant": variant, **{c: row[c] for c in columns[:3]}, **measured, **absent})
    return rows


READERS: dict[str, Callable[[Reader], list[Row]]] = {
    "validation": validation,
    "downstream": downstream,
    "throughput": throughput,
    "production": production,
    "output_head": output_head,
}


def build(reader: Reader, logs: checked.Logs) -> dict[str, bytes]:
    """File name -> bytes of every tidy table that the bound files allow."""
    tables = {name: make(reader) for name, make in READERS.items()}
    tables["losses"] = losses(reader)
    tables["endpoint"] = endpoint(reader, tables["losses"])
    place = list(logs.recipes)
    for rows in tables.values():
        rows.sort(key=lambda row: place.index(row["route"]) if "route" in row else 0)
    tables = {name: rows for name, rows in tables.items() if rows}
    own = {"routes": tidy.routes, "operands": tidy.operands, "formats": tidy.format_rows}
    tables |= {name: make(logs) for name, make in own.items()}
    tables["training"] = tidy.training(logs, logs.study)
    tables["meta"] = [{"key": k, "value": v} for k, v in meta(reader, logs, set(tables)).items()]
    return collect.encode(tables)


def meta(reader: Reader, logs: checked.Logs, given: set[str]) -> dict[str, str]:
    """Rows of meta.csv: what was bound, what is known of it, and what is missing for the rest."""
    train = logs.study.train
    devices = [f"32 {DEVICES[role]}" for role in DEVICES if role in reader.files]
    known = [name for name in reader.sha256 if name not in reader.unknown]
    tokens = train.steps * train.global_batch * train.sequence
    scale = f"Llama-3.1 8B, {tokens / 1e9:.0f}B tokens, sequences of {train.sequence:,}"
    trust = [f"SHA-256 known: {', '.join(known)}"] if known else []
    if reader.unknown:
        trust.append(f"SHA-256 NOT among those the project knows: {', '.join(reader.unknown)}")
    facts = {
        "study": STUDY,
        "description": "the author's own logs, drawn by this project (arXiv 2610.00053, CC BY 4.0)",
        "device": ", ".join(devices) or "not stated in these files",
        "device_kind": "cuda",
        "seeds": str(SEED),
        "scale": scale,
        "tokens": str(tokens),
        "setting": f"Measured: the author's own logs ({scale}; {'; '.join(trust) or 'no file'}).",
    }
    facts |= {f"sha256 {name}": digest for name, digest in reader.sha256.items()}
    if reader.unknown:
        facts["note_unknown"] = (
            f"These files are not, or no longer, what their author published: {', '.join(reader.unknown)}."
        )
    if reader.left_out:
        left = ", ".join(f"{name} ({count})" for name, count in sorted(reader.left_out.items()))
        facts["note_left_out"] = f"Rows that were left out: {left}."
    missing = lacking(given | set(OWN))
    if missing:
        reasons: dict[str, list[str]] = {}
        for name, why in missing.items():
            reasons.setdefault(why.partition(": ")[2], []).append(name.split("_")[0])
        facts["note_missing"] = "Not drawn: " + "; ".join(f"{', '.join(v)} ({k})" for k, v in reasons.items())
    return facts


def main(arguments: list[str]) -> None:
    """python -m eval published --published DIR --out DIR"""
    parser = argparse.ArgumentParser(prog="python -m eval published", description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--published", type=Path, help="directory with any of the author's files")
    source.add_argument("--inputs", type=Path, help="bindings of local files; kind published is verified")
    parser.add_argument("--out", required=True, type=Path, help="directory of the tidy tables")
    parser.add_argument("--recipes", type=Path, help="folder with routes/ and studies/ (default: recipes)")
    parsed = parser.parse_args(arguments)
    if parsed.inputs:
        bound = recipes.verify_binding("published", parsed.inputs)
        directory, files = bound.directory, list(bound.sha256)
    else:
        directory = parsed.published
        if not directory.is_dir():
            raise ValueError(f"{directory}: no such directory; needed one with any of the author's files")
        files = [path.name for path in directory.glob("*.csv")]
    study = recipes.load_study("report", parsed.recipes)
    routes = {k: r for k, r in recipes.study_routes(study, parsed.recipes).items() if r.in_report}
    reader = Reader(directory, files, routes)
    if not reader.files:
        raise ValueError(
            f"{directory}: none of the author's files is here (see `python -m eval published -h`)"
        )
    head = recipes.load_recipe(study.output_head.route, parsed.recipes)
    written = build(reader, checked.Logs(directory, study, routes, head))
    collect.write(written, parsed.out)
    for name, digest in reader.sha256.items():
        print(f"published: {name}: {'known' if digest in KNOWN_SUMS else 'UNKNOWN'} SHA-256 {digest}")
    for name in reader.unused:
        print(f"published: {name}: not used")
    given = {Path(name).stem for name in written}
    for name, why in lacking(given).items():
        print(f"published: not drawn: {name} {why}")
    print(f"published: {len(written)} tables in {parsed.out}", flush=True)
