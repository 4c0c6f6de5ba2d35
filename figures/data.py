"""One study's tidy tables, read once and checked, with the facts that every caption needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from figures import schema
from figures.schema import MissingTable

REFERENCE = "bf16"


@dataclass(frozen=True)
class Route:
    """A route of the study: slug, readable label, place in the ledger."""

    slug: str
    label: str
    order: int
    published_key: str | None
    in_report: bool
    implementation: str
    recipe_hash: str


# tables that lose their rows with one route; what draws them says so
LOST_WITH_A_RUN = ("dgrad", "production")


class Tidy:
    """Lazy, checked access to the tidy tables in ``directory``. Derived facts are kept in ``cache``."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise MissingTable(
                f"{self.directory} is no directory: needed a tidy directory, as `python -m eval "
                "collect` writes it"
            )
        self._tables: dict[str, pd.DataFrame] = {}
        self.cache: dict[str, object] = {}

    def table(self, name: str) -> pd.DataFrame:
        """Table ``name``; ``MissingTable`` when it is absent, ``TidyError`` when it breaks its schema."""
        if name not in self._tables:
            self._tables[name] = schema.read_table(self.directory, name)
        return self._tables[name]

    def has(self, name: str) -> bool:
        """Whether table ``name`` exists and has rows."""
        return (self.directory / schema.file_of(name)).is_file() and len(self.table(name)) > 0

    def lacking(self, needs: tuple[str, ...]) -> list[str]:
        """File names of the tables in ``needs`` that are absent, or empty though no run diverged."""
        return [schema.file_of(name) for name in needs if not (self.has(name) or self.unmeasured(name))]

    def unmeasured(self, name: str) -> bool:
        """Whether table ``name`` is there and empty because the run that it measures diverged."""
        there = name in LOST_WITH_A_RUN and (self.directory / schema.file_of(name)).is_file()
        return there and "diverged" in self.status.values()

    @cached_property
    def meta(self) -> dict[str, str]:
        """Facts about the study."""
        frame = self.table("meta")
        return {key: value or "" for key, value in zip(frame["key"], frame["value"])}

    @cached_property
    def routes(self) -> list[Route]:
        """Routes in ledger order."""
        frame = self.table("routes").sort_values(["order", "route"], kind="stable")
        return [
            Route(
                row.route,
                row.label,
                int(row.order),
                row.published_key,
                row.in_report,
                row.implementation,
                row.recipe_hash,
            )
            for row in frame.itertuples()
        ]

    @cached_property
    def slugs(self) -> list[str]:
        return [route.slug for route in self.routes]

    @cached_property
    def labels(self) -> dict[str, str]:
        return {route.slug: route.label for route in self.routes}

    @cached_property
    def seeds(self) -> list[int]:
        """Seeds that the study lists (meta), else those of its runs."""
        listed = self.meta.get("seeds", "").replace(",", " ").split()
        if listed and all(word.isdigit() for word in listed):
            return [int(word) for word in listed]
        if self.has("runs"):
            return sorted(int(seed) for seed in self.table("runs")["seed"].unique())
        return []

    @cached_property
    def status(self) -> dict[str, str]:
        """Worst status of each route's runs: diverged, else incomplete, else complete."""
        if not self.has("runs"):
            return {}
        rank = {"diverged": 2, "complete": 0}
        worst: dict[str, str] = {}
        for route, state in zip(self.table("runs")["route"], self.table("runs")["status"]):
            if route not in worst or rank.get(state, 1) > rank.get(worst[route], 1):
                worst[route] = state
        return worst

    @property
    def on_cpu(self) -> bool:
        return self.meta.get("device_kind", "").lower() == "cpu"

    def ordered(self, slugs: Iterable[str]) -> list[str]:
        """``slugs`` in ledger order; routes that routes.csv does not list come last, by name."""
        place = {slug: index for index, slug in enumerate(self.slugs)}
        return sorted(set(slugs), key=lambda slug: (place.get(slug, len(place)), slug))

    def label(self, slug: str) -> str:
        return self.labels.get(slug, slug)
