"""Tables 06, 09, 10 and 11: rates, memory and time."""

from __future__ import annotations

from figures import analysis, captions, published, stats
from figures.data import REFERENCE, Tidy
from figures.numbers import Value, as_read, decimal, decimals_for
from figures.tables.model import Column, Table

BLANK = "Blank: not measured in this study, or not published."
CPU_NOTE = (
    "On a CPU the FP4 routes are emulated: their rate is the cost of the emulation, not the speed of FP4 "
    "hardware. MFU is blank because no peak is defined."
)
MFU_NOTE = (
    "MFU: F·R/peak with F = 6(N − N_emb) + 12·L·H·d_h·S FLOP per token and the device's dense BF16 peak; "
    "effective BF16 work, not occupancy of FP4 Tensor Cores."
)
STAGES = ("reduce", "quantise", "layout", "gemm")


def minus(measured: Value, other: Value) -> float | None:
    """measured - other as a float; None when either is missing."""
    a, b = decimal(measured), decimal(other)
    return None if a is None or b is None else float(a - b)


def device_notes(tidy: Tidy) -> list[str]:
    return [CPU_NOTE] if tidy.on_cpu else [MFU_NOTE]


def throughput(tidy: Tidy) -> Table:
    """table06: probe medians, ratio to bf16, MFU and memory; measured, published, difference."""
    frame, name = analysis.throughput(tidy), "table06_throughput"
    reference = published.number(name, REFERENCE, "tokens_per_s")
    rows: list[dict[str, object]] = []
    for row in frame.itertuples():
        given = {m: published.text(name, row.route, m) for m in ("tokens_per_s", "mfu", "memory_gib")}
        if row.geometry != "selected":
            given = dict.fromkeys(given)
        rate = decimal(given["tokens_per_s"])
        ratio = float(rate) / reference if rate is not None and reference else None
        rows.append(
            {
                "geometry": f"{row.geometry.capitalize()} batch geometry",
                "route": row.route,
                "label": tidy.label(row.route),
                "seeds": row.seeds,
                "device": row.device,
                "batch": f"{row.world_size}×{row.local_batch}×{row.accumulation}",
                "activation_checkpoint": row.activation_checkpoint,
                "window": f"{row.window_first}-{row.window_last}",
                "tokens_per_s": as_read(row.tokens_per_s),
                "spread": (row.p10, row.p90),
                "seed_interval": (row.low, row.high),
                "ratio": row.ratio,
                "mfu": as_read(row.mfu),
                "memory_gib": as_read(row.memory_gib),
                "published_tokens_per_s": given["tokens_per_s"],
                "published_ratio": ratio,
                "published_mfu": given["mfu"],
                "published_memory_gib": given["memory_gib"],
                "difference_tokens_per_s": minus(row.tokens_per_s, given["tokens_per_s"]),
                "difference_ratio": minus(row.ratio, ratio),
                "difference_mfu": minus(row.mfu, given["mfu"]),
                "difference_memory_gib": minus(row.memory_gib, given["memory_gib"]),
            }
        )
    one_geometry = frame["geometry"].nunique() == 1
    several = len(tidy.seeds) > 1
    windows = sorted({row["window"] for row in rows})
    return Table(
        name=name,
        title="Throughput",
        caption=captions.join(
            f"Tokens/s per device, medians over steps {', '.join(map(str, windows))}, with the 10th and "
            "90th percentile over the window.",
            captions.setting(tidy),
            captions.seeds(tidy),
            captions.published_setting(name),
        ),
        section="geometry",
        columns=[
            Column("geometry", "Geometry", csv_only=one_geometry),
            Column("route", "Slug", csv_only=True),
            Column("label", "Route"),
            Column("seeds", "Seeds", csv_only=True),
            Column("device", "Device", csv_only=True),
            Column("window", "Window", csv_only=True),
            Column("activation_checkpoint", "Activation checkpoint", csv_only=True),
            Column("batch", "Batch"),
            Column("tokens_per_s", "tokens/s", "Measured", 1, best="max"),
            Column("spread", "p10, p90", "Measured", 0, interval=True),
            *([Column("seed_interval", "95% over seeds", "Measured", 1, interval=True)] if several else []),
            Column("ratio", "× BF16", "Measured", 3, best="max"),
            Column("mfu", "MFU %", "Measured", 2, best="max"),
            Column("memory_gib", "GiB", "Measured", 2, best="min"),
            Column("published_tokens_per_s", "tokens/s", "Published", 1, best="max"),
            Column("published_ratio", "× BF16", "Published", 3, best="max"),
            Column("published_mfu", "MFU %", "Published", 2, best="max"),
            Column("published_memory_gib", "GiB", "Published", 2, best="min"),
            Column("difference_tokens_per_s", "tokens/s", "Difference", 1, signed=True),
            Column("difference_ratio", "× BF16", "Difference", 3, signed=True),
            Column("difference_mfu", "MFU", "Difference", 2, signed=True),
            Column("difference_memory_gib", "GiB", "Difference", 2, signed=True),
        ],
        rows=rows,
        notes=[
            "Batch: devices × sequences per device × micro-steps. Difference: measured minus published; "
            "the two columns are comparable only on the same device and at the same scale.",
            *device_notes(tidy),
            BLANK,
        ],
    )


