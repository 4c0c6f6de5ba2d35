"""The harness of the large runs, on tiny models and gloo: every line of it, none of its numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fp4core.bench import scale, trace
from fp4core.bench.scale_job import Job, Pairs
from fp4core.model.arithmetic import count_parameters

TINY = "device=cpu:size=tiny:sequence=64:blocks=2:compile=false:window=2:accumulation=2"


def test_jobs_run_and_one_that_fails_stops_nothing(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    jobs = ["bf16", "nosuch", "mxfp4_sr:steps=3", "mxfp4_sr:gpus=1:steps=3:profile=true", "bf16:replicas=2"]
    code = scale.main(["--out", str(out), "--steps", "2", "--defaults", TINY, "--jobs", *jobs])
    record = json.loads(out.read_text())
    assert code == 1
    assert [row.get("done", False) for row in record["rows"]] == [True, False, True, True, True]
    assert "unknown" in record["rows"][1]["error"]
    assert [len(row["steps"]) for row in record["rows"] if "steps" in row] == [2, 3, 3, 2]
    assert [entry["job"] for entry in record["summary"]["routes"]] == [record["rows"][2]["title"]]
    assert [entry["gpus"] for entry in record["summary"]["scaling"]] == [2]
    assert record["versions"]["torch"] and record["command"].startswith("python -m fp4core.bench")


def test_no_job_is_begun_without_time(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    assert scale.main(["--out", str(out), "--max-seconds", "0", "--jobs", "bf16"]) == 1
    assert "skipped" in json.loads(out.read_text())["rows"][0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [("bf16:gpu=2", "KEY=VALUE"), ("bf16:gpus", "KEY=VALUE"), ("bf16:gpus=two", "needed int")],
)
def test_wrong_jobs_are_named(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        scale.parse_job(text, {})


def test_the_default_job_is_the_whole_8b() -> None:
    study = Job("bf16").study()
    assert count_parameters(study.model) == 8_030_261_248
    assert study.train.sequence == 8192 and study.train.global_batch == 8


def test_made_up_tokens_are_a_function_of_seed_and_place() -> None:
    stream = Pairs(64, 5000)
    rows = stream.batch(3, 2, seed=5)
    assert rows.shape == (2, 65) and rows.min() >= 0 and rows.max() < 5000
    assert (stream.batch(4, 1, seed=5)[0] == rows[1]).all() and (rows[0] != rows[1]).any()


def test_kinds_of_kernels_and_what_hides_what() -> None:
    def kernel(name: str, start: float, length: float, cat: str = "kernel") -> dict:
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length}

    found = trace.kinds(
        [
            {"ph": "M", "name": "process_name"},
            kernel("cudaLaunchKernel", 0, 9000, "cuda_runtime"),
            kernel("nvjet_qqtst_128x256_128x6_TNT", 1000, 4000),
            kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 3000, 4000),
            kernel("dual_kernel", 8000, 1000),
            kernel("Memcpy DtoD", 9000, 500, "gpu_memcpy"),
            kernel("nvjet_qqtst_128x256_128x6_TNT", 9000, 1000),
        ]
    )
    assert found["span_ms"] == 9 and found["idle_ms"] == 1
    assert found["kinds"] == {
        "products": {"ms": 5.0, "alone_ms": 2.5, "kernels": 2},
        "communication": {"ms": 4.0, "alone_ms": 2.0, "kernels": 1},
        "boundaries": {"ms": 1.0, "alone_ms": 1.0, "kernels": 1},
        "copies": {"ms": 0.5, "alone_ms": 0.0, "kernels": 1},
    }
    assert found["longest"][0] == ["nvjet_qqtst_128x256_128x6_TNT", 5.0, 2]
    assert found["gaps"] == [[1.0, 6.0, "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "dual_kernel"]]
    with pytest.raises(ValueError, match="no GPU activity"):
        trace.kinds([])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::device_kernel<flash::FlashAttnBwdSm90>", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_poi_fused_add_mul_silu_0", "compiled"),
        ("norm_backward_kernel", "boundaries"),
        ("swiglu_backward_kernel", "boundaries"),
        ("rope_joint_kernel", "boundaries"),
        ("void at::native::elementwise_kernel<CUDAFunctor_add>", "other"),
    ],
)
def test_kinds_by_name(name: str, kind: str) -> None:
    assert trace.kind(name) == kind


def test_each_route_is_compared_at_its_own_fastest_geometry_too() -> None:
    def row(job: Job, rate: float | None) -> dict:
        return {"job": dataclasses.asdict(job), "tokens_per_s": rate, "done": bool(rate)}

    one, two = {"accumulation": 8}, {"local_batch": 2, "accumulation": 4}
    rows = [
        row(Job("bf16", **one), 100.0),
        row(Job("bf16", **two), None),  # out of memory
        row(Job("bf16", **two, keep_gathered=False), 90.0),
        row(Job("mxfp4_sr", **one), 140.0),
        row(Job("mxfp4_sr", **two), 150.0),
        row(Job("mxfp4_sr", **two, blocks=20), 990.0),
        row(Job("nvfp4_cta", **one), 95.0),
        row(Job("bf16", **one, exchange=False), 190.0) | {"done": False},  # stopped early
    ]
    found = scale.summary(rows)
    assert {entry["job"]: entry["against_bf16"] for entry in found["routes"]} == {
        Job("mxfp4_sr", **one).title: 1.4,
        Job("nvfp4_cta", **one).title: 0.95,
    }
    assert found["selected"] == [
        {"job": Job("mxfp4_sr", **two).title, "base": Job("bf16", **one).title, "against_bf16": 1.5}
    ]
