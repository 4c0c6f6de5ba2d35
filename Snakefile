"""From text to every table and figure: includes and named targets; each stage is a file in workflow/rules."""

import sys

from snakemake.exceptions import WorkflowError

sys.path.insert(0, str(workflow.basedir))
from fp4core import recipe

recipe.find_commands(workflow.basedir)
try:
    SETTINGS, PLAN = recipe.make_plan(config)
except recipe.ConfigError as error:
    raise WorkflowError(str(error))

RESULTS = PLAN.results
LOGS = SETTINGS.from_logs or RESULTS


wildcard_constraints:
    route="|".join(PLAN.recipes),
    seed=r"\d+",
    segment=r"step-\d{8}",
    key=r"[0-9a-f]{12}",


localrules:
    all,
    all_tables,
    all_figures,
    report,


rule all:
    input:
        PLAN.table_files(),
        PLAN.figure_files(),
        f"{RESULTS}/report.html",


rule all_tables:
    input:
        PLAN.table_files(),


rule all_figures:
    input:
        PLAN.figure_files(),


rule report:
    input:
        f"{RESULTS}/report.html",


if SETTINGS.study == recipe.PUBLISHED:

    include: "workflow/rules/published.smk"

elif SETTINGS.from_logs is None:

    include: "workflow/rules/data.smk"
    include: "workflow/rules/train.smk"
    include: "workflow/rules/probe.smk"
    include: "workflow/rules/validate.smk"
    include: "workflow/rules/downstream.smk"
    include: "workflow/rules/diagnostics.smk"
    include: "workflow/rules/routes.smk"
    include: "workflow/rules/pretrained.smk"


if SETTINGS.study != recipe.PUBLISHED:

    include: "workflow/rules/collect.smk"


include: "workflow/rules/figures.smk"
