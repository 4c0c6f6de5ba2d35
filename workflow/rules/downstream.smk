"""Export one checkpoint, prove the export, score it on the benchmarks."""


rule downstream:
    input:
        lambda w: ancient(PLAN.train_of(w.route, w.seed, PLAN.study.downstream.step)),
    output:
        PLAN.marker("downstream"),
    log:
        f"{RESULTS}/logs/downstream/{{route}}/s{{seed}}-{{key}}.log",
    conda:
        "../../environment.yml"
    resources:
        accelerator=PLAN.accelerator,
    params:
        stale=PLAN.stale,
        study=SETTINGS.told,
        inputs=SETTINGS.told_inputs,
        results=PLAN.told,
    shell:
        "rm -f {params.stale} && "
        "python -m eval downstream {params.study} --route {wildcards.route} --seed {wildcards.seed}"
        " {params.inputs} --results {params.results} --done {output} 2>&1 | tee {log}"
