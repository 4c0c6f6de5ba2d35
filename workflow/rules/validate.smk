"""NLL of every checkpoint that a training job left, on the one fixed stream."""


rule validate:
    input:
        lambda w: ancient(PLAN.done("train", w.route, w.seed, w.segment)),
    output:
        PLAN.marker("validation", "{segment}"),
    log:
        f"{RESULTS}/logs/validation/{{route}}/s{{seed}}/{{segment}}-{{key}}.log",
    conda:
        "../../environment.yml"
    resources:
        accelerator=PLAN.accelerator,
    params:
        stale=PLAN.stale,
        steps=lambda w: PLAN.cuts(w.segment),
        study=SETTINGS.told,
        results=PLAN.told,
    shell:
        "rm -f {params.stale} && "
        "python -m eval validate {params.study} --route {wildcards.route} --seed {wildcards.seed}"
        " --results {params.results} --steps {params.steps} --done {output} 2>&1 | tee {log}"
