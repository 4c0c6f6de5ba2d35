"""Tidy tables to tables, figures and the report; no torch, no fp4core."""


rule tables:
    input:
        tidy=rules.collect.output,
        code=PLAN.drawing_code(workflow.basedir),
    output:
        PLAN.table_files(),
    log:
        f"{RESULTS}/logs/tables.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        results=PLAN.told,
    shell:
        "python -m figures tables --tidy {params.results}/tidy --out {params.results}/tables 2>&1 | tee {log}"


rule plots:
    input:
        tidy=rules.collect.output,
        code=PLAN.drawing_code(workflow.basedir),
    output:
        PLAN.figure_files(),
    log:
        f"{RESULTS}/logs/plots.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        results=PLAN.told,
    shell:
        "python -m figures plots --tidy {params.results}/tidy --out {params.results}/figures 2>&1 | tee {log}"


rule html:
    input:
        rules.tables.output,
        rules.plots.output,
    output:
        f"{RESULTS}/report.html",
    log:
        f"{RESULTS}/logs/report.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        results=PLAN.told,
    shell:
        "python -m figures report --tidy {params.results}/tidy --results {params.results} --out {output} 2>&1 | tee {log}"
