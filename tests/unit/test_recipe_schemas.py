"""The committed JSON Schemas are the dataclasses'; what the loader reads, the schemas accept; inputs.yaml."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from fp4core import recipe

ROOT = Path(__file__).resolve().parents[2]
STUDIES = ("smoke", "h200", "report")


@pytest.mark.parametrize("name", recipe.schemas())
def test_committed_schema_is_generated(name):
    committed = (ROOT / "schemas" / name).read_text(encoding="utf-8")
    wanted = json.dumps(recipe.schemas()[name], indent=2, ensure_ascii=False) + "\n"
    diff = "".join(
        difflib.unified_diff(committed.splitlines(True), wanted.splitlines(True), "committed", "dataclasses")
    )
    assert not diff, f"run: python -m fp4core.recipe schemas\n{diff}"


@pytest.mark.parametrize("name", recipe.schemas())
def test_schema_is_valid_2020_12_and_closed(name):
    schema = recipe.schemas()[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    objects = [schema, *schema.get("$defs", {}).values()]
    assert all(o["additionalProperties"] is False for o in objects if "properties" in o)


def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(recipe.schemas()[f"{name}.schema.json"])


@pytest.mark.parametrize("route", recipe.list_routes())
def test_schema_accepts_shipped_route(route):
    data = yaml.safe_load((ROOT / "recipes" / "routes" / f"{route}.yaml").read_text(encoding="utf-8"))
    assert [e.message for e in _validator("recipe").iter_errors(data)] == []


@pytest.mark.parametrize("study", STUDIES)
def test_schema_accepts_shipped_study(study):
    data = yaml.safe_load((ROOT / "recipes" / "studies" / f"{study}.yaml").read_text(encoding="utf-8"))
    assert [e.message for e in _validator("study").iter_errors(data)] == []


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"lable": "x"}, "'lable' was unexpected"),
        ({"version": 2}, "1 was expected"),
        ({"label": 27}, "27 is not of type 'string'"),
        ({"implementation": "cuda"}, "'cuda' is not one of"),
        ({"route": "a-b"}, "does not match"),
        ({"reference_depth": 0}, "less than the minimum"),
    ],
    ids=["unknown key", "version", "type", "choice", "slug", "bound"],
)
def test_schema_refuses_what_the_loader_refuses(edit, said):
    data = {**recipe.to_dict(recipe.load_recipe("bf16")), **edit}
    assert said in " ".join(e.message for e in _validator("recipe").iter_errors(data))
    with pytest.raises(ValueError):
        recipe.from_dict(data)


# ---- studies ----------------------------------------------------------------------------------------


def test_report_study_is_the_reports():
    s = recipe.load_study("report")
    m, t = s.model, s.train
    assert (m.blocks, m.hidden, m.ffn, m.heads, m.kv_heads, m.head_dim, m.vocab) == (
        32,
        4096,
        14336,
        32,
        8,
        128,
        128256,
    )
    assert (m.rms_eps, m.max_position, m.tie_embeddings, m.output_head) == (1e-5, 131072, False, "bf16")
    assert m.rope == recipe.RopeConfig(500000.0, 8.0, 1.0, 4.0, 8192)
    assert (t.sequence, t.global_batch, t.steps, t.warmup, t.lr) == (8192, 512, 38147, 2000, 3e-4)
    assert (t.betas, t.eps, t.weight_decay, t.clip, t.schedule) == ((0.9, 0.95), 1e-8, 0.1, 1.0, "constant")
    assert (t.log_every, t.endpoint_step, t.cuts) == (10, 38140, (2000, 10000, 18000, 29000, 38000, 38147))
    assert t.steps * t.global_batch * t.sequence == 160_000_114_688
    assert (s.probe.steps, s.probe.window, s.validation.sequences) == (100, (40, 100), 768)
    shots = {name: task.shots for name, task in s.downstream.tasks.items()}
    assert shots == {"mmlu": 5, "hellaswag": 10, "winogrande": 5, "arc_challenge": 25}
    assert all(task.limit is None for task in s.downstream.tasks.values())
    assert (s.downstream.step, s.dgrad.batches, s.dgrad.sequence, s.routes) == (38000, 3, 2048, "all")


@pytest.mark.parametrize("study", STUDIES)
def test_study_round_trips_and_keeps_every_stage(study):
    loaded = recipe.load_study(study)
    plain = json.loads(json.dumps(recipe.to_dict(loaded)))
    assert recipe.study_from_dict(plain) == loaded
    assert list(recipe.study_routes(loaded)) == recipe.list_routes()
    assert len({loaded.stage_hash(stage) for stage in recipe.STAGES}) == len(recipe.STAGES)


# edit of smoke.yaml as nested keys -> stages whose numbers it can change
TOUCHES = {
    "description": (("description",), "x", set()),
    "kept checkpoints": (("train", "keep_last"), 7, set()),
    "checkpoint interval": (("train", "checkpoint_every"), 7, set()),
    "segments": (("train", "segments"), "per_cut", set()),
    "learning rate": (
        ("train", "lr"),
        1.0e-4,
        {"train", "probe", "validation", "downstream", "dgrad", "output_head"},
    ),
    "steps": (("train", "steps"), 10**6, {"train", "validation", "downstream", "dgrad"}),
    "probe steps": (("probe", "steps"), 10**6, {"probe"}),
    "benchmark size": (("downstream", "batch"), 3, {"downstream"}),
    "validation batch": (("validation", "batch"), 3, {"validation"}),
    "dgrad batches": (("dgrad", "batches"), 1, {"dgrad"}),
    "screen steps": (("output_head", "steps"), 10**6, {"output_head"}),
    "boundary repeats": (("boundary", "repeats"), 4, {"boundary"}),
    "width": (("model", "ffn"), 512, set(recipe.STAGES) - {"data"}),
    "shuffle": (("data", "seed"), 9, set(recipe.STAGES) - {"boundary"}),
    "vocabulary": (("model", "vocab"), 640, set(recipe.STAGES)),
    "backend": (("backend",), "reference", set(recipe.STAGES) - {"data"}),
}


@pytest.mark.parametrize("case", TOUCHES)
def test_stage_hash_sees_exactly_what_can_change_the_stage(case):
    keys, value, stages = TOUCHES[case]
    study = recipe.load_study("smoke")
    plain = recipe.to_dict(study)
    place = plain
    for key in keys[:-1]:
        place = place[key]
    assert place[keys[-1]] != value
    place[keys[-1]] = value
    edited = recipe.study_from_dict(plain)
    assert {s for s in recipe.STAGES if edited.stage_hash(s) != study.stage_hash(s)} == stages


# ---- inputs.yaml ------------------------------------------------------------------------------------

SHA = "0" * 64


def _bind(tmp_path: Path, *kinds: str) -> Path:
    bindings = {"version": 1}
    for kind in kinds:
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "a.bin").write_bytes(b"a")
        bindings[kind] = {"directory": str(folder), "sha256": {"a.bin": SHA}}
    path = tmp_path / "inputs.yaml"
    path.write_text(yaml.safe_dump(bindings), encoding="utf-8")
    return path


def test_unbound_report_lists_everything_missing(tmp_path):
    report = recipe.load_study("report")
    lines = recipe.missing_inputs(report, tmp_path / "inputs.yaml")
    assert [line.split(":")[0] for line in lines] == ["tokenizer", "corpus", "validation", "evaluation"]
    assert all("fp4core bind" in line for line in lines)
    path = _bind(tmp_path, "tokenizer", "validation")
    assert [line.split(":")[0] for line in recipe.missing_inputs(report, path)] == ["corpus", "evaluation"]
    assert recipe.missing_inputs(recipe.load_study("smoke"), tmp_path / "inputs.yaml") == []


def test_bound_report_can_start_until_a_file_goes(tmp_path):
    path = _bind(tmp_path, "tokenizer", "corpus", "validation", "evaluation")
    assert recipe.missing_inputs(recipe.load_study("report"), path) == []
    (tmp_path / "corpus" / "a.bin").unlink()
    (line,) = recipe.missing_inputs(recipe.load_study("report"), path)
    assert line.startswith("corpus: bound file ") and "is gone" in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version: 2", "version: got 2; allowed: 1"),
        ("version: 1\ntokeniser: {}", "tokeniser: unknown key; .* did you mean 'tokenizer'"),
        ("version: 1\ntokenizer: {directory: a}", "tokenizer.sha256: missing"),
        ("version: 1\ntokenizer: {directory: a, sha256: {}}", "tokenizer.sha256: got no file"),
        (
            "version: 1\ntokenizer: {directory: a, sha256: {x: abc}}",
            "tokenizer.sha256.x: got 'abc', needed text that matches",
        ),
        (
            f"version: 1\ntokenizer: {{directory: 'https://a/b', sha256: {{x: '{SHA}'}}}}",
            "needed a local path, not a URL",
        ),
        (
            f"version: 1\ntokenizer: {{directory: a, sha256: {{../x: '{SHA}'}}}}",
            "a path that leaves the directory",
        ),
        ("version: 1\ncheckpoint: {directory: a, manifest: m.json, route: bf16}", "checkpoint.step: missing"),
        ("[1]", "needed a mapping with the keys version, tokenizer"),
    ],
)
def test_wrong_inputs_are_one_clear_line(tmp_path, text, said):
    path = tmp_path / "inputs.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said) as caught:
        recipe.load_inputs(path)
    assert "\n" not in str(caught.value)
