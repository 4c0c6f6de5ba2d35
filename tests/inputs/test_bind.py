"""Bindings: what is entered, what is refused, and that no wrong byte ever passes at use."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fp4core import recipe
from fp4core.__main__ import main
from fp4core._recipe_files import HashCache, hash_files
from fp4core.train.bind import EVALUATION, bind
from fp4core.train.build_shards import ShardJob, build_shards
from fp4core.train.build_validation import ValidationJob, build_validation


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def built(collections, tmp_path_factory) -> Path:
    """corpus/ and validation/ made of the collections."""
    root = tmp_path_factory.mktemp("bindable")
    mix = ((82.0, collections.web), (18.0, collections.code))
    stream = ValidationJob(mix, collections.tokenizer, root / "validation", sequences=8, length=33)
    build_validation(stream, note=quiet)
    corpus = ShardJob(
        (collections.web,), collections.tokenizer, root / "corpus", shard_tokens=4000,
        exclude=(root / "validation",),
    )  # fmt: skip
    build_shards(corpus, note=quiet)
    return root


def write_evaluation(folder: Path) -> Path:
    for task, (splits, columns) in EVALUATION.items():
        (folder / task).mkdir(parents=True)
        for split in splits:
            pq.write_table(pa.table({c: ["x"] for c in columns}), folder / task / f"{split}.parquet")
    return folder


@pytest.fixture
def evaluation(tmp_path) -> Path:
    return write_evaluation(tmp_path / "evaluation")


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's directory with one checkpoint."""
    run = tmp_path / "runs" / "bf16" / "s0"
    step = run / "checkpoints" / "step-00000010"
    step.mkdir(parents=True)
    (step / "weights.bin").write_bytes(b"w")
    (step / "checkpoint.json").write_text('{"files": {"weights.bin": {"bytes": 1, "sha256": "x"}}}')
    (run / "manifest.json").write_text('{"route": "bf16"}')
    return run


def test_every_kind_is_bound_and_others_are_kept(collections, built, evaluation, run, tmp_path):
    inputs = tmp_path / "inputs.yaml"
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "a.csv").write_text("x\n")
    bind("tokenizer", collections.tokenizer / "tokenizer.json", inputs=inputs, note=quiet)
    bind("corpus", built / "corpus", inputs=inputs, note=quiet)
    bind("validation", built / "validation", inputs=inputs, note=quiet)
    bind("evaluation", evaluation, inputs=inputs, note=quiet)
    bind("checkpoint", run, inputs=inputs, step=10, note=quiet)
    bind("published", tmp_path / "published", inputs=inputs, note=quiet)
    bound = recipe.load_inputs(inputs)
    for kind in ("tokenizer", "corpus", "validation", "evaluation", "checkpoint", "published"):
        binding = getattr(bound, kind)
        folder = tmp_path / binding.directory
        for name, digest in binding.sha256.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        assert recipe.verify_binding(kind, inputs).sha256 == binding.sha256
    assert bound.evaluation.directory == "evaluation"  # below inputs.yaml: they can move together
    assert len(bound.evaluation.sha256) == 5
    assert {"shards.json", "shard-00000.arrow", "shard-00000.documents.parquet"} <= set(bound.corpus.sha256)
    assert set(bound.validation.sha256) == {
        "validation.arrow",
        "validation.documents.parquet",
        "validation.json",
    }
    assert (bound.checkpoint.route, bound.checkpoint.step) == ("bf16", 10)
    assert set(bound.checkpoint.sha256) == {
        "manifest.json",
        "checkpoints/step-00000010/checkpoint.json",
        "checkpoints/step-00000010/weights.bin",
    }
    assert recipe.missing_inputs(recipe.load_study("report"), inputs) == []


