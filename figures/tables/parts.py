"""Tables 10 and 11: the output-head screen and the boundary budget."""

from __future__ import annotations

from figures import captions, published
from figures.data import Tidy
from figures.numbers import decimals_for
from figures.tables.model import Column, Table
from figures.tables.speed import CPU_NOTE, minus

STAGES = ("reduce", "quantise", "layout", "gemm")
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
            captions.first_seed(tidy),
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
                    csv_only=schedule == "fused" and fused_missing,
                )
                for schedule in ("serial", "fused")
                for part in (*STAGES, "total")
            ],
            Column("saved", "Saved %", decimals=1, signed=True, best="max", csv_only=fused_missing),
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
