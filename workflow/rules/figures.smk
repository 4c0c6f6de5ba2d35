"""Tidy tables to tables, figures and the report; no torch, no fp4core."""


rule tables:
    input:
        tidy=PLAN.tidy_files(),
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
        partial=PLAN.partial,
    shell:
        "python -m figures tables --tidy {params.results}/tidy --out {params.results}/tables"
        " {params.partial} 2>&1 | tee {log}"


rule plots:
    input:
        tidy=PLAN.tidy_files(),
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
        partial=PLAN.partial,
    shell:
        "python -m figures plots --tidy {params.results}/tidy --out {params.results}/figures"
        " {params.partial} 2>&1 | tee {log}"


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
        partial=PLAN.partial,
    shell:
        "python -m figures report --tidy {params.results}/tidy --results {params.results} --out {output}"
        " {params.partial} 2>&1 | tee {log}"
