"""Export one checkpoint, prove the export, score it on the benchmarks."""


rule downstream:
    input:
        ancient(PLAN.done("train", "{route}", "{seed}", PLAN.downstream_segment)),
    output:
        PLAN.done("downstream", "{route}", "{seed}"),
    log:
        f"{RESULTS}/logs/downstream/{{route}}/s{{seed}}.log",
    conda:
        "../../environment.yml"
    params:
        key=lambda w: PLAN.key("downstream", w.route),
        study=SETTINGS.told,
        results=PLAN.told,
    shell:
        "python -m eval downstream {params.study} --route {wildcards.route} --seed {wildcards.seed}"
        " --results {params.results} --done {output} 2>&1 | tee {log}"