def test_command_line_binds_and_says_what(collections, tmp_path, capsys):
    inputs = tmp_path / "inputs.yaml"
    assert main(["bind", "tokenizer", str(collections.tokenizer), "--inputs", str(inputs)]) == 0
    assert "bound tokenizer: 1 files, 0.0 MB of" in capsys.readouterr().out
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parents[2] / "schemas" / "inputs.schema.json").read_text())
    jsonschema.validate(yaml.safe_load(inputs.read_text()), schema)


def _bind_one(kind: str, path: Path, inputs: Path) -> None:
    bind(kind, path, inputs=inputs, note=quiet)


def test_bindings_made_at_once_are_all_kept(collections, built, tmp_path):
    inputs = tmp_path / "inputs.yaml"
    paths = {
        "tokenizer": collections.tokenizer,
        "corpus": built / "corpus",
        "validation": built / "validation",
    }
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=_bind_one, args=(k, p, inputs)) for k, p in paths.items()]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    bound = recipe.load_inputs(inputs)
    assert all(getattr(bound, kind) for kind in paths)


@pytest.fixture
def bound(tmp_path) -> Path:
    """inputs.yaml that binds two files as evaluation data, of which one in a folder."""
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"a" * 100)
    (folder / "sub" / "b.bin").write_bytes(b"b" * 200)
    digests = hash_files(folder, ["a.bin", "sub/b.bin"])
    document = {"version": 1, "evaluation": {"directory": "data", "sha256": digests}}
    (tmp_path / "inputs.yaml").write_text(yaml.safe_dump(document))
    return tmp_path / "inputs.yaml"


def test_changed_byte_is_refused_with_file_expected_and_found(bound):
    path = bound.parent / "data" / "sub" / "b.bin"
    state = path.stat()
    path.write_bytes(b"b" * 199 + b"c")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # the same size and time: bytes alone tell
    expected = hashlib.sha256(b"b" * 200).hexdigest()
    found = hashlib.sha256(b"b" * 199 + b"c").hexdigest()
    with pytest.raises(ValueError, match=f"b.bin: sha256 expected {expected}, found {found}; restore"):
        recipe.verify_binding("evaluation", bound)


def test_vanished_file_and_directory_are_named(bound):
    (bound.parent / "data" / "a.bin").unlink()
    with pytest.raises(ValueError, match=r"bound file .*a\.bin is gone; restore it or bind again"):
        recipe.verify_binding("evaluation", bound)
    (bound.parent / "data").rename(bound.parent / "elsewhere")
    with pytest.raises(ValueError, match=r"evaluation: directory .*data is gone"):
        recipe.verify_binding("evaluation", bound)


def test_symlink_that_leaves_the_directory_is_refused_though_its_bytes_match(bound):
    path = bound.parent / "data" / "a.bin"
    path.rename(bound.parent / "outside.bin")
    path.symlink_to(bound.parent / "outside.bin")
    with pytest.raises(ValueError, match=r"a\.bin: a symlink that leaves .*outside\.bin"):
        recipe.verify_binding("evaluation", bound)
    path.unlink()
    (bound.parent / "data" / "inside.bin").write_bytes(b"a" * 100)
    path.symlink_to("inside.bin")
    assert recipe.verify_binding("evaluation", bound).path("a.bin").read_bytes() == b"a" * 100


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda d: d.update(version=2), "version: got 2; allowed: 1"),
        (lambda d: d.update(corpora={}), "corpora: unknown key; .*did you mean 'corpus'"),
        (lambda d: d["evaluation"].update(hash="x"), "evaluation.hash: unknown key"),
        (
            lambda d: d["evaluation"].update(directory="s3://bucket/x"),
            "evaluation.directory: got 's3://bucket/x', needed a local path, not a URL",
        ),
        (
            lambda d: d["evaluation"]["sha256"].update({"../up.bin": "0" * 64}),
            r"evaluation\.sha256\.\.\./up\.bin: got a path that leaves the directory",
        ),
        (
            lambda d: d["evaluation"]["sha256"].update({"/etc/hosts": "0" * 64}),
            "got a path that leaves the directory",
        ),
        (lambda d: d["evaluation"]["sha256"].update({"a//b": "0" * 64}), "is no plain path, needed .* a/b"),
        (lambda d: d["evaluation"]["sha256"].update({"a.bin": "0" * 63}), "evaluation.sha256.a.bin: got"),
    ],
    ids=["version", "kind", "key", "URL", "dots", "absolute", "not normal", "short hash"],
)  # fmt: skip
def test_wrong_bindings_are_refused(bound, edit, said):
    document = yaml.safe_load(bound.read_text())
    edit(document)
    bound.write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError, match=said):
        recipe.verify_binding("evaluation", bound)


