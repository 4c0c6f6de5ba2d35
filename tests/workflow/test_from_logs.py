"""``--config from_logs=DIR``: a DAG without a heavy rule, and one error for everything that is missing."""

from __future__ import annotations

import shutil

import pytest

from fp4core import recipe
from tests.workflow.pipeline import HEAVY, snakemake

DRAW = {"collect": 1, "tables": 1, "plots": 1, "html": 1, "all": 1}


@pytest.fixture(scope="module")
def logs(project, tmp_path_factory):
    """The records of a finished study, without markers, elsewhere."""
    folder = tmp_path_factory.mktemp("elsewhere") / "logs"
    plan = recipe.make_plan({"study": str(project.study()), "recipes": str(project.folder / "recipes")})[1]
    for name in plan.log_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


def test_redraws_and_has_no_heavy_rule(project, logs):
    assert project.plan("all", config=(f"from_logs={logs}",)) == DRAW
    rules = snakemake(
        *("--profile", "local", "--list-rules", "-s", "Snakefile", "--directory", project.folder),
        *("--config", f"recipes={project.folder / 'recipes'}", "study=tiny", f"from_logs={logs}"),
    ).stdout.split()
    assert "collect" in rules
    assert not HEAVY & set(rules)
    assert not [rule for rule in rules if rule.startswith("recipe_")]


def test_runs_collect_on_those_logs_and_draws(project, logs):
    project.calls()
    done = project.run("all_figures", config=(f"from_logs={logs}",))
    assert done.returncode == 0, done.stdout
    assert project.calls() == ["eval collect", "figures plots"]
    log = (project.folder / "results" / "tiny" / "logs" / "collect.log").read_text(encoding="utf-8")
    assert "collect: done" in log
    assert project.plan("all_figures", config=(f"from_logs={logs}",)) == {}
    # back to the study's own logs: drawn again, nothing run
    assert set(project.plan("all")) == set(DRAW)


def test_every_missing_log_is_in_one_error_and_no_job(project, logs, tmp_path):
    folder = tmp_path / "logs"
    shutil.copytree(logs, folder)
    gone = ["runs/bf16/s0/metrics.parquet", "validation/mxfp4_sr/s0/step-00000020.json", "dgrad/s0.json"]
    for name in gone:
        (folder / name).unlink()
    done = project.run("all_tables", config=(f"from_logs={folder}",))
    assert done.returncode == 1
    assert f"from_logs={folder}: 3 logs are missing and nothing is run in their place" in done.stdout
    assert all(f"\n  {name}\n" in done.stdout for name in gone)
    assert project.calls() == []


def test_diverged_run_is_a_result_not_a_missing_log(logs, project, tmp_path):
    folder = tmp_path / "logs"
    shutil.copytree(logs, folder)
    run = folder / "runs" / "mxfp4_sr" / "s0"
    (run / "summary.json").unlink()
    (run / "failure.json").write_text('{"step": 15}', encoding="utf-8")
    (folder / "validation" / "mxfp4_sr" / "s0" / "step-00000020.json").unlink()
    settings = {"study": str(project.study()), "recipes": str(project.folder / "recipes")}
    files = recipe.make_plan({**settings, "from_logs": str(folder)})[1].log_files(folder)
    assert "runs/mxfp4_sr/s0/failure.json" in files
    assert "validation/mxfp4_sr/s0/step-00000010.json" in files
    (folder / "validation" / "mxfp4_sr" / "s0" / "step-00000010.json").unlink()
    with pytest.raises(ValueError, match=r"validation/mxfp4_sr/s0/step-00000010\.json"):
        recipe.make_plan({**settings, "from_logs": str(folder)})
