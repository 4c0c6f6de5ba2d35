"""Tables 06, 09, 10 and 11: rates, memory and time."""

from __future__ import annotations

from figures import analysis, captions, published, stats
from figures.data import REFERENCE, Tidy
from figures.numbers import Value, as_read, decimal
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
    diverged = [slug for slug, state in tidy.status.items() if state == "diverged"]
    for route in tidy.ordered([*frame["route"], *diverged]):
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
                "window": f"{group['window_first'].min()}-{group['window_last'].max()}"
                if len(group)
                else None,
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
            captions.diverged(tidy),
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
