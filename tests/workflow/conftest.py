"""A project that has already run once, shared by a module's tests."""

from __future__ import annotations

import pytest

from tests.workflow.pipeline import Project, make_project


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    """Three routes, everything already run once."""
    made = make_project(tmp_path_factory.mktemp("project"), ("bf16", "mxfp4_sr", "depth_hybrid_27_5"))
    done = made.run("all")
    assert done.returncode == 0, done.stdout
    made.first_calls = made.calls()
    return made
