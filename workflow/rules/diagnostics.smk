"""What is measured once per study, on its first seed."""


rule dgrad:
    input:
        ancient(
            PLAN.train_of(
                PLAN.study.dgrad.route, PLAN.first_seed, PLAN.study.dgrad.step
            )
        ),
    output:
        PLAN.done("dgrad"),
    log:
        f"{RESULTS}/logs/dgrad.log",
    conda:
        "../../environment.yml"
    resources:
        accelerator=PLAN.accelerator,
    params:
        stale=PLAN.stale,
        study=SETTINGS.told,
        results=PLAN.told,
        seed=PLAN.first_seed,
    shell:
        "rm -f {params.stale} && "
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
        accelerator=PLAN.accelerator,
        launch="python",
    params:
        stale=PLAN.stale,
        study=SETTINGS.told,
        results=PLAN.told,
        seed=PLAN.first_seed,
    shell:
        "rm -f {params.stale} && "
        "{resources.launch} -m fp4core head-screen {params.study} --seed {params.seed} --results {params.results}"
        " --done {output} 2>&1 | tee {log}"


rule boundary:
    output:
        PLAN.done("boundary"),
    log:
        f"{RESULTS}/logs/boundary.log",
    conda:
        "../../environment.yml"
    resources:
        accelerator=PLAN.accelerator,
    params:
        stale=PLAN.stale,
        study=SETTINGS.told,
        results=PLAN.told,
    shell:
        "rm -f {params.stale} && "
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
