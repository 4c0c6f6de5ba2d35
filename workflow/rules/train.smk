"""Long trajectories. A study with segments per cut has a job per cut, so that evaluation need not wait.

A job stops itself at 95% of its runtime and the next attempt goes on (profile: retries).
"""


rule train:
    input:
        data=ancient(PLAN.done("data")),
        before=lambda w: ancient(PLAN.train_before(w.route, w.seed, w.segment)),
    output:
        PLAN.marker("train", "{segment}"),
    log:
        f"{RESULTS}/logs/train/{{route}}/s{{seed}}/{{segment}}-{{key}}.log",
    conda:
        "../../environment.yml"
    resources:
        accelerator=PLAN.accelerator,
        runtime=10080,
        launch="python",
    params:
        stale=PLAN.stale,
        until=lambda w: PLAN.until(w.segment),
        study=SETTINGS.told,
        results=PLAN.told,
    shell:
        "rm -f {params.stale} && "
        "{resources.launch} -m fp4core train {params.study} --route {wildcards.route} --seed {wildcards.seed}"
        " --results {params.results} --until {params.until} --max-seconds $(( {resources.runtime} * 57 ))"
        " --done {output} 2>&1 | tee {log}"
