"""Tokenizer, training shards and the fixed validation stream."""


rule data:
    output:
        PLAN.done("data"),
    log:
        f"{RESULTS}/logs/data.log",
    conda:
        "../../environment.yml"
    params:
        stale=PLAN.stale,
        study=SETTINGS.told,
        inputs=SETTINGS.told_inputs,
        results=PLAN.told,
    shell:
        "rm -f {params.stale} && "
        "python -m fp4core data {params.study} {params.inputs} --out {params.results}/data"
        " --done {output} 2>&1 | tee {log}"
