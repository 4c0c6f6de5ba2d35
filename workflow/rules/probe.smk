"""Throughput of a route: medians over a window of steps. Nothing else runs beside it on this machine."""


rule probe:
    input:
        ancient(PLAN.done("data")),
    output:
        PLAN.done("probe", "{route}", "{seed}"),
    log:
        f"{RESULTS}/logs/probe/{{route}}/s{{seed}}.log",
    conda:
        "../../environment.yml"
    resources:
        launch="python",
    params:
        key=lambda w: PLAN.key("probe", w.route),
        study=SETTINGS.told,
        results=PLAN.told,
    shell:
        "{resources.launch} -m fp4core probe {params.study} --route {wildcards.route} --seed {wildcards.seed}"
        " --results {params.results} --done {output} 2>&1 | tee {log}"
