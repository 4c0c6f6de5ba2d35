"""Recipes, studies and inputs: typed, checked, hashed. Imports neither torch nor numpy.

A recipe (``recipes/routes/ROUTE.yaml``) says how each linear is quantised, a study
(``recipes/studies/STUDY.yaml``) says what is trained and measured, ``inputs.yaml`` binds local files.
All three are dataclasses; YAML is checked against them with one line per mistake, and
``python -m fp4core.recipe schemas`` writes the JSON Schema that editors use from the same types.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4core._recipe_files import BoundFiles
from fp4core._recipe_inputs import Inputs, inputs_from_dict, load_inputs, missing_inputs, verify_binding
from fp4core._recipe_load import ConfigError, build, fail, nearest, read_yaml, schema, to_plain
from fp4core._recipe_plan import FIGURES, TABLES, Plan, WorkflowConfig, find_commands, missing_logs_message
from fp4core._recipe_published import STUDY as PUBLISHED
from fp4core._recipe_published import PublishedPlan, role_of
from fp4core._recipe_records import RECORDS
from fp4core._recipe_route import (
    BlockGroup,
    Dgrad,
    Fprop,
    LinearRecipe,
    Operand,
    Recipe,
    Wgrad,
    digest,
    operand_formats,
    operands,
    read_route,
    recipe_from_dict,
)
from fp4core._recipe_study import (
    STAGES,
    TASKS,
    BoundaryConfig,
    DataConfig,
    DgradConfig,
    DownstreamConfig,
    Geometry,
    HeadConfig,
    ModelConfig,
    ProbeConfig,
    RopeConfig,
    Study,
    TaskConfig,
    TrainConfig,
    ValidationConfig,
    study_from_dict,
)

__all__ = [
    "FIGURES",
    "PUBLISHED",
    "STAGES",
    "TABLES",
    "TASKS",
    "BlockGroup",
    "BoundFiles",
    "BoundaryConfig",
    "ConfigError",
    "DataConfig",
    "Dgrad",
    "DgradConfig",
    "DownstreamConfig",
    "Fprop",
    "Geometry",
    "HeadConfig",
    "Inputs",
    "LinearRecipe",
    "ModelConfig",
    "Operand",
    "Plan",
    "ProbeConfig",
    "Recipe",
    "RopeConfig",
    "Study",
    "TaskConfig",
    "TrainConfig",
    "ValidationConfig",
    "Wgrad",
    "WorkflowConfig",
    "digest",
    "find_commands",
    "from_dict",
    "inputs_from_dict",
    "list_routes",
    "load_inputs",
    "load_recipe",
    "load_study",
    "make_plan",
    "missing_inputs",
    "operand_formats",
    "operands",
    "recipes_dir",
    "schemas",
    "study_from_dict",
    "study_routes",
    "to_dict",
    "verify_binding",
]

_ROOT = Path(__file__).resolve().parents[1]
# a checkout has its own recipes; an installed package has them beside its other data
_PLACES = (_ROOT / "recipes", Path(sys.prefix) / "share" / "fp4core" / "recipes")
_DEFAULT = next((place for place in _PLACES if (place / "routes").is_dir()), _PLACES[0])


def recipes_dir(directory: str | Path | None = None) -> Path:
    """The folder that holds routes/ and studies/; the repository's own unless ``directory`` is given."""
    path = Path(directory) if directory else _DEFAULT
    if not (path / "routes").is_dir():
        fail(str(path), "", "no recipes here: needed a folder that holds routes/ (and studies/)")
    return path


def to_dict(config: Any) -> Any:
    """Plain data of a Recipe, Study or Inputs, ready for JSON; ``from_dict`` is its inverse."""
    return to_plain(config)


