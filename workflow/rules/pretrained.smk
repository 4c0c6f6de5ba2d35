"""A real pretrained model, only when asked for: scores by format, and the Dgrad diagnostic on its tensors.

Needs requirements-pretrained.txt; the command says so where it is not installed.
"""


rule pretrained:
    input:
        ancient(PLAN.done("data")),
    output:
        f"{SETTINGS.results}/pretrained/done.json",
    log:
        f"{SETTINGS.results}/pretrained/pretrained.log",
    conda:
        "../../environment.yml"
    threads: 2
    resources:
        accelerator=PLAN.accelerator,
    params:
        key=PLAN.key("data"),
        recipes=[PLAN.recipes[r].hash for r in PLAN.recipes],
        routes="bf16 te_nvfp4 nvfp4_global mxfp4_sr nvfp4_cta ue5m3",
        sizes="--items 10 --sequences 4 --gradients 2 --length 256",
        study=SETTINGS.told,
        results=PLAN.told,
    shell:
        "( out=$(dirname {output})"
        " && python -m eval pretrained {params.study} --results {params.results} --out $out"
        " --routes {params.routes} {params.sizes} --done {output}"
        " && python -m figures tables --tidy $out/tidy --only table12 --out $out/tables"
        " && python -m figures plots --tidy $out/tidy --only fig12 --out $out/figures"
        " ) 2>&1 | tee {log}"
