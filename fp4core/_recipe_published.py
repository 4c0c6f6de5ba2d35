"""The ``published`` study: which of the author's public files are there, and what they allow to be drawn.

There is no such study to train: a directory with any subset of the files is bound
(``--config study=published published=DIR``, or ``fp4core bind published DIR``) and their values are drawn by
the same code as one's own logs. Files are told apart by their names; ``eval/published.py`` reads them.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fp4core._recipe_plan import FIGURES, TABLES, Plan

STUDY = "published"
# the step whose losses the report compares; in a loss history it stands between commas
ENDPOINT_STEP = 38140


@dataclasses.dataclass(frozen=True)
class Role:
    """A kind of the author's files: how it is named and which tidy tables it gives."""

    name: str
    pattern: str
    gives: tuple[str, ...]
    shown: str

    def fits(self, file: str) -> bool:
        return re.fullmatch(self.pattern, file) is not None


ROLES = (
    Role("validation", r"VALIDATION_LEDGER\.csv", ("validation",), "VALIDATION_LEDGER.csv"),
    Role("downstream", r"DOWNSTREAM_EVAL_LEDGER\.csv", ("downstream",), "DOWNSTREAM_EVAL_LEDGER.csv"),
    Role(
        "throughput",
        r"llama8b_gb200_all_route_performance_\d+\.csv",
        ("throughput",),
        "llama8b_gb200_all_route_performance_*.csv",
    ),
    Role(
        "production",
        r"llama8b_b300_performance_\d+\.csv",
        ("production",),
        "llama8b_b300_performance_*.csv",
    ),
    Role(
        "history",
        r"llama8b_(mxfp4_rht_history|160b_loss_snapshot)_\d+\.csv",
        ("losses", "endpoint"),
        "llama8b_160b_loss_snapshot_*.csv, llama8b_mxfp4_rht_history_*.csv",
    ),
    # not files of the author's folder: the values of two printed tables, as a user may type them
    Role("endpoint", r"endpoint_loss\.csv", ("endpoint",), "endpoint_loss.csv (route, step, loss)"),
    Role("output_head", r"output_head\.csv", ("output_head",), "output_head.csv (values of table 10)"),
)

# SHA-256 of the files as their author published them
KNOWN_SUMS = {
    "6cfaf60e1cb002cf83a5e018ef3a62ae00dd820a5599cce720f06ccf927f9b03": "VALIDATION_LEDGER.csv",
    "064f72966d2f4fccba3c910492288a43b4c6fd15e9d606d7bdc2696003bcb4ea": "DOWNSTREAM_EVAL_LEDGER.csv",
    "b9c1c790f84c5fe82fc8bc476ea94c2dfb1a5d8f045daaa85eebdd846ae8a645": (
        "llama8b_b300_performance_20260827.csv"
    ),
    "f439780926300b254b8c55f9f32695ae763154185b49c9311020339dbba95290": (
        "llama8b_gb200_all_route_performance_20260830.csv"
    ),
    "1fcbf6226ba2eee92321c4923b53a7bc286539d8dfa6693646af6add23032760": (
        "llama8b_mxfp4_rht_history_20260831.csv"
    ),
    "cd8c9b1b1820523636841e0a57a2700a9024b1cc36ff8af856415c2a90f8581b": (
        "llama8b_160b_loss_snapshot_20260827.csv"
    ),
}

# tidy tables that this project's own recipes give, whatever is bound
OWN = ("formats", "meta", "operands", "routes", "training")
# table or figure -> tidy tables that it cannot do without (a test compares with figures/)
NEEDS = {
    "table01_prior_work": (),
    "table02_format_contracts": ("formats",),
    "table03_base_recipe": ("training",),
    "table04_recipe_ledger": ("operands",),
    "table05_rounding_policy": ("operands",),
    "table06_throughput": ("throughput",),
    "table07_endpoint_loss": ("endpoint",),
    "table08_downstream": ("downstream",),
    "table09_production": ("production",),
    "table10_output_head": ("output_head",),
    "table11_boundary_budget": ("boundary",),
    "table12_dgrad_error": ("dgrad",),
    "fig01_scale_rounding": ("scale_rounding",),
    "fig02_execution_routes": ("execution_routes",),
    "fig03_cta_scaling": ("scaling_domains",),
    "fig04_operand_map": ("operands",),
    "fig05_weight_2d": ("weight_2d",),
    "fig06_fusion_schedule": ("boundary",),
    "fig07_training_loss": ("losses", "endpoint"),
    "fig08_training_loss_zoom": ("losses",),
    "fig09_validation_nll": ("validation",),
    "fig10_downstream_delta": ("downstream",),
    "fig11_speed_quality": ("throughput", "endpoint"),
    "fig12_dgrad_error": ("dgrad",),
}


def role_of(file: str) -> Role | None:
    """The role of a file by its name; None for a file that is not used."""
    return next((role for role in ROLES if role.fits(file)), None)


def tables_from(directory: Path, files: Iterable[str]) -> set[str]:
    """Tidy tables that ``files`` of ``directory`` give. A loss history without the endpoint gives none."""
    found = set(OWN)
    for file in files:
        role = role_of(file)
        if role is None:
            continue
        found |= set(role.gives)
        if role.name == "history" and not _has_endpoint(directory / file):
            found.discard("endpoint")
    if any((role := role_of(file)) and role.name == "endpoint" for file in files):
        found.add("endpoint")
    return found


def _has_endpoint(path: Path) -> bool:
    try:
        return f",{ENDPOINT_STEP},".encode() in path.read_bytes()
    except OSError:
        return False


def lacking(given: set[str]) -> dict[str, str]:
    """Table or figure that ``given`` tidy tables do not allow -> what it needs, in words."""
    found = {}
    for name in (*TABLES, *FIGURES):
        absent = [table for table in NEEDS[name] if table not in given]
        if absent:
            files = [role.shown for role in ROLES if set(role.gives) & set(absent)]
            found[name] = (
                f"needs {' and '.join(absent)}: bind {' or '.join(files)}"
                if files
                else f"needs {' and '.join(absent)}: no file of the author's holds it; any study measures it"
            )
    return found


@dataclasses.dataclass(frozen=True)
class PublishedPlan(Plan):
    """What the bound files allow; ``study`` is the report's, whose settings the author trained with."""

    directory: str = ""
    files: tuple[str, ...] = ()
    bound: str | None = None

    @property
    def given(self) -> set[str]:
        return tables_from(Path(self.directory), self.files)

    def bound_files(self) -> list[str]:
        """Paths of the files that are read."""
        return [f"{self.directory}/{name}" for name in self.files]

    def source(self, wildcards: Any, output: Any) -> str:
        """How the reader is told of the files, quoted for a shell: by directory, or by the binding."""
        return shlex.join(["--inputs", self.bound] if self.bound else ["--published", self.directory])

    def tidy_files(self) -> list[str]:
        suffix = {"losses": "parquet"}
        return [f"{self.results}/tidy/{name}.{suffix.get(name, 'csv')}" for name in sorted(self.given)]

    def table_files(self) -> list[str]:
        return self._possible(super().table_files())

    def figure_files(self) -> list[str]:
        return self._possible(super().figure_files())

    def _possible(self, files: list[str]) -> list[str]:
        absent = lacking(self.given)
        return [name for name in files if Path(name).stem not in absent]

    @property
    def partial(self) -> str:
        return "--partial"
