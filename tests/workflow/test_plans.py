"""What is planned: targets, profiles, segments, refusals, and how long planning takes."""

from __future__ import annotations

import resource

import pytest
import yaml

from fp4core import recipe
from tests.workflow.pipeline import HEAVY, ROOT, make_project, planned, snakemake

ROUTES = len(recipe.list_routes())
ALL = {"data": 1, "train": ROUTES, "probe": ROUTES, "validate": ROUTES, "downstream": ROUTES}
ALL |= {"dgrad": 1, "output_head": 1, "boundary": 1, "traces": 1, "collect": 1}


@pytest.fixture
def fresh(tmp_path):
    """--config entries of a study that nothing was run for."""
    return ("--config", f"results={tmp_path}/results")


def test_default_target_is_everything_and_planned_in_seconds(fresh):
    """Seconds of CPU time: other tests beside this one cannot stretch it."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    start = spent()
    done = snakemake("--profile", "local", "-n", *fresh)
    assert done.returncode == 0, done.stdout
    assert planned(done.stdout) == ALL | {"all": 1, "tables": 1, "plots": 1, "html": 1}
    assert spent() - start < 5


def test_recipe_target_is_that_route_alone(fresh):
    done = snakemake("--profile", "local", "-n", *fresh, "--", "recipe_mxfp4_sr_h32")
    jobs = {"data": 1, "train": 1, "probe": 1, "validate": 1, "downstream": 1, "recipe_mxfp4_sr_h32": 1}
    assert planned(done.stdout) == jobs
    assert "route=mxfp4_sr_h32" in done.stdout
    assert not [r for r in recipe.list_routes() if r != "mxfp4_sr_h32" and f"route={r}," in done.stdout]


def test_any_file_is_a_target(tmp_path, fresh):
    plan = recipe.make_plan({"results": f"{tmp_path}/results"})[1]
    figure = f"{tmp_path}/results/smoke/figures/fig07_training_loss.svg"
    assert figure in plan.figure_files()
    done = snakemake("--profile", "local", "-n", *fresh, "--", plan.done("probe", "bf16", 0))
    assert planned(done.stdout) == {"data": 1, "probe": 1}
    assert planned(snakemake("--profile", "local", "-n", *fresh, "--", figure).stdout) == ALL | {"plots": 1}


def test_slurm_profile_resolves_by_name_and_plans(tmp_path):
    config = ("--config", f"results={tmp_path}/results", "study=smoke")
    done = snakemake("--profile", "slurm", "all_tables", "-n", *config)
    assert done.returncode == 0, done.stdout
    assert planned(done.stdout) == ALL | {"all_tables": 1, "tables": 1}
    assert "gres=gpu:8" in done.stdout and "slurm_extra=--requeue --open-mode=append" in done.stdout


def test_report_study_refuses_unbound_and_lists_everything(tmp_path):
    done = snakemake("--profile", "slurm", "all_tables", "-n", "--config", f"inputs={tmp_path}/inputs.yaml")
    assert done.returncode == 1
    assert "study report: nothing is started, these inputs are missing:" in done.stdout
    for kind in ("tokenizer", "corpus", "validation", "evaluation"):
        assert f"bind it: fp4core bind {kind} PATH" in done.stdout
    assert "Traceback" not in done.stdout


def test_bound_report_study_plans_a_job_per_cut(tmp_path):
    bindings = {"version": 1}
    for kind in ("tokenizer", "corpus", "validation", "evaluation"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "a.bin").touch()
        bindings[kind] = {"directory": kind, "sha256": {"a.bin": "0" * 64}}
    (tmp_path / "inputs.yaml").write_text(yaml.safe_dump(bindings), encoding="utf-8")
    config = ("--config", f"results={tmp_path}/results", f"inputs={tmp_path}/inputs.yaml")
    done = snakemake("--profile", "slurm", "all", "-n", *config)
    assert done.returncode == 0, done.stdout
    cuts = len(recipe.load_study("report").train.cuts)
    extra = {"all": 1, "tables": 1, "plots": 1, "html": 1}
    assert planned(done.stdout) == ALL | extra | {"train": ROUTES * cuts, "validate": ROUTES * cuts}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"studdy": "smoke"}, "--config: studdy: unknown key; allowed: study, from_logs, recipes, "),
        ({"study": "smok"}, "study 'smok': unknown; allowed: h200, report, smoke; did you mean 'smoke'?"),
        ({"study": 3}, "--config: study: got 3, needed text; quote it: '3'"),
        ({"recipes": "nowhere"}, "nowhere: no recipes here: needed a folder that holds routes/"),
        (
            {"from_logs": "nowhere"},
            "from_logs=nowhere: ",
        ),
    ],
    ids=["unknown key", "unknown study", "not text", "no recipes", "no logs"],
)
def test_wrong_configuration_is_one_clear_error(config, said):
    with pytest.raises(recipe.ConfigError) as caught:
        recipe.make_plan(config)
    assert str(caught.value).startswith(said)


def test_broken_recipe_names_file_key_and_remedy(tmp_path):
    project = make_project(tmp_path, ("bf16", "mxfp4_sr"))
    path = project.route("mxfp4_sr")
    path.write_text(path.read_text(encoding="utf-8").replace("rounding:", "roundign:"), encoding="utf-8")
    done = project.run("-n", "all")
    assert done.returncode == 1
    assert (
        f"{path}: groups[0].dgrad.dy.roundign: unknown key; allowed: format, rounding, hadamard"
        in done.stdout
    )


def test_every_shell_rule_calls_a_documented_command_line():
    """Rules stay thin: one command each, no script:, no run:, retries only in the profile."""
    for path in sorted((ROOT / "workflow" / "rules").glob("*.smk")):
        text = path.read_text(encoding="utf-8")
        for word in ("script:", "run:", "retries:", "import torch", "lambda wildcards"):
            assert word not in text, f"{path.name}: {word}"
    assert {
        line.split()[1].rstrip(":")
        for name in ("data", "train", "probe", "validate", "downstream", "diagnostics")
        for line in (ROOT / "workflow" / "rules" / f"{name}.smk").read_text(encoding="utf-8").splitlines()
        if line.startswith("rule ")
    } == HEAVY
