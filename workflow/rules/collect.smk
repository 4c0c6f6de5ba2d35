"""Logs to tidy tables: the only writer of tables, and it checks every manifest first."""


rule collect:
    input:
        PLAN.all_done() if SETTINGS.from_logs is None else PLAN.logs_in(LOGS),
    output:
        PLAN.tidy_files(),
    log:
        f"{RESULTS}/logs/collect.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        key=PLAN.tables_key(),
        logs=lambda w: LOGS,
        study=SETTINGS.told,
        results=PLAN.told,
    shell:
        "python -m eval collect {params.study} --logs {params.logs} --out {params.results}/tidy 2>&1 | tee {log}"