def production(tidy: Tidy) -> Table:
    """table09: steady-state rate inside the long runs."""
    frame, name = tidy.table("production"), "table09_production"
    rows: list[dict[str, object]] = []
    for route in tidy.ordered(frame["route"]):
        group = frame[frame["route"] == route]
        rate = stats.estimate(group["tokens_per_s"])
        given = {
            m: published.text(name, route, m) for m in ("tokens_per_s", "mfu", "memory_gib_range", "window")
        }
        rows.append(
            {
                "route": route,
                "label": tidy.label(route),
                "seeds": len(group),
                "window": f"{group['window_first'].min()}-{group['window_last'].max()}",
                "tokens_per_s": as_read(rate.mean),
                "seed_interval": (rate.low, rate.high),
                "mfu": as_read(group["mfu"].mean()),
                "memory_gib": as_read(group["memory_gib"].mean()),
                "published_tokens_per_s": given["tokens_per_s"],
                "published_mfu": given["mfu"],
                "published_memory_gib": (given["memory_gib_range"] or "").replace("-", "–") or None,
                "published_window": given["window"],
                "difference_tokens_per_s": minus(rate.mean, given["tokens_per_s"]),
                "difference_mfu": minus(float(group["mfu"].mean()), given["mfu"]),
            }
        )
    return Table(
        name=name,
        title="Production rate",
        caption=captions.join(
            "Steady-state rate inside the long training runs, median over the window.",
            captions.setting(tidy),
            captions.seeds(tidy),
            captions.published_setting(name),
        ),
        columns=[
            Column("route", "Slug", csv_only=True),
            Column("label", "Route"),
            Column("seeds", "Seeds", csv_only=True),
            Column("window", "Steps", "Measured"),
            Column("tokens_per_s", "tokens/s", "Measured", 1, best="max"),
            *(
                [Column("seed_interval", "95% over seeds", "Measured", 1, interval=True)]
                if len(tidy.seeds) > 1
                else []
            ),
            Column("mfu", "MFU %", "Measured", 2, best="max"),
            Column("memory_gib", "GiB", "Measured", 2, best="min"),
            Column("published_tokens_per_s", "tokens/s", "Published", 1, best="max"),
            Column("published_mfu", "MFU %", "Published", 2, best="max"),
            Column("published_memory_gib", "GiB", "Published"),
            Column("published_window", "Window", "Published", csv_only=True),
            Column("difference_tokens_per_s", "tokens/s", "Difference", 1, signed=True),
            Column("difference_mfu", "MFU", "Difference", 2, signed=True),
        ],
        rows=rows,
        notes=[
            "The report's three snapshots differ in batch geometry and window; the depth hybrid's was "
            "taken at step 16,300, the others over the final 100 logged points.",
            *device_notes(tidy),
            BLANK,
        ],
    )


VARIANTS = {
    "bf16": "BF16 (control)",
    "lowp": "Low-precision forward",
    "lowp_mxfp8_wgrad": "Low-precision forward, MXFP8 Wgrad",
}


