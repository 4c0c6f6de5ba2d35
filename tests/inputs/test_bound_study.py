"""A study on bound inputs, for real: bind, data stage, training, and every hash in the run's manifest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp4core import recipe
from fp4core.__main__ import main
from fp4core.train.bind import bind
from fp4core.train.build_shards import ShardJob, build_shards
from fp4core.train.build_validation import ValidationJob, build_validation
from fp4core.train.data import prepare_data
from fp4core.train.shards import check_data, open_training


def quiet(line: str) -> None:
    pass


class Site:
    """Documents, shards, a stream, inputs.yaml and a tiny study whose data are bound."""

    def __init__(self, root: Path, collections: Any) -> None:
        self.root, self.inputs, self.results = root, root / "inputs.yaml", root / "results" / "tiny"
        self.recipes = root / "recipes"
        shutil.copytree(recipe.recipes_dir() / "routes", self.recipes / "routes")
        (self.recipes / "studies").mkdir()
        study = recipe.to_dict(recipe.load_study("smoke"))
        study.update(study="tiny", description="bound", data={**study["data"], "source": "bound"})
        study["model"].update(blocks=2, hidden=64, ffn=96, heads=2, kv_heads=1, vocab=300, max_position=64)
        study["train"].update(
            sequence=32, global_batch=4, local_batch=4, steps=4, warmup=1, cuts=[2, 4], endpoint_step=4,
            checkpoint_every=2,
        )  # fmt: skip
        study["validation"].update(sequences=8, batch=4)
        study["downstream"].update(step=4, max_length=64)
        study["dgrad"].update(step=4, sequence=32)
        study["probe"].update(selected={}, matched=None)
        (self.recipes / "studies" / "tiny.yaml").write_text(yaml.safe_dump(study))
        self.study = recipe.load_study("tiny", self.recipes)
        mix = ((82.0, collections.web), (18.0, collections.code))
        stream = ValidationJob(mix, collections.tokenizer, root / "validation", sequences=8, length=33)
        build_validation(stream, note=quiet)
        shards = ShardJob(
            (collections.web,), collections.tokenizer, root / "corpus", shard_tokens=4000,
            exclude=(root / "validation",),
        )  # fmt: skip
        build_shards(shards, note=quiet)
        bind("tokenizer", collections.tokenizer, inputs=self.inputs, note=quiet)
        bind("corpus", root / "corpus", inputs=self.inputs, note=quiet)
        bind("validation", root / "validation", inputs=self.inputs, note=quiet)
        bound = yaml.safe_load(self.inputs.read_text())
        (root / "evaluation").mkdir()
        (root / "evaluation" / "x").write_bytes(b"")
        empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        bound["evaluation"] = {"directory": "evaluation", "sha256": {"x": empty}}
        self.inputs.write_text(yaml.safe_dump(bound))

    def data(self) -> int:
        where = ["--study", "tiny", "--recipes", str(self.recipes), "--inputs", str(self.inputs)]
        return main(["data", *where, "--out", str(self.results / "data")])

    def train(self, *more: str) -> int:
        where = ["--study", "tiny", "--recipes", str(self.recipes), "--results", str(self.results)]
        return main(["train", *where, "--route", "mxfp4_sr", "--seed", "0", *more])


@pytest.fixture
def site(tmp_path, collections) -> Site:
    return Site(tmp_path, collections)


def test_data_stage_describes_the_bound_files_and_training_uses_them(site):
    assert site.data() == 0
    record = json.loads((site.results / "data" / "data.json").read_text())
    bound = recipe.load_inputs(site.inputs)
    for kind in ("tokenizer", "corpus", "validation"):
        assert record["bindings"][kind]["sha256"] == getattr(bound, kind).sha256
        assert Path(record["bindings"][kind]["directory"]).is_absolute()
    shards = json.loads((site.root / "corpus" / "shards.json").read_text())
    assert {k: record["training"][k] for k in ("tokens", "documents")} == {
        k: shards[k] for k in ("tokens", "documents")
    }
    assert record["validation"]["sequences"] == 8
    assert (
        record["validation"]["stream_sha256"]
        == (json.loads((site.root / "validation" / "validation.json").read_text())["stream_sha256"])
    )
    assert not list((site.results / "data").glob("train*"))  # shards stay where they are
    stream = open_training(site.results / "data", check_data(site.results / "data"), sequence=32)
    assert stream.tokens == shards["tokens"]
    assert site.train() == 0
    manifest = json.loads((site.results / "runs" / "mxfp4_sr" / "s0" / "manifest.json").read_text())
    assert manifest["bindings"] == record["bindings"]
    assert manifest["data_sha256"] == record["data_sha256"]
    assert (site.results / "runs" / "mxfp4_sr" / "s0" / "summary.json").is_file()


def test_second_time_verifies_and_does_nothing(site, capsys):
    site.data()
    before = (site.results / "data" / "data.json").stat().st_mtime_ns
    capsys.readouterr()
    assert site.data() == 0
    assert "is up to date" in capsys.readouterr().out
    assert (site.results / "data" / "data.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("stage", ["data", "train"])
def test_changed_shard_stops_every_stage(site, capsys, stage):
    site.data()
    shard = site.root / "corpus" / "shard-00001.arrow"
    spoiled = bytearray(shard.read_bytes())
    spoiled[-2000] ^= 1
    shard.write_bytes(spoiled)
    capsys.readouterr()
    assert (site.data() if stage == "data" else site.train()) == 2
    error = capsys.readouterr().err
    assert "shard-00001.arrow: sha256 expected" in error and ", found " in error
    assert not (site.results / "runs" / "mxfp4_sr" / "s0" / "summary.json").exists()


def test_new_corpus_is_a_new_run_and_the_old_one_is_kept(site, collections, tmp_path):
    site.data()
    assert site.train("--until", "2") == 0
    again = ShardJob((collections.code,), collections.tokenizer, tmp_path / "corpus2", shard_tokens=4000)
    build_shards(again, note=quiet)
    # that one holds documents of the stream, which is noticed before anything is trained
    bind("corpus", tmp_path / "corpus2", inputs=site.inputs, note=quiet)
    with pytest.raises(ValueError, match=r"documents of the validation stream .* occur in training"):
        prepare_data(site.study, site.results / "data", inputs=site.inputs, note=quiet)
    shutil.rmtree(tmp_path / "corpus2")
    clean = ShardJob(
        (collections.code,), collections.tokenizer, tmp_path / "corpus2", exclude=(site.root / "validation",)
    )
    build_shards(clean, note=quiet)
    bind("corpus", tmp_path / "corpus2", inputs=site.inputs, note=quiet)
    assert site.data() == 0
    assert site.train("--until", "2") == 0
    assert len(list((site.results / "archive" / "mxfp4_sr").iterdir())) == 1


def _other_tokenizer(site, collections):
    folder = site.root / "other"
    shutil.copytree(collections.tokenizer, folder)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text + "\n")
    bind("tokenizer", folder, inputs=site.inputs, note=quiet)
    return r"shard-00000\.arrow: made by tokenizer"


def _other_length(site, collections):
    shutil.rmtree(site.root / "validation")
    mix = ((1.0, collections.code),)
    job = ValidationJob(mix, collections.tokenizer, site.root / "validation", sequences=4, length=17)
    build_validation(job, note=quiet)
    bind("validation", site.root / "validation", inputs=site.inputs, note=quiet)
    return r"4 sequences of 17 tokens, study tiny needs 8 of 33; make it with: .*--sequences 8 --length 33"


def _unbound(site, collections):
    bound = yaml.safe_load(site.inputs.read_text())
    del bound["corpus"], bound["validation"]
    site.inputs.write_text(yaml.safe_dump(bound))
    return (
        "corpus: .*build-shards; bind it: fp4core bind corpus PATH; validation: .*build-validation; bind it"
    )


def _small_vocabulary(site, collections):
    path = site.recipes / "studies" / "tiny.yaml"
    study = yaml.safe_load(path.read_text())
    study["model"]["vocab"] = 256
    path.write_text(yaml.safe_dump(study))
    site.study = recipe.load_study("tiny", site.recipes)
    return "tokens of a vocabulary of 300, study tiny has model.vocab 256"


@pytest.mark.parametrize("case", [_other_tokenizer, _other_length, _unbound, _small_vocabulary])
def test_inputs_that_do_not_fit_are_refused_and_leave_nothing(site, collections, case):
    said = case(site, collections)
    with pytest.raises(ValueError, match=said):
        prepare_data(site.study, site.results / "data", inputs=site.inputs, note=quiet)
    assert not (site.results / "data").exists()
    assert not list(site.results.glob(".data*"))