def from_dict(data: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """A checked Recipe from plain data. Raises ConfigError (a ValueError)."""
    return recipe_from_dict(data, where)


def load_recipe(path_or_route: str | Path, directory: str | Path | None = None) -> Recipe:
    """The recipe in a YAML file, or of a route's name. Raises ConfigError with one line per mistake."""
    return read_route(_find(path_or_route, "routes", "route", directory))


def list_routes(directory: str | Path | None = None) -> list[str]:
    """Slugs of all routes in table order (``order``, then slug). A broken file raises ConfigError."""
    files = sorted((recipes_dir(directory) / "routes").glob("*.yaml"))
    recipes = [read_route(path) for path in files]
    return [recipe.route for recipe in sorted(recipes, key=lambda r: (r.order, r.route))]


def load_study(path_or_name: str | Path, directory: str | Path | None = None) -> Study:
    """The study in a YAML file, or of a study's name. Raises ConfigError with one line per mistake."""
    path = _find(path_or_name, "studies", "study", directory)
    study = study_from_dict(read_yaml(path), str(path))
    if study.study != path.stem:
        fail(str(path), "study", f"got {study.study!r}, needed {path.stem!r}, the name of the file")
    return study


def study_routes(study: Study, directory: str | Path | None = None) -> dict[str, Recipe]:
    """Route -> Recipe of the study, in table order. Raises ConfigError for a name without a file."""
    known = list_routes(directory)
    chosen = known if study.routes == "all" else study.routes
    named = [(f"routes[{i}]", r) for i, r in enumerate(chosen)]
    named += [("dgrad.route", study.dgrad.route), ("output_head.route", study.output_head.route)]
    named += [("probe.selected", r) for r in study.probe.selected]
    for key, route in named:
        if route not in known:
            fail(
                f"study {study.study}",
                key,
                f"got {route!r}; allowed: {', '.join(known)}{nearest(route, known)}",
            )
    recipes = {route: load_recipe(route, directory) for route in known if route in chosen}
    if study.dgrad.route not in recipes:
        got = study.dgrad.route
        fail(
            f"study {study.study}",
            "dgrad.route",
            f"got {got!r}, needed a route of the study: {', '.join(recipes)}",
        )
    for recipe in recipes.values():
        recipe.starts(study.model.blocks)  # a model too shallow for the route's groups
    return recipes


def make_plan(config: Mapping[str, Any]) -> tuple[WorkflowConfig, Plan]:
    """The workflow's ``--config``, checked, and what its study runs.

    Raises ConfigError for a mistake in the configuration, in a recipe or in the study, for a study whose
    inputs are not bound, and for logs that ``from_logs`` lacks.
    """
    settings = build(WorkflowConfig, dict(config), "--config")
    if settings.study == PUBLISHED or settings.published is not None:
        return settings, _published_plan(settings)
    study = load_study(settings.study, settings.recipes)
    recipes = study_routes(study, settings.recipes)
    results = f"{settings.results}/{study.study}"
    if settings.from_logs is not None:
        plan = Plan(study, recipes, results)
        missing = plan.missing_logs(settings.from_logs)
        if missing:
            raise ConfigError(missing_logs_message(settings.from_logs, missing))
        return settings, plan
    missing = missing_inputs(study, settings.inputs)
    if missing:
        lines = "".join(f"\n  {line}" for line in missing)
        raise ConfigError(
            f"study {study.study}: nothing is started, these inputs are missing:{lines}\n"
            f"  then `python -m fp4core doctor --study {settings.study}` checks GPUs, memory, disk and time"
        )
    inputs = load_inputs(settings.inputs) if study.data.source == "bound" else None
    return settings, Plan(study, recipes, results, inputs)


def _published_plan(settings: WorkflowConfig) -> PublishedPlan:
    """What the author's files at hand allow to be drawn."""
    if settings.study != PUBLISHED:
        fail("--config", "published", f"belongs to study={PUBLISHED}, got study={settings.study}")
    if settings.from_logs is not None:
        fail("--config", "from_logs", f"study {PUBLISHED} draws the author's files; give one of the two")
    bound = None
    if settings.published is not None:
        directory = Path(settings.published)
        names = [path.name for path in directory.glob("*.csv")]
    else:
        path = Path(settings.inputs)
        binding = load_inputs(path).published if path.is_file() else None
        if binding is None:
            fail(f"study {PUBLISHED}", "", "no files: --config published=DIR, or fp4core bind published DIR")
        bound, directory = settings.inputs, path.parent / binding.directory
        names = list(binding.sha256)
    files = tuple(sorted(name for name in names if role_of(name) and (directory / name).is_file()))
    if not files:
        fail(str(directory), "", "none of the author's public files is here (fp4core/_recipe_published.py)")
    study = load_study("report", settings.recipes)
    recipes = {k: r for k, r in study_routes(study, settings.recipes).items() if r.in_report}
    results = f"{settings.results}/{PUBLISHED}"
    return PublishedPlan(study, recipes, results, None, str(directory), files, bound)


def _find(path_or_name: str | Path, folder: str, kind: str, directory: str | Path | None) -> Path:
    text = str(path_or_name)
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return Path(text)
    base = recipes_dir(directory) / folder
    path = base / f"{text}.yaml"
    if not path.is_file():
        names = sorted(p.stem for p in base.glob("*.yaml"))
        fail(
            f"{kind} {text!r}", "", f"unknown; allowed: {', '.join(names) or '(none)'}{nearest(text, names)}"
        )
    return path


def schemas() -> dict[str, dict[str, Any]]:
    """File name -> JSON Schema 2020-12 of everything a user writes and of what a run writes."""
    return {
        "recipe.schema.json": schema(Recipe, "recipe", "One route: recipes/routes/ROUTE.yaml"),
        "study.schema.json": schema(Study, "study", "One study: recipes/studies/STUDY.yaml"),
        "config.schema.json": schema(WorkflowConfig, "config", "The workflow's --config"),
        "inputs.schema.json": schema(Inputs, "inputs", "Local files bound by hash: inputs.yaml"),
        **{f"{name}.schema.json": schema(cls, name, text) for name, (cls, text) in RECORDS.items()},
    }


def main(argv: list[str]) -> int:
    """``python -m fp4core.recipe schemas [DIR]`` writes the schemas; ``check [DIR]`` reads every recipe."""
    if argv[:1] == ["schemas"] and len(argv) <= 2:
        folder = Path(argv[1]) if len(argv) == 2 else _ROOT / "schemas"
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in schemas().items():
            (folder / name).write_text(
                json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            print(folder / name)
        return 0
    if argv[:1] == ["check"] and len(argv) <= 2:
        try:
            base = recipes_dir(argv[1] if len(argv) == 2 else None)
            for route in list_routes(base):
                print(f"{route}: {load_recipe(route, base).hash}")
            for path in sorted((base / "studies").glob("*.yaml")):
                print(f"{path.stem}: {len(study_routes(load_study(path), base))} routes")
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
    print("error: usage: python -m fp4core.recipe schemas|check [DIR]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
