"""Recipes: what the shipped routes say, how depth scales them, and what their hash depends on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fp4core import recipe

ROOT = Path(__file__).resolve().parents[2]

# slug -> key in the published ledgers, in table order
ROUTES = {
    "bf16": "bf16",
    "te_nvfp4": "te_native",
    "te_nvfp4_bf16x4": "te_fol4",
    "nvfp4_global": "pure_v5",
    "mxfp4_sr": "mxfp4",
    "mxfp4_sr_h32": "mxfp4_h32",
    "nvfp4_cta": "localcta",
    "nvfp4_cta_h16": "localcta_h16",
    "depth_hybrid_27_5": "localcta_mxfp4_hybrid",
    "operand_hybrid_h16": "operand_h16",
    "operand_hybrid_h32": "operand_h32",
    "depth_hybrid_global_27_5": None,
    "ue5m3": None,
}

# "format[+sr][+hadamard]" of Fprop X, W · Dgrad dY, W · Wgrad dY, X, in the first and in the last block
_MX = "mxfp4 mxfp4_w2d mxfp4+sr mxfp4_w2d mxfp4 mxfp4"
_MX32 = "mxfp4 mxfp4_w2d mxfp4+sr mxfp4_w2d mxfp4+fixed32 mxfp4+fixed32"
_NV = "nvfp4 nvfp4_w2d nvfp4+sr nvfp4_w2d nvfp4 nvfp4"
_CTA = "nvfp4_cta nvfp4_cta_w2d nvfp4_cta+sr nvfp4_cta_w2d nvfp4_cta nvfp4_cta"
_CTA16 = "nvfp4_cta nvfp4_cta_w2d nvfp4_cta+sr nvfp4_cta_w2d nvfp4_cta+fixed16 nvfp4_cta+fixed16"
_TE = "nvfp4_te nvfp4_te_w2d nvfp4_te+sr nvfp4_te_w2d nvfp4_te+sr+fixed16 nvfp4_te+fixed16"
_UE = "ue5m3 ue5m3_w2d ue5m3+sr ue5m3_w2d ue5m3+sr ue5m3"
_BF = "bf16 bf16 bf16 bf16 bf16 bf16"
_OP16 = "mxfp4 mxfp4_w2d nvfp4_cta+sr nvfp4_cta_w2d mxfp4+plain16 mxfp4+plain16"
_OP32 = "mxfp4 mxfp4_w2d nvfp4_cta+sr nvfp4_cta_w2d mxfp4+fixed32 mxfp4+fixed32"
CONTENT = {
    "bf16": (_BF, _BF),
    "te_nvfp4": (_TE, _TE),
    "te_nvfp4_bf16x4": (_TE, _BF),
    "nvfp4_global": (_NV, _NV),
    "mxfp4_sr": (_MX, _MX),
    "mxfp4_sr_h32": (_MX32, _MX32),
    "nvfp4_cta": (_CTA, _CTA),
    "nvfp4_cta_h16": (_CTA16, _CTA16),
    "depth_hybrid_27_5": (_CTA, _MX),
    "operand_hybrid_h16": (_OP16, _OP16),
    "operand_hybrid_h32": (_OP32, _OP32),
    "depth_hybrid_global_27_5": (_NV, _MX),
    "ue5m3": (_UE, _UE),
}


def spell(linear: recipe.LinearRecipe) -> str:
    words = []
    for _, _, operand in recipe.operands(linear):
        sr = "+sr" if operand.rounding == "stochastic" else ""
        hadamard = "" if operand.hadamard == "none" else f"+{operand.hadamard}"
        words.append(operand.format + sr + hadamard)
    return " ".join(words)


def test_shipped_routes_are_the_ledger_in_its_order():
    assert {r: recipe.load_recipe(r).published_key for r in recipe.list_routes()} == ROUTES
    assert recipe.list_routes() == list(ROUTES)
    excluded = [r for r in ROUTES if not recipe.load_recipe(r).in_report]
    assert excluded == ["depth_hybrid_global_27_5", "ue5m3"]
    assert [r for r in ROUTES if recipe.load_recipe(r).implementation == "te"] == [
        "te_nvfp4",
        "te_nvfp4_bf16x4",
    ]


@pytest.mark.parametrize("route", ROUTES)
def test_shipped_route_says_what_the_report_says(route):
    loaded = recipe.load_recipe(route)
    first, last = CONTENT[route]
    assert spell(loaded.for_block(0, 32)) == first
    assert spell(loaded.for_block(31, 32)) == last


@pytest.mark.parametrize(
    ("route", "depth", "tail"),
    [
        ("depth_hybrid_27_5", 32, 5),
        ("depth_hybrid_27_5", 16, 2),
        ("depth_hybrid_27_5", 8, 1),
        ("depth_hybrid_27_5", 4, 1),
        ("depth_hybrid_27_5", 2, 1),
        ("depth_hybrid_27_5", 64, 10),
        ("te_nvfp4_bf16x4", 32, 4),
        ("te_nvfp4_bf16x4", 4, 1),
        ("te_nvfp4_bf16x4", 80, 10),
    ],
)
def test_tail_scales_with_depth_and_keeps_a_block(route, depth, tail):
    loaded = recipe.load_recipe(route)
    first, last = CONTENT[route]
    found = [spell(loaded.for_block(i, depth)) for i in range(depth)]
    assert found == [first] * (depth - tail) + [last] * tail


def test_differing_linears_replace_the_groups_operands_in_their_blocks_only():
    loaded = recipe.load_recipe("ue5m3")
    general, late = loaded.for_block(31, 32, "up"), loaded.for_block(31, 32, "down")
    assert general == loaded.for_block(0, 32, "down") == loaded.for_block(31, 32)
    assert late.wgrad.dy.scale_target == 2048.0
    assert (late.fprop, late.dgrad, late.wgrad.x) == (general.fprop, general.dgrad, general.wgrad.x)


def test_model_too_shallow_for_its_groups_is_refused():
    with pytest.raises(ValueError, match="got a model of 1 blocks, needed at least 2"):
        recipe.load_recipe("depth_hybrid_27_5").for_block(0, 1)
    with pytest.raises(ValueError, match="got block 4, needed 0 to 3"):
        recipe.load_recipe("bf16").for_block(4, 4)


@pytest.mark.parametrize("route", ROUTES)
def test_round_trip_through_plain_data(route):
    loaded = recipe.load_recipe(route)
    plain = json.loads(json.dumps(recipe.to_dict(loaded)))
    assert recipe.from_dict(plain) == loaded
    assert recipe.from_dict(plain).hash == loaded.hash


def _write(folder: Path, route: str, text: str) -> recipe.Recipe:
    path = folder / f"{route}.yaml"
    path.write_text(text, encoding="utf-8")
    return recipe.load_recipe(path)


def _text(route: str) -> str:
    return (ROOT / "recipes" / "routes" / f"{route}.yaml").read_text(encoding="utf-8")


def _reordered(data):
    if isinstance(data, dict):
        return {key: _reordered(data[key]) for key in sorted(data, reverse=True)}
    return [_reordered(item) for item in data] if isinstance(data, list) else data


def test_hash_ignores_comments_order_format_and_words(tmp_path):
    route = "depth_hybrid_27_5"
    before, data = recipe.load_recipe(route).hash, yaml.safe_load(_text(route))
    same = [
        "# a comment\n" + _text(route),
        yaml.safe_dump(_reordered(data), sort_keys=False),
        json.dumps(data, indent=4),
        yaml.safe_dump({**data, "label": "another", "note": "another", "order": 7, "in_report": False}),
    ]
    assert {_write(tmp_path, route, text).hash for text in same} == {before}
    for group in data["groups"]:
        group["fprop"]["x"]["rounding"] = "nearest"  # the default, spelt out
    assert _write(tmp_path, route, yaml.safe_dump(data)).hash == before


def test_hash_ignores_how_equal_blocks_are_grouped(tmp_path):
    data = yaml.safe_load(_text("mxfp4_sr"))
    group = data["groups"][0]
    data["groups"] = [{**group, "layers": [1, 10]}, {**group, "layers": [11, 32]}]
    assert _write(tmp_path, "mxfp4_sr", json.dumps(data)).hash == recipe.load_recipe("mxfp4_sr").hash


def test_hash_sees_interval_target_and_differing_linears(tmp_path):
    text = _text("ue5m3")
    edits = [
        text.replace("amax_interval: 50", "amax_interval: 51"),
        text.replace("amax_interval: 50\n", ""),
        text.replace("2048.0", "1024.0"),
        text.replace(", scale_target: 2048.0", ""),
        text.replace("      down:", "      up:"),
    ]
    hashes = {_write(tmp_path, "ue5m3", edit).hash for edit in edits} | {recipe.load_recipe("ue5m3").hash}
    assert len(hashes) == len(edits) + 1


def test_hash_sees_every_choice(tmp_path):
    route = "depth_hybrid_27_5"
    edits = {
        "format": ("wgrad:\n      dy: {format: mxfp4}", "wgrad:\n      dy: {format: mxfp4_decode}"),
        "rounding": ("{format: mxfp4, rounding: stochastic}", "{format: mxfp4}"),
        "layers": ("[1, 27]", "[1, 26]"),
        "implementation": ("implementation: fp4core", "implementation: te"),
    }
    hashes = {recipe.load_recipe(route).hash}
    for old, new in edits.values():
        text = _text(route)
        assert old in text
        if new == "[1, 26]":
            text = text.replace("[28, 32]", "[27, 32]")
        hashes.add(_write(tmp_path, route, text.replace(old, new)).hash)
    assert len(hashes) == 1 + len(edits)
    assert len({recipe.load_recipe(r).hash for r in ROUTES}) == len(ROUTES)


def test_import_needs_neither_torch_nor_numpy():
    code = (
        "import sys, fp4core.recipe as r; r.study_routes(r.load_study('smoke'));"
        "print(sorted({'torch', 'numpy', 'pandas', 'jsonschema'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_format_names_are_those_of_the_formats_module():
    from fp4core import formats

    assert set(recipe.operand_formats()) == {"bf16", *formats.names()}
    weights = {name for name in formats.names() if formats.get(name).two_d}
    assert weights == {name for name in recipe.operand_formats() if name.endswith("_w2d")}
