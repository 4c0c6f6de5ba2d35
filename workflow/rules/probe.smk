"""Throughput of a route: medians over a window of steps. Nothing else runs beside it on this machine."""


rule probe:
    input:
        ancient(PLAN.done("data")),
    output:
        PLAN.marker("probe"),
    log:
        f"{RESULTS}/logs/probe/{{route}}/s{{seed}}-{{key}}.log",
    conda:
        "../../environment.yml"
    resources:
        accelerator=PLAN.accelerator,
        launch="python",
    params:
        stale=PLAN.stale,
        study=SETTINGS.told,
        results=PLAN.told,
    shell:
        "rm -f {params.stale} && "
        "{resources.launch} -m fp4core probe {params.study} --route {wildcards.route} --seed {wildcards.seed}"
        " --results {params.results} --done {output} 2>&1 | tee {log}"