def test_unbound_kind_says_how_to_bind(bound):
    with pytest.raises(ValueError, match="corpus: nothing is bound; run: fp4core bind corpus PATH"):
        recipe.verify_binding("corpus", bound)


def test_processes_share_the_reading(bound, monkeypatch):
    read: list[str] = []
    from fp4core import _recipe_files

    whole = _recipe_files.sha256_of
    monkeypatch.setattr(
        _recipe_files, "sha256_of", lambda path, tick: read.append(path.name) or whole(path, tick)
    )
    recipe.verify_binding("evaluation", bound, part=(0, 2))
    assert read == ["b.bin"]  # the larger first
    recipe.verify_binding("evaluation", bound, part=(1, 2))
    assert read == ["b.bin", "a.bin"]


class TestCache:
    """It spares `bind` a second reading; it is never asked at use."""

    def test_untouched_file_is_not_read_again(self, tmp_path, monkeypatch):
        path = tmp_path / "a.bin"
        path.write_bytes(b"a")
        os.utime(path, (1e9, 1e9))
        cache = HashCache.open(tmp_path / "cache.json")
        first = hash_files(tmp_path, ["a.bin"], cache=cache)
        cache.save()
        monkeypatch.setattr("fp4core._recipe_files.sha256_of", None)
        assert hash_files(tmp_path, ["a.bin"], cache=HashCache.open(tmp_path / "cache.json")) == first

    def test_file_of_this_second_is_not_remembered(self, tmp_path):
        (tmp_path / "a.bin").write_bytes(b"a")
        cache = HashCache.open(tmp_path / "cache.json")
        hash_files(tmp_path, ["a.bin"], cache=cache)
        assert cache.entries == {}

    @pytest.mark.parametrize("change", ["size", "time", "inode"])
    def test_touched_file_is_read_again(self, tmp_path, change):
        path = tmp_path / "a.bin"
        path.write_bytes(b"a")
        os.utime(path, (1e9, 1e9))
        cache = HashCache.open(tmp_path / "cache.json")
        hash_files(tmp_path, ["a.bin"], cache=cache)
        if change == "inode":
            (tmp_path / "new").write_bytes(b"b")
            os.replace(tmp_path / "new", path)
        else:
            path.write_bytes(b"bb" if change == "size" else b"b")
        os.utime(path, (1e9 + (change == "time"), 1e9 + (change == "time")))
        assert hash_files(tmp_path, ["a.bin"], cache=cache)["a.bin"] == (
            hashlib.sha256(path.read_bytes()).hexdigest()
        )

    def test_lying_cache_makes_a_false_alarm_and_never_a_false_pass(self, tmp_path):
        (tmp_path / "published").mkdir()
        path = tmp_path / "published" / "a.csv"
        path.write_text("honest\n")
        os.utime(path, (1e9, 1e9))
        state = path.stat()
        lie = {str(path): [state.st_size, state.st_mtime_ns, state.st_ino, "f" * 64]}
        (tmp_path / ".inputs.cache.json").write_text(json.dumps({"version": 1, "files": lie}))
        inputs = tmp_path / "inputs.yaml"
        bind("published", tmp_path / "published", inputs=inputs, note=quiet)
        with pytest.raises(ValueError, match=f"expected {'f' * 64}, found"):
            recipe.verify_binding("published", inputs)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1, "files": {"a": [1]}}', '{"files": 3}'])
    def test_broken_cache_counts_as_empty(self, tmp_path, text):
        (tmp_path / "cache.json").write_text(text)
        assert HashCache.open(tmp_path / "cache.json").entries == {}


