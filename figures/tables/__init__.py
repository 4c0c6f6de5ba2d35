"""The twelve tables: which tidy tables each needs, and the function that builds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from figures.data import Tidy
from figures.tables import contracts, parts, quality, speed
from figures.tables.model import Table


@dataclass(frozen=True)
class Entry:
    """One table: its name, the tidy tables without which it cannot be built, and its builder."""

    name: str
    needs: tuple[str, ...]
    build: Callable[[Tidy], Table]


TABLES = (
    Entry("table01_prior_work", (), contracts.prior_work),
    Entry("table02_format_contracts", ("formats",), contracts.format_contracts),
    Entry("table03_base_recipe", ("meta", "training"), contracts.base_recipe),
    Entry("table04_recipe_ledger", ("routes", "operands"), contracts.recipe_ledger),
    Entry("table05_rounding_policy", ("routes", "operands"), contracts.rounding_policy),
    Entry("table06_throughput", ("meta", "routes", "throughput"), speed.throughput),
    Entry("table07_endpoint_loss", ("meta", "routes", "endpoint"), quality.endpoint_loss),
    Entry("table08_downstream", ("meta", "routes", "downstream"), quality.downstream),
    Entry("table09_production", ("meta", "routes", "production"), speed.production),
    Entry("table10_output_head", ("meta", "output_head"), parts.output_head),
    Entry("table11_boundary_budget", ("meta", "routes", "boundary"), parts.boundary_budget),
    Entry("table12_dgrad_error", ("meta", "dgrad"), quality.dgrad_error),
)
