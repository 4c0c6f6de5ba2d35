"""What is measured once per study, on its first seed."""


rule dgrad:
    input:
        ancient(PLAN.dgrad_source),
    output:
        PLAN.done("dgrad"),
    log:
        f"{RESULTS}/logs/dgrad.log",
    conda:
        "../../environment.yml"
    params:
        key=PLAN.key("dgrad", PLAN.study.dgrad.route),
        study=SETTINGS.told,
        results=PLAN.told,
        seed=PLAN.first_seed,
    shell:
        "python -m eval dgrad {params.study} --seed {params.seed} --results {params.results}"
        " --done {output} 2>&1 | tee {log}"


rule output_head:
    input:
        ancient(PLAN.done("data")),
    output:
        PLAN.done("output_head"),
    log:
        f"{RESULTS}/logs/output_head.log",
    conda:
        "../../environment.yml"
    resources:
        launch="python",
    params:
        key=PLAN.key("output_head", PLAN.study.output_head.route),
        study=SETTINGS.told,
        results=PLAN.told,
        seed=PLAN.first_seed,
    shell:
        "{resources.launch} -m fp4core head-screen {params.study} --seed {params.seed} --results {params.results}"
        " --done {output} 2>&1 | tee {log}"


rule boundary:
    output:
        PLAN.done("boundary"),
    log:
        f"{RESULTS}/logs/boundary.log",
    conda:
        "../../environment.yml"
    params:
        key=PLAN.key("boundary"),
        study=SETTINGS.told,
        results=PLAN.told,
    shell:
        "python -m fp4core bench boundary {params.study} --results {params.results} --done {output} 2>&1 | tee {log}"


rule traces:
    output:
        PLAN.done("traces"),
    log:
        f"{RESULTS}/logs/traces.log",
    conda:
        "../../environment.yml"
    params:
        results=PLAN.told,
    shell:
        "python -m eval traces --out {params.results}/traces --done {output} 2>&1 | tee {log}"
