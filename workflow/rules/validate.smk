"""NLL of every checkpoint that a training job left, on the one fixed stream."""


rule validate:
    input:
        ancient(PLAN.done("train", "{route}", "{seed}", "{segment}")),
    output:
        PLAN.done("validation", "{route}", "{seed}", "{segment}"),
    log:
        f"{RESULTS}/logs/validation/{{route}}/s{{seed}}/{{segment}}.log",
    conda:
        "../../environment.yml"
    params:
        key=lambda w: PLAN.key("validation", w.route),
        steps=lambda w: PLAN.cuts(w.segment),
        study=SETTINGS.told,
        results=PLAN.told,
    shell:
        "python -m eval validate {params.study} --route {wildcards.route} --seed {wildcards.seed}"
        " --results {params.results} --steps {params.steps} --done {output} 2>&1 | tee {log}"