def output_head(tidy: Tidy) -> Table:
    """table10: the output-head screen."""
    frame, name = tidy.table("output_head").set_index("variant"), "table10_output_head"
    control = float(frame["tokens_per_s"].get("bf16", float("nan")))
    rows: list[dict[str, object]] = []
    for variant in [v for v in VARIANTS if v in frame.index]:
        row = frame.loc[variant]
        change = 100 * (float(row["tokens_per_s"]) / control - 1)
        given = {
            m: published.text(name, variant, m) for m in ("tokens_per_s", "difference_percent", "outcome")
        }
        rows.append(
            {
                "variant": variant,
                "label": VARIANTS[variant],
                "forward": row["forward"],
                "hidden_gradient": row["hidden_gradient"],
                "weight_gradient": row["weight_gradient"],
                "tokens_per_s": float(row["tokens_per_s"]),
                "change": None if variant == "bf16" else change,
                "final_loss": float(row["final_loss"]),
                "loss_difference": None if variant == "bf16" else float(row["loss_difference"]),
                "grad_relative_difference": None
                if variant == "bf16"
                else float(row["grad_relative_difference"]),
                "published_tokens_per_s": given["tokens_per_s"],
                "published_change": None if variant == "bf16" else given["difference_percent"],
                "published_outcome": given["outcome"],
                "difference_change": None
                if variant == "bf16"
                else minus(change, given["difference_percent"]),
            }
        )
    gradients = [
        row["grad_relative_difference"] for row in rows if row["grad_relative_difference"] is not None
    ]
    losses = [row["loss_difference"] for row in rows if row["loss_difference"] is not None]
    return Table(
        name=name,
        title="Low-precision output head",
        caption=captions.join(
            "Screen of the output head's formats against the BF16 control, same data and seed.",
            captions.setting(tidy),
            captions.published_setting(name),
        ),
        columns=[
            Column("variant", "Variant", csv_only=True),
            Column("label", "Output head"),
            Column("forward", "Forward"),
            Column("hidden_gradient", "Hidden gradient"),
            Column("weight_gradient", "Weight gradient"),
            Column("tokens_per_s", "tokens/s", "Measured", 1, best="max"),
            Column("change", "% vs BF16", "Measured", 2, signed=True),
            Column("final_loss", "Loss", "Measured", 6, best="min"),
            Column("loss_difference", "Loss vs BF16", "Measured", min(8, decimals_for(losses)), signed=True),
            Column("grad_relative_difference", "Gradient distance", "Measured", decimals_for(gradients)),
            Column("published_tokens_per_s", "tokens/s", "Published", 0, best="max"),
            Column("published_change", "% vs BF16", "Published", 2, signed=True),
            Column("published_outcome", "Outcome", "Published"),
            Column("difference_change", "% points", "Difference", 2, signed=True),
        ],
        rows=rows,
        notes=[
            "Gradient distance: L2 distance of the head's gradients from the control's, over the "
            "control's norm.",
            *([CPU_NOTE] if tidy.on_cpu else []),
            "Blank: the control itself, or not measured.",
        ],
    )


def boundary_budget(tidy: Tidy) -> Table:
    """table11: reduce, quantise, layout and GEMM time of each boundary, serial and fused."""
    frame = tidy.table("boundary")
    cells = frame.groupby(["boundary", "route", "schedule", "stage"])["milliseconds"].mean()
    totals = cells.groupby(["boundary", "route", "schedule"]).sum()
    rows: list[dict[str, object]] = []
    for boundary in dict.fromkeys(frame["boundary"]):
        for route in tidy.ordered(frame.loc[frame["boundary"] == boundary, "route"]):
            row: dict[str, object] = {
                "boundary": boundary.replace("_", " "),
                "route": route,
                "label": tidy.label(route),
            }
            for schedule in ("serial", "fused"):
                for stage in STAGES:
                    row[f"{schedule}_{stage}"] = cells.get((boundary, route, schedule, stage))
                row[f"{schedule}_total"] = totals.get((boundary, route, schedule))
            serial, fused = row["serial_total"], row["fused_total"]
            row["saved"] = 100 * (1 - fused / serial) if serial and fused else None  # type: ignore[operator]
            rows.append(row)
    places = decimals_for([v for v in cells if v > 0], 2, 4)
    tokens = sorted(set(frame["tokens"]))
    devices = ", ".join(f"{d} ({b} backend)" for d, b in sorted(set(zip(frame["device"], frame["backend"]))))
    fused_missing = "fused" not in set(frame["schedule"])
    return Table(
        name="table11_boundary_budget",
        title="Boundary budget",
        caption=captions.join(
            "Milliseconds spent on each part of every producer-consumer boundary, "
            f"{', '.join(f'{t:,}' for t in tokens)} rows, medians on {devices}. Serial: one pass per part. "
            "Fused: one producer pass. The report gives no numbers of this kind.",
        ),
        section="boundary",
        columns=[
            Column("boundary", "Boundary"),
            Column("route", "Slug", csv_only=True),
            Column("label", "Route"),
            *[
                Column(
                    f"{schedule}_{part}",
                    part.upper() if part == "gemm" else part,
                    schedule.capitalize(),
                    places,
                )
                for schedule in ("serial", "fused")
                for part in (*STAGES, "total")
            ],
            Column("saved", "Saved %", decimals=1, signed=True, best="max"),
        ],
        rows=rows,
        notes=[
            *(
                ["No fused schedule was measured: this backend has no fused producers."]
                if fused_missing
                else []
            ),
            "Blank: the route does not have this part, or a fused pass does it together with another part.",
            *([CPU_NOTE.split(" MFU")[0]] if tidy.on_cpu else []),
        ],
    )
