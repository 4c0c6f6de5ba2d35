"""Traces: small tables out of the quantisers that show what the formats are said to do."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from eval import traces
from eval.__main__ import main
from fp4core import formats, records

SCHEMAS = Path(__file__).resolve().parents[2] / "schemas" / "tidy"


@pytest.fixture(scope="module")
def tables():
    return {name: compute() for name, compute in traces.TABLES.items()}


@pytest.mark.parametrize("name", traces.TABLES)
def test_rows_satisfy_their_schema(tables, name):
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    for row in tables[name][:: max(1, len(tables[name]) // 200)]:
        validator.validate(row)
    keys = [tuple(row[column] for column in schema["x-key"]) for row in tables[name]]
    assert len(set(keys)) == len(keys)


def rule(tables, name):
    return [row for row in tables["scale_rounding"] if row["rule"] == name]


def test_every_rule_sees_every_bf16_amax_of_three_octaves(tables):
    grids = [[row["amax"] for row in rule(tables, name)] for name in traces.E8M0_RULES]
    assert all(grid == grids[0] for grid in grids)
    assert (len(grids[0]), grids[0][0], grids[0][-1]) == (384, 1.0, 4 * (1 + 127 / 128))


def test_encode_centric_scale_never_clips_and_wastes_up_to_half(tables):
    """s = 2^ceil(log2 amax): 6 amax / s is in (3, 6], so the largest code is 3 to 6."""
    for row in rule(tables, "mxfp4"):
        assert row["scale"] * 6 >= row["amax"]
        assert row["largest_code"] in (3.0, 4.0, 6.0)


def test_tiles_take_the_finer_scale_below_the_threshold(tables):
    """Same scale as mxfp4 where amax / s >= 0.87, half of it below."""
    for coarse, fine in zip(rule(tables, "mxfp4"), rule(tables, "mxfp4_w2d"), strict=True):
        s = coarse["scale"] * 6
        assert fine["scale"] == pytest.approx(coarse["scale"] / (2 if fine["amax"] < 0.87 * s else 1))
        clipped = max(0, fine["amax"] - 6 * fine["scale"])
        assert clipped <= 0.74 * 6 * fine["scale"] + 1e-6


def test_decode_centric_scale_is_the_finer_of_two(tables):
    for encode, decode in zip(rule(tables, "mxfp4"), rule(tables, "mxfp4_decode"), strict=True):
        power_of_two = encode["amax"] in (1.0, 2.0, 4.0)
        assert encode["scale"] == pytest.approx(decode["scale"] * (1 if power_of_two else 2))


def test_domains_found_by_experiment_are_the_descriptors(tables):
    """codes, block scales and outer scale of each family depend on what section 3 says."""
    found = {name: traces.reach(name) for name in ("mxfp4", "nvfp4", "nvfp4_cta", "nvfp4_cta_w2d", "ue5m3")}
    assert found == {
        "mxfp4": {"codes": "block", "block scale": "block", "outer scale": "none"},
        "nvfp4": {"codes": "tensor", "block scale": "tensor", "outer scale": "tensor"},
        "nvfp4_cta": {"codes": "chunk", "block scale": "stripe", "outer scale": "stripe"},
        "nvfp4_cta_w2d": {"codes": "chunk", "block scale": "tensor", "outer scale": "tensor"},
        "ue5m3": {"codes": "tensor", "block scale": "tensor", "outer scale": "tensor"},
    }


def test_steps_wait_for_a_step_of_their_own_format(tables):
    for name in formats.names():
        rows = [row for row in tables["execution_routes"] if row["format"] == name]
        assert [row["step_order"] for row in rows] == list(range(len(rows)))
        for i, row in enumerate(rows):
            earlier = {other["step"] for other in rows[:i]}
            assert row["waits_for"] is None or row["waits_for"] in earlier


def test_an_outlier_lifts_its_stripe_only_under_cta_scaling(tables):
    outer = {
        (row["format"], row["row_chunk"], row["col_chunk"]): row["outer_scale"]
        for row in tables["scaling_domains"]
    }
    constant = {value for (name, *_), value in outer.items() if name == "mxfp4"}
    assert list(constant) == pytest.approx([1 / 6])
    assert len({value for (name, *_), value in outer.items() if name == "nvfp4"}) == 1
    stripes = [{outer["nvfp4_cta", i, j] for i in (2 * s, 2 * s + 1) for j in range(6)} for s in range(3)]
    assert [len(stripe) for stripe in stripes] == [1, 1, 1]
    assert max(stripes[0]) > 2 * max(stripes[1])


def test_outer_scales_are_the_amax_of_their_domain(tables):
    rows = [row for row in tables["scaling_domains"] if row["format"] == "nvfp4_cta"]
    for s in range(3):
        stripe = [row for row in rows if row["row_chunk"] // 2 == s]
        factor = max(row["chunk_factor"] for row in stripe)
        assert sorted({row["outer_scale"] for row in stripe}) == pytest.approx([factor], rel=1e-6)


@pytest.mark.parametrize("name", traces.WEIGHT_FORMATS)
def test_tiles_agree_in_both_layouts_and_rows_do_not(tables, name):
    sides = [
        [
            (row["code"], row["scale"], row["value"])
            for row in sorted(tables["weight_2d"], key=lambda r: (r["row"], r["col"]))
            if row["layout"] == f"{name}/{side}"
        ]
        for side in ("row", "column")
    ]
    assert (sides[0] == sides[1]) is formats.get(name).two_d


def test_command_writes_tables_and_their_hashes(tmp_path):
    assert main(["traces", "--out", str(tmp_path / "traces"), "--done", str(tmp_path / "done.json")]) == 0
    record = records.read_json(tmp_path / "traces" / "traces.json")
    assert set(record["files"]) == {f"{name}.csv" for name in traces.TABLES}
    for name, expected in record["files"].items():
        assert records.sha256_file(tmp_path / "traces" / name) == expected


def test_values_do_not_depend_on_a_generator():
    first = traces.normal(3, seed=5).tolist()
    assert first == traces.normal(3, seed=5).tolist()
    big = traces.normal(100, 100, seed=6)
    assert abs(big.mean().item()) < 4 / 100  # four standard errors
    assert abs(big.std().item() - 1) < 4 / (2**0.5 * 100)