def _missing(tmp_path):
    return ["tokenizer", str(tmp_path / "no")], "no: no such file or directory"


def _url(tmp_path):
    return ["corpus", "https://example.org/c"], "https://example.org/c: a URL, needed a local path"


def _kind(tmp_path):
    return ["tokeniser", "."], "kind 'tokeniser': allowed: tokenizer, .*did you mean 'tokenizer'"


def _no_tokenizer(tmp_path):
    return ["tokenizer", str(tmp_path)], "no tokenizer.json; a tokenizer of another kind is converted"


def _bad_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    return ["tokenizer", str(tmp_path)], "tokenizer.json: no tokenizer that can be loaded"


def _no_shards(tmp_path):
    return ["corpus", str(tmp_path)], "no train shards here; make them with: python -m fp4core build-shards"


def _no_stream(tmp_path):
    return ["validation", str(tmp_path)], "no validation shards here; make them with: .* build-validation"


def _no_benchmarks(tmp_path):
    return ["evaluation", str(tmp_path)], r"lacks mmlu/test\.parquet, mmlu/dev\.parquet, hellaswag"


def _benchmark_without_column(tmp_path):
    folder = write_evaluation(tmp_path / "e")
    pq.write_table(pa.table({"question": ["x"]}), folder / "mmlu" / "test.parquet")
    return ["evaluation", str(folder)], r"mmlu/test\.parquet: no column 'choices'; got question, needed"


def _no_run(tmp_path):
    return ["checkpoint", str(tmp_path)], "no manifest.json; give a run's directory"


def _no_csv(tmp_path):
    return ["published", str(tmp_path)], "no CSV file here"


def _route_without_checkpoint(tmp_path):
    return ["published", str(tmp_path), "--route", "bf16"], "--route and --step belong to `bind checkpoint`"


def _no_path(tmp_path):
    return ["corpus"], "the following arguments are required: PATH"


@pytest.mark.parametrize(
    "case",
    [_missing, _url, _kind, _no_tokenizer, _bad_tokenizer, _no_shards, _no_stream, _no_benchmarks,
     _benchmark_without_column, _no_run, _no_csv, _route_without_checkpoint, _no_path],
)  # fmt: skip
def test_what_cannot_be_bound_is_one_line_and_changes_nothing(tmp_path, capsys, case):
    import re

    folder = tmp_path / "given"
    folder.mkdir()
    arguments, said = case(folder)
    inputs = tmp_path / "inputs.yaml"
    inputs.write_text("version: 1\n")
    assert main(["bind", *arguments, "--inputs", str(inputs)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(said, error), error
    assert inputs.read_text() == "version: 1\n"


def test_wrong_step_and_route_of_a_checkpoint(run, tmp_path):
    inputs = tmp_path / "inputs.yaml"
    with pytest.raises(ValueError, match="--step 11, needed one of its checkpoints: 10"):
        bind("checkpoint", run, inputs=inputs, step=11, note=quiet)
    with pytest.raises(ValueError, match="a run of route 'bf16', --route says 'mxfp4_sr'"):
        bind("checkpoint", run, inputs=inputs, step=10, route="mxfp4_sr", note=quiet)
    step = run / "checkpoints" / "step-00000010"
    assert bind("checkpoint", step, inputs=inputs, note=quiet)["step"] == 10


def test_broken_inputs_file_is_refused_before_hashing(collections, tmp_path, monkeypatch):
    inputs = tmp_path / "inputs.yaml"
    inputs.write_text("version: 1\nunknown: 2\n")
    monkeypatch.setattr("fp4core.train.bind.hash_files", None)
    with pytest.raises(ValueError, match="unknown: unknown key"):
        bind("tokenizer", collections.tokenizer, inputs=inputs, note=quiet)
