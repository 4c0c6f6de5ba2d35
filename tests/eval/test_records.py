"""Records: whole or absent, never overwritten by another recipe's, and free of places on this machine."""

from __future__ import annotations

import pytest

from fp4core import records


def record(results, name="validation/bf16/s0/step-00000010.json", **fields):
    path = results / name
    records.write_json(path, {"route": "bf16", "seed": 0, "recipe_hash": "aaa", "stage_hash": "bbb"} | fields)
    return path


def test_record_of_the_same_recipe_and_study_stays(tmp_path):
    path = record(tmp_path)
    records.archive_stale(path, tmp_path, recipe_hash="aaa", stage_hash="bbb")
    assert path.is_file()
    assert not (tmp_path / "archive").exists()


@pytest.mark.parametrize("now", [("aaa", "new"), ("new", "bbb")], ids=["other study", "other recipe"])
def test_stale_record_moves_with_what_is_beside_it(tmp_path, now):
    path = record(tmp_path, "downstream/bf16/s0.json")
    items = path.with_name("s0.items.parquet")
    items.write_bytes(b"items")
    records.archive_stale(path, tmp_path, recipe_hash=now[0], stage_hash=now[1], beside=(items,))
    kept = tmp_path / "archive/bf16/s0-aaa-bbb/downstream/bf16"
    assert records.read_json(kept / "s0.json")["recipe_hash"] == "aaa"
    assert (kept / "s0.items.parquet").read_bytes() == b"items"
    assert not path.exists() and not items.exists()


def test_archive_keeps_every_generation(tmp_path):
    for value in range(3):
        path = record(tmp_path, value=value)
        records.archive_stale(path, tmp_path, recipe_hash="new", stage_hash="bbb")
    kept = (tmp_path / "archive/bf16").rglob("step-00000010.json")
    assert sorted(records.read_json(p)["value"] for p in kept) == [0, 1, 2]


def test_directory_outside_the_results_is_archived_by_name(tmp_path):
    path = record(tmp_path / "elsewhere", "exported/gate.json").parent
    records.archive_stale(path, tmp_path / "results", recipe_hash="new", stage_hash="bbb")
    assert (tmp_path / "results/archive/bf16/s0-aaa-bbb/exported/gate.json").is_file()


def test_marker_points_at_its_record_from_where_it_lies(tmp_path):
    path, marker = record(tmp_path), tmp_path / "done/validation/x.json"
    records.write_marker(marker, path, recipe_hash="aaa", stage_hash="bbb")
    content = records.read_json(marker)
    assert (marker.parent / content["record"]).resolve() == path
    assert str(tmp_path) not in marker.read_text()
    assert content["sha256"] == records.sha256_file(path)


def test_interrupted_write_leaves_the_old_bytes(tmp_path):
    path = tmp_path / "x.json"
    records.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.write_json(path, {"a": float("nan")})
    assert records.read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("text", ["{", "[1]", "\udcff"], ids=["cut off", "a list", "no text"])
def test_what_is_no_record_is_named(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"x\.json: "):
        records.read_json(path)


def test_tree_hash_ignores_order_and_sees_names():
    assert records.tree_sha256({"a": "1", "b": "2"}) == records.tree_sha256({"b": "2", "a": "1"})
    assert records.tree_sha256({"a": "1", "b": "2"}) != records.tree_sha256({"a": "2", "b": "1"})
