"""The author's public files to tidy tables; everything after that is drawn as one's own results are."""


rule published:
    input:
        PLAN.bound_files(),
    output:
        PLAN.tidy_files(),
    log:
        f"{RESULTS}/logs/published.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        source=PLAN.source,
        recipes=SETTINGS.told_recipes,
        results=PLAN.told,
    shell:
        "python -m eval published {params.source} {params.recipes} --out {params.results}/tidy 2>&1 | tee {log}"
