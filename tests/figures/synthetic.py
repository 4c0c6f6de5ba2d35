"""A synthetic tidy directory: made-up numbers of the right shape, for tests of the drawing code only.

Nothing here is a result. ``write(directory)`` fills every tidy table of ``schemas/tidy`` for the routes of
the ledger.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

ROUTES = [
    ("bf16", "BF16", "bf16", True),
    ("te_nvfp4", "TE NVFP4, all blocks", "te_native", True),
    ("te_nvfp4_bf16x4", "TE NVFP4, four final BF16 blocks", "te_fol4", True),
    ("nvfp4_global", "Global NVFP4", "pure_v5", True),
    ("mxfp4_sr", "MXFP4 + row SR", "mxfp4", True),
    ("mxfp4_sr_h32", "MXFP4 + row SR + fixed H32", "mxfp4_h32", True),
    ("nvfp4_cta", "CTA-local NVFP4", "localcta", True),
    ("nvfp4_cta_h16", "CTA-local NVFP4 + fixed H16", "localcta_h16", True),
    ("depth_hybrid_27_5", "Depth hybrid 27/5, CTA-local and MXFP4", "localcta_mxfp4_hybrid", True),
    ("operand_hybrid_h16", "Operand hybrid + plain H16", "operand_h16", True),
    ("operand_hybrid_h32", "Operand hybrid + fixed H32", "operand_h32", True),
    ("depth_hybrid_global_27_5", "Depth hybrid 27/5, global NVFP4 and MXFP4", None, False),
]
EXCESS = [0.0, 1.3, 0.9, 2.7, 6.5, 2.1, 2.2, 2.9, 4.7, 4.1, 4.0, 9.0]
RATE = [18.8, 27.6, 27.1, 32.5, 37.9, 37.2, 33.2, 31.9, 33.1, 34.8, 35.1, 33.0]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def write(
    directory: Path,
    *,
    seeds: tuple[int, ...] = (1,),
    steps: int = 400,
    routes: tuple[str, ...] | None = None,
    device_kind: str = "cpu",
    blocks: int = 6,
    components: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down"),
    diverged: bool = True,
) -> Path:
    """Write all tidy tables below ``directory`` and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    chosen = [(i, *r) for i, r in enumerate(ROUTES) if routes is None or r[0] in routes]
    rng = np.random.default_rng(7)
    log = list(range(5, steps + 1, 5))
    cuts = [round(steps * f) for f in (0.1, 0.3, 0.5, 0.75, 1.0)]
    gpu = device_kind == "cuda"
    tables: dict[str, pd.DataFrame] = {}
    tables["meta"] = frame(
        [
            ("study", "synthetic"),
            ("description", "Made-up numbers for tests"),
            ("device", "Imaginary GPU" if gpu else "Imaginary CPU"),
            ("device_kind", device_kind),
            ("backend", "carrier" if gpu else "reference"),
            ("seeds", " ".join(map(str, seeds))),
            ("scale", "0.4M parameters, 0.3M tokens, sequence 128"),
            ("tokens", "327680"),
            ("date", "2026-01-02T03:04:05Z"),
            ("commit", "0123456789ab"),
            ("study_settings", '{"study":"synthetic"}'),
            ("data_sha256", "ab" * 32),
            ("validation_stream_sha256", "cd" * 32),
            ("version_torch", "2.13.0"),
            ("note_downstream", "Samples of the benchmarks: scores are not comparable with whole sets."),
        ],
        "key value",
    )
    tables["routes"] = frame(
        [
            (s, l, i, k, r, "te" if s.startswith("te_") else "fp4core", f"{i:012x}")
            for i, s, l, k, r in chosen
        ],
        "route label order published_key in_report implementation recipe_hash",
    )
    tables["operands"] = frame(
        [row for _, slug, *_ in chosen for row in operands(slug, blocks)],
        "route first_block last_block depth contraction operand format rounding hadamard",
    )
    tables["formats"] = frame(
        [
            (
                "mxfp4",
                "e2m1",
                1,
                32,
                "e8m0",
                "constant",
                "byte 127 + ceil(log2 amax); q = E2M1(6x / s)",
                "encode",
                "report 2.2.1",
            ),
            (
                "mxfp4_w2d",
                "e2m1",
                32,
                32,
                "e8m0",
                "constant",
                "as mxfp4, s/2 when amax < 0.87 s",
                "encode",
                "report 2.2.1",
            ),
            (
                "nvfp4",
                "e2m1",
                1,
                16,
                "e4m3",
                "tensor",
                "S = 2688/amax; M = E4M3(6/(amax_b S))",
                "encode",
                "report 2.2.2",
            ),
            (
                "nvfp4_cta",
                "e2m1",
                1,
                16,
                "e4m3",
                "stripe",
                "S = 448/amax_c per chunk",
                "encode",
                "report 2.2.2",
            ),
        ],
        "format element block_rows block_cols block_scale outer_scale rule direction source",
    )
    tables["training"] = frame(
        [
            ("blocks", str(blocks), "32"),
            ("hidden", "64", "4096"),
            ("sequence", "128", "8192"),
            ("steps", str(steps), "38147"),
            ("optimizer", "AdamW", "fused AdamW"),
        ],
        "key value report_value",
    )
    runs, losses, endpoint, validation, sequences, throughput, production = [], [], [], [], [], [], []
    base = np.array([2.2 + 3.0 * np.exp(-s / (0.15 * steps)) for s in log])
    stream = rng.normal(0, 0.25, 64)
    for i, slug, *_ in chosen:
        for seed in seeds:
            bad = diverged and slug == "depth_hybrid_global_27_5"
            noise = np.random.default_rng([i, seed])
            shape = 1 - np.exp(-np.array(log) / (0.3 * steps))
            curve = base * (1 + 0.01 * EXCESS[i] * shape) + noise.normal(0, 0.012, len(log)) + 0.003 * seed
            if bad:
                curve = np.where(
                    np.array(log) > 0.4 * steps, curve + 0.02 * (np.array(log) - 0.4 * steps), curve
                )
                curve[np.array(log) > 0.7 * steps] = np.nan
            runs.append(
                (
                    slug,
                    seed,
                    "diverged" if bad else "complete",
                    steps,
                    steps * 1024,
                    f"{i:012x}",
                    "Imaginary",
                    "reference",
                    "0123456789ab",
                    "2026-01-02T00:00:00Z",
                    12.5,
                )
            )
            losses += [(slug, seed, s, v, 1.0, 1e-3, s * 1024, 1e3 * RATE[i]) for s, v in zip(log, curve)]
            endpoint.append((slug, seed, log[-1], np.nan if bad else curve[-1]))
            for cut in cuts:
                level = np.interp(cut, log, base) * (
                    1 + 0.008 * EXCESS[i] * (1 - np.exp(-cut / (0.3 * steps)))
                )
                values = level + stream + noise.normal(0, 0.02, 64) + 0.002 * seed
                if bad and cut > 0.5 * steps:
                    continue
                validation.append(
                    (slug, seed, cut, values.mean(), values.std(ddof=1) / 8, 64, 8192, "ab" * 32)
                )
                sequences += [(slug, seed, cut, j, v) for j, v in enumerate(values)]
            for geometry, factor in (("selected", 1.0), ("matched", 0.93)):
                rate = 1000 * RATE[i] * factor * (1 + 0.002 * seed)
                mfu = 57_914_449_920 * rate / 989e12 * 100 if gpu else None
                throughput.append(
                    (
                        slug,
                        seed,
                        geometry,
                        rate,
                        0.97 * rate,
                        1.02 * rate,
                        mfu,
                        101.3 if gpu else 0.8,
                        "Imaginary",
                        1,
                        2,
                        8,
                        "none",
                        40,
                        100,
                    )
                )
            production.append((slug, seed, steps // 2, steps, 1000 * RATE[i] * 0.98, None, 0.9))
    tables["runs"] = frame(
        runs, "route seed status steps tokens recipe_hash device backend commit started_utc wall_s"
    )
    tables["losses"] = frame(losses, "route seed step loss grad_norm lr tokens tokens_per_s")
    tables["endpoint"] = frame(endpoint, "route seed step loss")
    tables["validation"] = frame(validation, "route seed step nll se sequences tokens stream_sha256")
    tables["validation_sequences"] = frame(sequences, "route seed step sequence nll")
    tables["throughput"] = frame(
        throughput,
        "route seed geometry tokens_per_s p10 p90 mfu memory_gib device world_size local_batch accumulation "
        "activation_checkpoint window_first window_last",
    )
    tables["production"] = frame(
        production, "route seed window_first window_last tokens_per_s mfu memory_gib"
    )
    tables["downstream"], tables["downstream_items"] = downstream(chosen, seeds, steps)
    tables["dgrad"] = dgrad(seeds, blocks, components)
    tables["output_head"] = frame(
        [
            ("bf16", "bf16", "bf16", "bf16", 34100.0, 3.21, 0.0, 0.0),
            ("lowp", "mxfp8", "bf16", "bf16", 33900.0, 3.22, 0.01, 0.0),
            ("lowp_mxfp8_wgrad", "mxfp8", "bf16", "mxfp8", 33800.0, 3.23, 0.02, 0.031),
        ],
        "variant forward hidden_gradient weight_gradient tokens_per_s final_loss loss_difference "
        "grad_relative_difference",
    )
    tables["boundary"] = boundary(chosen)
    tables["scale_rounding"] = scale_rounding()
    tables["scaling_domains"] = scaling_domains()
    tables["weight_2d"] = weight_2d()
    tables["execution_routes"] = execution_routes()
    for name, table in tables.items():
        parquet = name in ("losses", "validation_sequences", "downstream_items")
        path = directory / f"{name}.{'parquet' if parquet else 'csv'}"
        table.to_parquet(path) if parquet else table.to_csv(path, index=False)
    return directory


def frame(rows: list[tuple], columns: str) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=columns.split())


def operands(slug: str, depth: int) -> list[tuple]:
    """Rows of operands.csv for a route of the ledger."""
    fmt = {"te": "nvfp4_te", "nv": "nvfp4", "mx": "mxfp4", "cta": "nvfp4_cta"}
    tail = max(1, round(depth * 5 / 32))
    groups = {
        "bf16": [(1, depth, None, None, None, "none")],
        "te_nvfp4": [(1, depth, "te", "te", "te", "fixed16")],
        "te_nvfp4_bf16x4": [
            (1, depth - tail, "te", "te", "te", "fixed16"),
            (depth - tail + 1, depth, None, None, None, "none"),
        ],
        "nvfp4_global": [(1, depth, "nv", "nv", "nv", "none")],
        "mxfp4_sr": [(1, depth, "mx", "mx", "mx", "none")],
        "mxfp4_sr_h32": [(1, depth, "mx", "mx", "mx", "fixed32")],
        "nvfp4_cta": [(1, depth, "cta", "cta", "cta", "none")],
        "nvfp4_cta_h16": [(1, depth, "cta", "cta", "cta", "fixed16")],
        "depth_hybrid_27_5": [
            (1, depth - tail, "cta", "cta", "cta", "none"),
            (depth - tail + 1, depth, "mx", "mx", "mx", "none"),
        ],
        "operand_hybrid_h16": [(1, depth, "mx", "cta", "mx", "plain16")],
        "operand_hybrid_h32": [(1, depth, "mx", "cta", "mx", "fixed32")],
        "depth_hybrid_global_27_5": [
            (1, depth - tail, "nv", "nv", "nv", "none"),
            (depth - tail + 1, depth, "mx", "mx", "mx", "none"),
        ],
    }[slug]
    rows = []
    for first, last, forward, data, weight, hadamard in groups:
        both = "stochastic" if forward == "te" else "nearest"

        def name(key, two_d=False):
            return "bf16" if key is None else fmt[key] + ("_w2d" if two_d else "")

        rows += [
            (slug, first, last, depth, "fprop", "x", name(forward), "nearest", "none"),
            (slug, first, last, depth, "fprop", "w", name(forward, True), "nearest", "none"),
            (
                slug,
                first,
                last,
                depth,
                "dgrad",
                "dy",
                name(data),
                "stochastic" if data else "nearest",
                "none",
            ),
            (slug, first, last, depth, "dgrad", "w", name(data, True), "nearest", "none"),
            (slug, first, last, depth, "wgrad", "dy", name(weight), both, hadamard),
            (slug, first, last, depth, "wgrad", "x", name(weight), "nearest", hadamard),
        ]
    return rows


def downstream(chosen, seeds, steps) -> tuple[pd.DataFrame, pd.DataFrame]:
    tasks = [
        ("mmlu", ("acc",), 0.25, 57, 0.26),
        ("hellaswag", ("acc", "acc_norm"), 0.25, 48, 0.33),
        ("winogrande", ("acc",), 0.5, 48, 0.52),
        ("arc_challenge", ("acc", "acc_norm"), 0.25, 48, 0.28),
    ]
    scores, items = [], []
    for task, metrics, chance, n, level in tasks:
        for metric in metrics:
            for i, slug, *_ in chosen:
                for seed in seeds:
                    ability = np.random.default_rng(len(task)).random(n)
                    jitter = np.random.default_rng([i, seed, len(task)]).random(n)
                    correct = ((0.8 * ability + 0.2 * jitter) < level).astype(int)
                    value = correct.mean()
                    scores.append(
                        (
                            slug,
                            seed,
                            steps,
                            task,
                            metric,
                            value,
                            np.sqrt(value * (1 - value) / (n - 1)),
                            n,
                            0,
                            0,
                            chance,
                        )
                    )
                    items += [
                        (slug, seed, task, f"{task}-{j}", metric, int(c)) for j, c in enumerate(correct)
                    ]
    return (
        frame(scores, "route seed step task metric value se n shots truncated chance"),
        frame(items, "route seed task item metric correct"),
    )


def dgrad(seeds, blocks, components) -> pd.DataFrame:
    rng, rows = np.random.default_rng(3), []
    for seed in seeds:
        for layer in range(1, blocks + 1):
            for c, component in enumerate(components):
                for batch in range(3):
                    cta = 0.010 + 0.001 * c + rng.normal(0, 2e-4)
                    ratio = 1.29 + 0.06 * np.sin(layer + c) + rng.normal(0, 0.02)
                    rows.append((seed, layer, component, batch, cta * ratio, cta, ratio))
    return frame(rows, "seed layer component batch error_mxfp4 error_nvfp4_cta ratio")


def boundary(chosen) -> pd.DataFrame:
    rows = []
    for i, slug, *_ in chosen:
        names = ("norm_qkv", "attention_output", "norm_gate_up", "silu_down")
        for b, name in enumerate(f"{n}_{d}" for d in ("forward", "backward") for n in names):
            gemm = 1.2 + 0.3 * b
            serial = {"reduce": 0.10 + 0.01 * i, "quantise": 0.35, "layout": 0.2, "gemm": gemm}
            fused = {"reduce": 0.02, "quantise": 0.28, "gemm": gemm}
            if slug == "bf16":
                serial, fused = {"reduce": 0.1, "gemm": 2 * gemm}, {"reduce": 0.1, "gemm": 2 * gemm}
            for schedule, parts in (("serial", serial), ("fused", fused)):
                rows += [
                    (slug, name, stage, schedule, ms, "Imaginary", "reference", 4096)
                    for stage, ms in parts.items()
                ]
    return frame(rows, "route boundary stage schedule milliseconds device backend tokens")


def scale_rounding() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    block = np.append(rng.normal(size=31) * 0.4, 1.0)
    block[:31] = np.clip(block[:31], -0.99, 0.99)
    rules = {
        "mxfp4": lambda a: 2 ** np.ceil(np.log2(a)) / 6,
        "mxfp4_w2d": lambda a: (
            2 ** np.ceil(np.log2(a)) / 6 * (0.5 if a < 0.87 * 2 ** np.ceil(np.log2(a)) else 1.0)
        ),
        "mxfp4_decode": lambda a: 2 ** np.floor(np.log2(a)) / 6,
        "mxfp4_ocp": lambda a: 2 ** (np.floor(np.log2(a)) - 2),
        "mxfp4_rceil": lambda a: 2 ** np.ceil(np.log2(a / 6)),
        "mxfp4_even": lambda a: 2 ** (np.floor(np.log2(a / 1.75)) - 1),
    }
    rows = []
    for rule, scale_of in rules.items():
        for amax in np.logspace(-1, 1.5, 241, base=2) * 1.0001:
            scale = float(scale_of(amax))
            x = block * amax
            codes = E2M1[np.abs(np.minimum(np.abs(x) / scale, 6)[:, None] - E2M1[None]).argmin(1)]
            error = (np.sign(x) * codes * scale - x) ** 2
            rows.append((rule, float(amax), scale, float(codes.max()), float(error.mean() / (x**2).mean())))
    return frame(rows, "rule amax scale largest_code mse_relative")


def scaling_domains() -> pd.DataFrame:
    rng, rows, n = np.random.default_rng(5), [], 6
    amax = np.exp(rng.normal(0, 0.8, (n, n)))
    g = amax / 448
    for r in range(n):
        for c in range(n):
            rows.append(("mxfp4", r, c, 1 / 6, amax[r, c], None))
            rows.append(("nvfp4", r, c, amax.max() / 2688, amax[r, c], None))
            stripe = g[2 * (r // 2) : 2 * (r // 2) + 2].max()
            rows.append(("nvfp4_cta", r, c, stripe, amax[r, c], g[r, c]))
            rows.append(("nvfp4_cta_w2d", r, c, g.max(), amax[r, c], g[r, c]))
    return frame(rows, "format row_chunk col_chunk outer_scale amax chunk_factor")


def weight_2d() -> pd.DataFrame:
    rng, n = np.random.default_rng(11), 64
    w = rng.normal(size=(n, n)) * np.exp(rng.normal(0, 0.4, (n, 1)))
    rows = []

    def add(layout, scale):
        codes = np.abs(np.minimum(np.abs(w) / scale, 6)[..., None] - E2M1).argmin(-1)
        value = np.sign(w) * E2M1[codes] * scale
        signed = codes + 8 * (w < 0)
        for r in range(n):
            rows.extend(
                (layout, r, c, int(signed[r, c]), float(scale[r, c]), float(value[r, c])) for c in range(n)
            )

    def tile(a, b):
        peak = np.abs(w).reshape(n // a, a, n // b, b).max((1, 3))
        return np.repeat(np.repeat(2 ** np.ceil(np.log2(peak)) / 6, a, 0), b, 1)

    for view in ("row", "column"):
        add(f"mxfp4_w2d/{view}", tile(32, 32))
        add(f"mxfp4/{view}", tile(1, 32) if view == "row" else tile(32, 1))
    return frame(rows, "layout row col code scale value")


def execution_routes() -> pd.DataFrame:
    seen = {
        "mxfp4": [("block amax", "block"), ("block scale", "block"), ("codes", "block")],
        "mxfp4_w2d": [("block amax", "tile"), ("block scale", "tile"), ("codes", "tile")],
        "nvfp4": [
            ("block amax", "block"),
            ("tensor amax", "tensor"),
            ("outer scale", "tensor"),
            ("block scale", "tensor"),
            ("codes", "tensor"),
        ],
        "nvfp4_cta": [
            ("block amax", "block"),
            ("chunk amax", "chunk"),
            ("codes", "chunk"),
            ("stripe amax", "stripe"),
            ("outer scale", "stripe"),
            ("block scale", "stripe"),
        ],
    }
    rows = [
        (name, order, step, domain, "amax" if order else None, "made up")
        for name, steps in seen.items()
        for order, (step, domain) in enumerate(steps)
    ]
    return frame(rows, "format step_order step domain waits_for detail")
