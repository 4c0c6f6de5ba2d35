"""python -m eval: exit codes, one-line errors, and no library is loaded before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eval.__main__ import COMMANDS, main


@pytest.mark.parametrize("arguments", [[], ["valdate"]], ids=["none", "misspelt"])
def test_wrong_command_lists_the_right_ones(arguments, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert all(name in error for name in COMMANDS)


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "usage: python -m eval" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["validate", "downstream", "export"])
def test_unknown_route_names_the_nearest(command, pristine, capsys):
    arguments = pristine.cli("bf61")
    assert main([command, *arguments]) == 2
    assert "did you mean 'bf16'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["validate", "downstream", "export"])
def test_route_that_was_not_trained(command, project, capsys):
    (project.job().run_dir / "manifest.json").unlink()
    assert main([command, *project.cli()]) == 2
    assert "no run of bf16 with seed 3 here; train it first" in capsys.readouterr().err


def test_dispatch_loads_no_heavy_library():
    code = "import sys, eval.__main__; print(sorted({'torch', 'numpy', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
