"""What reruns: nothing for words, exactly the touched routes for numbers, and no log is ever lost."""

from __future__ import annotations

import shutil

import yaml

from fp4core import recipe
from tests.workflow.pipeline import make_project

ROUTES = ("bf16", "depth_hybrid_27_5", "mxfp4_sr")
REDRAW = ["eval collect", "figures plots", "figures report", "figures tables"]


def of_route(route: str) -> list[str]:
    """Commands of one route in a study of two segments."""
    names = [
        "eval downstream",
        "eval validate",
        "eval validate",
        "fp4core probe",
        "fp4core train",
        "fp4core train",
    ]
    return [f"{name} {route}" for name in names]


def test_first_run_runs_every_stage_once(project):
    single = ["eval dgrad", "eval traces", "fp4core bench", "fp4core data", "fp4core head-screen", *REDRAW]
    assert project.first_calls == sorted(single + [c for r in ROUTES for c in of_route(r)])


def test_second_run_has_nothing_to_do_and_says_so(project):
    done = project.run("all")
    assert "Nothing to be done" in done.stdout
    assert project.calls() == []


def test_words_order_and_format_rerun_nothing(project):
    before = {path: path.read_text(encoding="utf-8") for path in (project.route("mxfp4_sr"), project.study())}
    for path, text in before.items():
        data = yaml.safe_load(text)
        turned = {key: data[key] for key in reversed(data)}
        path.write_text("# a comment\n" + yaml.safe_dump(turned, sort_keys=False, indent=6), encoding="utf-8")
    assert project.plan("all") == {}
    for path, text in before.items():
        path.write_text(text, encoding="utf-8")


def test_fresh_clone_beside_old_results_reruns_nothing_heavy(project, tmp_path):
    """No .snakemake metadata, new times on every recipe, and logs copied in any order of time."""
    folder = tmp_path / "clone"
    shutil.copytree(
        project.folder, folder, ignore=shutil.ignore_patterns(".snakemake"), copy_function=shutil.copy
    )
    done = folder / "results" / "tiny" / "done"
    for early in (*done.glob("data-*.json"), *done.glob("train/bf16/s0/step-00000010-*.json")):
        early.touch()
    clone = type(project)(folder)
    assert set(clone.plan("all")) <= {"collect", "tables", "plots", "html", "all"}


def test_another_spelling_of_the_study_reruns_nothing(project):
    assert project.plan("all", config=(f"study={project.study()}",)) == {}


def test_label_redraws_without_running_anything(project):
    path = project.route("mxfp4_sr")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('label: "MXFP4', 'label: "Our MXFP4'), encoding="utf-8")
    assert set(project.plan("all")) == {"collect", "tables", "plots", "html", "all"}
    path.write_text(text, encoding="utf-8")


def test_number_of_one_recipe_reruns_that_route_alone(project):
    path = project.route("mxfp4_sr")
    text = path.read_text(encoding="utf-8")
    log = project.folder / "results" / "tiny" / "runs" / "mxfp4_sr" / "s0" / "attempts.log"
    assert log.read_text(encoding="utf-8").split() == ["10", "20"]
    path.write_text(
        text.replace("{format: mxfp4, rounding: stochastic}", "{format: mxfp4}"), encoding="utf-8"
    )
    done = project.run("all")
    assert done.returncode == 0, done.stdout
    # the boundary budget times every route's formats, so it is measured again
    assert project.calls() == sorted(["fp4core bench", *of_route("mxfp4_sr"), *REDRAW])
    assert log.read_text(encoding="utf-8").split() == ["10", "20", "10", "20"]
    assert project.plan("all") == {}
    path.write_text(text, encoding="utf-8")
    rerun = project.plan("recipe_mxfp4_sr")
    assert rerun == {"train": 2, "validate": 2, "downstream": 1, "probe": 1, "recipe_mxfp4_sr": 1}
    assert project.plan("recipe_bf16") == {}
    assert project.run("all").returncode == 0
    project.calls()


def test_number_of_the_study_changes_the_markers_of_the_stages_it_touches(project):
    """A changed marker name is a missing output, so the plan alone decides; no need to run Snakemake."""
    before = project.study().read_text(encoding="utf-8")
    data = yaml.safe_load(before)

    def markers() -> set[str]:
        plan = recipe.make_plan({"study": str(project.study()), "recipes": str(project.folder / "recipes")})[
            1
        ]
        return set(plan.all_done())

    def touched(section: str, **edit) -> set[str]:
        edited = {**data, section: {**data[section], **edit}}
        project.study().write_text(yaml.safe_dump(edited), encoding="utf-8")
        names = (name.split("/done/")[1] for name in markers() - whole)
        return {name.split("/")[0].split("-")[0].removesuffix(".json") for name in names}

    whole = markers()
    trained = {"train", "validation", "downstream", "dgrad"}
    assert touched("probe", steps=13) == {"probe"}
    assert touched("validation", batch=3) == {"validation"}
    assert touched("downstream", batch=3) == {"downstream"}
    assert touched("boundary", repeats=4) == {"boundary"}
    assert touched("train", lr=0.001) == trained | {"probe", "output_head"}
    assert touched("data", seed=5) == trained | {"data", "probe", "output_head"}
    assert touched("train", keep_last=9, checkpoint_every=9) == set()
    project.study().write_text(before, encoding="utf-8")


def test_failed_job_leaves_logs_and_the_next_start_goes_on(tmp_path):
    project = make_project(tmp_path, ("bf16",))
    stub = tmp_path / "fp4core" / "__main__.py"
    good = stub.read_text(encoding="utf-8")
    stub.write_text(
        good.replace("for name in made:", "if command == 'train': sys.exit(75)\nfor name in made:")
    )
    done = project.run("recipe_bf16")
    assert done.returncode == 1
    log = tmp_path / "results" / "tiny" / "runs" / "bf16" / "s0" / "attempts.log"
    assert log.read_text(encoding="utf-8").split() == ["10"]
    stub.write_text(good, encoding="utf-8")
    assert project.run("recipe_bf16").returncode == 0
    assert log.read_text(encoding="utf-8").split() == ["10", "10", "20"]


def test_new_route_is_one_new_file(project):
    text = project.route("mxfp4_sr").read_text(encoding="utf-8")
    path = project.route("mxfp4_fresh")
    path.write_text(text.replace("route: mxfp4_sr", "route: mxfp4_fresh"), encoding="utf-8")
    jobs = {"train": 2, "validate": 2, "downstream": 1, "probe": 1, "recipe_mxfp4_fresh": 1}
    assert project.plan("recipe_mxfp4_fresh") == jobs
    done = project.run("all")
    assert done.returncode == 0, done.stdout
    assert project.calls() == sorted(["fp4core bench", *of_route("mxfp4_fresh"), *REDRAW])
    path.unlink()
