"""Stands in for ``python -m fp4core|eval|figures``: records its command and leaves what the rule declares.

Copied by the fixture into a working directory, where ``python -m`` finds it before the real package. Reads
``stub.json`` there: {"outputs": {"collect": [...], "tables": [...], ...}}.
"""

import json
import sys
from pathlib import Path

package = Path(__file__).parent.name
command, *rest = sys.argv[1:]
options = {rest[i]: rest[i + 1] for i in range(len(rest) - 1) if rest[i].startswith("--")}
with open("calls.log", "a", encoding="utf-8") as calls:
    calls.write(" ".join([package, *sys.argv[1:]]) + "\n")

declared = json.loads(Path("stub.json").read_text(encoding="utf-8"))["outputs"]
made = declared.get(command, [])
if "--done" in options:
    made = [*made, options["--done"]]
if command == "report":
    made = [options["--out"]]
if command == "train":  # a log that must outlive every rerun: one line per attempt
    run = Path(options["--results"]) / "runs" / options["--route"] / f"s{options['--seed']}"
    run.mkdir(parents=True, exist_ok=True)
    with open(run / "attempts.log", "a", encoding="utf-8") as log:
        log.write(options["--until"] + "\n")
for name in made:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("stub\n", encoding="utf-8")
print(f"{package} {command}: done")
