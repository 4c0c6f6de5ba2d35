"""Every mistake in a YAML file is one line: file, key path, got, allowed or needed, nearest name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp4core import recipe

ROOT = Path(__file__).resolve().parents[2]
ROUTE = (ROOT / "recipes" / "routes" / "depth_hybrid_27_5.yaml").read_text(encoding="utf-8")
STUDY = (ROOT / "recipes" / "studies" / "report.yaml").read_text(encoding="utf-8")

# id -> (old text, new text, key path in the message, the rest of the message)
BAD_ROUTES = {
    "unknown key": ("label:", "lable:", "lable", r"unknown key; allowed: version, route, .*mean 'label'\?"),
    "unknown key in an operand": (
        "{format: nvfp4_cta, rounding:",
        "{format: nvfp4_cta, roundign:",
        "groups[0].dgrad.dy.roundign",
        r"unknown key; allowed: format, rounding, hadamard, scale_target; did you mean 'rounding'\?",
    ),
    "scale target of a format without one": (
        "{format: nvfp4_cta, rounding: stochastic}",
        "{format: nvfp4_cta, rounding: stochastic, scale_target: 2048.0}",
        "groups[0].dgrad.dy.scale_target",
        r"got 2048.0 for nvfp4_cta; allowed for ue5m3, ue5m3_w2d only",
    ),
    "interval without an operand that samples": (
        "order:",
        "amax_interval: 50\norder:",
        "amax_interval",
        r"got 50, but no operand is ue5m3 or ue5m3_w2d",
    ),
    "linear that does not exist": (
        "groups:\n  - layers: [1, 27]\n",
        "groups:\n  - layers: [1, 27]\n    linears: {dwon: {}}\n",
        "groups[0].linears.dwon",
        r"unknown name; allowed: q, k, v, o, gate, up, down; did you mean 'down'\?",
    ),
    "unknown format": (
        "x: {format: nvfp4_cta}\n      w",
        "x: {format: nvfp4_ctl}\n      w",
        "groups[0].fprop.x.format",
        r"got 'nvfp4_ctl'; allowed: bf16, mxfp4, .*; did you mean 'nvfp4_cta'\?",
    ),
    "unknown rounding": (
        "rounding: stochastic",
        "rounding: stochastik",
        "groups[0].dgrad.dy.rounding",
        "mean 'stochastic'",
    ),
    "unknown hadamard": (
        "dy: {format: mxfp4}",
        "dy: {format: mxfp4, hadamard: fixed_32}",
        "groups[1].wgrad.dy.hadamard",
        r"got the string 'fixed_32'; allowed: none, plain16, fixed16, fixed32; did you mean 'fixed32'\?",
    ),
    "missing operand": (
        "    wgrad:\n      dy: {format: mxfp4}\n",
        "    wgrad:\n",
        "groups[1].wgrad.dy",
        "missing; needed a mapping with the keys format, rounding, hadamard",
    ),
    "missing contraction": (
        "    wgrad:\n      dy: {format: mxfp4}\n      x: {format: mxfp4}\n",
        "",
        "groups[1].wgrad",
        "missing; needed a mapping with the keys dy, x",
    ),
    "operand is a word": (
        "x: {format: nvfp4_cta}",
        "x: nvfp4_cta",
        "groups[0].fprop.x",
        "got the string 'nvfp4_cta', needed a mapping",
    ),
    "operand is empty": (
        "x: {format: nvfp4_cta}",
        "x:",
        "groups[0].fprop.x",
        r"got nothing \(null\), needed a mapping",
    ),
    "wrong type": (
        "in_report: true",
        'in_report: "yes"',
        "in_report",
        "got the string 'yes', needed true or false",
    ),
    "bool as a number": (
        "reference_depth: 32",
        "reference_depth: true",
        "reference_depth",
        "got True, needed a whole number",
    ),
    "quoted number": (
        "reference_depth: 32",
        'reference_depth: "32"',
        "reference_depth",
        "remove the quotes: 32",
    ),
    "number as a label": (
        'label: "CTA-local NVFP4/MXFP4 depth hybrid (27/5)"',
        "label: 27",
        "label",
        "got 27, needed text; quote it: '27'",
    ),
    "too many layers": (
        "[1, 27]",
        "[1, 26, 27]",
        "groups[0].layers",
        "needed a list of exactly 2 x a whole number",
    ),
    "layer zero": ("[1, 27]", "[0, 27]", "groups[0].layers[0]", "got 0, needed a whole number >= 1"),
    "reversed layers": ("[28, 32]", "[32, 28]", "groups[1].layers", r"got \[32, 28\], needed first <= last"),
    "overlap": (
        "[28, 32]",
        "[27, 32]",
        "groups[1].layers",
        "overlaps the group before it; needed to start at 28",
    ),
    "gap": (
        "[28, 32]",
        "[30, 32]",
        "groups[1].layers",
        "leaves block 28 without a recipe; needed to start at 28",
    ),
    "starts late": ("[1, 27]", "[2, 27]", "groups[0].layers", "leaves block 1 without a recipe"),
    "ends early": (
        "[28, 32]",
        "[28, 31]",
        "groups[1].layers",
        "got last block 31, needed 32: blocks 32-32 have no recipe",
    ),
    "ends late": (
        "[28, 32]",
        "[28, 33]",
        "groups[1].layers",
        "got last block 33, needed 32: that is past reference_depth",
    ),
    "stochastic x": (
        "x: {format: nvfp4_cta}",
        "x: {format: nvfp4_cta, rounding: stochastic}",
        "groups[0].fprop.x.rounding",
        r"got stochastic; allowed: nearest \(stochastic is for dy only\)",
    ),
    "stochastic w": (
        "w: {format: mxfp4_w2d}",
        "w: {format: mxfp4_w2d, rounding: stochastic}",
        "groups[1].fprop.w.rounding",
        "for dy only",
    ),
    "stochastic bf16": (
        "{format: mxfp4, rounding",
        "{format: bf16, rounding",
        "groups[1].dgrad.dy.rounding",
        "got stochastic for bf16",
    ),
    "unpaired hadamard": (
        "dy: {format: mxfp4}",
        "dy: {format: mxfp4, hadamard: fixed32}",
        "groups[1].wgrad",
        "got hadamard fixed32 for dy and none for x, needed the same for both",
    ),
    "hadamard outside wgrad": (
        "x: {format: nvfp4_cta}",
        "x: {format: nvfp4_cta, hadamard: fixed16}",
        "groups[0].fprop.x.hadamard",
        r"got fixed16 in fprop; allowed: none \(only wgrad contracts over tokens\)",
    ),
    "weight format on x": (
        "x: {format: mxfp4}",
        "x: {format: mxfp4_w2d}",
        "groups[1].fprop.x.format",
        "a weight format, for x; needed e.g. mxfp4",
    ),
    "no groups": (
        ROUTE[ROUTE.index("groups:") : ROUTE.index("note:")],
        "groups: []\n",
        "groups",
        "got an empty list",
    ),
    "another version": ("version: 1", "version: 2", "version", "got 2; allowed: 1"),
    "slug with a dash": (
        "route: depth_hybrid_27_5",
        "route: depth-hybrid",
        "route",
        "needed text that matches",
    ),
    "not the file's name": (
        "route: depth_hybrid_27_5",
        "route: depth_hybrid",
        "route",
        "needed 'depth_hybrid_27_5', the name of the file",
    ),
    "key twice": (
        "in_report: true",
        "in_report: true\nin_report: false",
        "line 6",
        r"key 'in_report' is given twice \(first in line 5\)",
    ),
    "no YAML": ("in_report: true", "in_report: [true", "line 6", "not valid YAML"),
}

BAD_STUDIES = {
    "1e-3 is text": (
        "lr: 3.0e-4",
        "lr: 1e-3",
        "train.lr",
        r"got the string '1e-3', needed a number > 0; YAML reads 1e-3 as text: write 1.0e-3",
    ),
    "1e3 is text": ("lr: 3.0e-4", "lr: 1e3", "train.lr", r"write 1\.0e\+3"),
    "1.5e3 is text": ("clip: 1.0", "clip: 1.5e3", "train.clip", r"write 1\.5e\+3"),
    "number is a word": ("lr: 3.0e-4", "lr: fast", "train.lr", r"got the string 'fast', needed a number > 0"),
    "not finite": ("lr: 3.0e-4", "lr: .nan", "train.lr", "got nan, needed a number > 0"),
    "float for a count": (
        "steps: 38147",
        "steps: 38147.0",
        "train.steps",
        r"got 38147\.0, needed a whole number >= 1",
    ),
    "unknown section": ("boundary:", "boundry:", "boundry", r"unknown key; .* did you mean 'boundary'\?"),
    "unknown nested key": ("warmup: 2000", "warm_up: 2000", "train.warm_up", r"did you mean 'warmup'\?"),
    "unknown benchmark": (
        "hellaswag:",
        "helaswag:",
        "downstream.tasks.helaswag",
        r"unknown name; .* did you mean 'hellaswag'\?",
    ),
    "routes is a word": (
        "routes: all",
        "routes: al",
        "routes",
        r"got the string 'al', needed all or a list of text; did you mean 'all'\?",
    ),
    "no seeds": ("seeds: [42]", "seeds: []", "seeds", "needed at least one seed"),
    "seed twice": ("seeds: [42]", "seeds: [1, 1]", "seeds", r"got \[1, 1\], needed every seed once"),
    "seed is a number": ("seeds: [42]", "seeds: 42", "seeds", "got 42, needed a list of a whole number >= 0"),
    "kv heads": ("kv_heads: 8", "kv_heads: 7", "model.kv_heads", "needed a divisor of heads = 32"),
    "long sequence": (
        "sequence: 8192",
        "sequence: 262144",
        "train.sequence",
        "at most model.max_position = 131072",
    ),
    "batch split": (
        "local_batch: 2\n  steps",
        "local_batch: 3\n  steps",
        "train.local_batch",
        "needed a divisor of global_batch = 512",
    ),
    "cuts out of order": (
        "[2000, 10000,",
        "[10000, 2000,",
        "train.cuts",
        "needed ascending steps, each once",
    ),
    "cut past the end": ("38147]", "38148]", "train.cuts", "needed at most steps = 38147"),
    "endpoint not logged": (
        "endpoint_step: 38140",
        "endpoint_step: 38141",
        "train.endpoint_step",
        "a multiple of log_every = 10",
    ),
    "window": (
        "window: [40, 100]",
        "window: [40, 101]",
        "probe.window",
        r"needed first <= last <= probe.steps = 100",
    ),
    "score without checkpoint": (
        "step: 38000\n  batch",
        "step: 37000\n  batch",
        "downstream.step",
        "needed a step with a checkpoint: 2000, ",
    ),
}


def one_line(load, path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message[len(f"{path}: ") :]


@pytest.mark.parametrize("case", BAD_ROUTES)
def test_bad_route_is_one_clear_line(case, tmp_path):
    old, new, key, rest = BAD_ROUTES[case]
    assert old in ROUTE
    message = one_line(recipe.load_recipe, tmp_path / "depth_hybrid_27_5.yaml", ROUTE.replace(old, new, 1))
    assert message.startswith(f"{key}: "), message
    assert re.search(rest, message), message


@pytest.mark.parametrize("case", BAD_STUDIES)
def test_bad_study_is_one_clear_line(case, tmp_path):
    old, new, key, rest = BAD_STUDIES[case]
    assert old in STUDY
    message = one_line(recipe.load_study, tmp_path / "report.yaml", STUDY.replace(old, new, 1))
    assert message.startswith(f"{key}: "), message
    assert re.search(rest, message), message


def test_unknown_names_show_the_nearest():
    with pytest.raises(
        ValueError, match=r"route 'mxfp4_hs32': unknown; allowed: .*did you mean 'mxfp4_sr_h32'\?"
    ):
        recipe.load_recipe("mxfp4_hs32")
    with pytest.raises(
        ValueError, match=r"study 'smok': unknown; allowed: h200, report, smoke; did you mean 'smoke'"
    ):
        recipe.load_study("smok")
    with pytest.raises(ValueError, match="no such file"):
        recipe.load_recipe("nowhere/bf16.yaml")


def test_study_that_names_a_missing_route_is_refused(tmp_path):
    path = tmp_path / "report.yaml"
    path.write_text(STUDY.replace("routes: all", "routes: [bf16, mxfp4_sr_h23]"), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"routes\[1\]: got 'mxfp4_sr_h23'; allowed: .*mean 'mxfp4_sr_h32'\?"
    ):
        recipe.study_routes(recipe.load_study(path))
