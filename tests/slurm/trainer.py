"""Stands in for ``python -m fp4core train``: a run of numbered steps behind the project's own lock.

Copied as ``fp4core/__main__.py`` into a working directory. ``steps.log`` has a line per step, so it shows a
step that was done twice or left out; ``attempts.log`` has a line per process that came to hold the run. What
it does is in ``stub.json`` there: {"lock": path of fp4core/train/lock.py, "seconds": per step}. It pauses
while a file ``hold`` is there, and stops after SIGTERM as the real one does: exit 75, to be gone on with.
"""

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

settings = json.loads(Path("stub.json").read_text(encoding="utf-8"))
spec = importlib.util.spec_from_file_location("lock", settings["lock"])
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)
options = {sys.argv[i]: sys.argv[i + 1] for i in range(2, len(sys.argv) - 1) if sys.argv[i][:2] == "--"}
run = Path(options["--results"]) / "runs" / options["--route"] / f"s{options['--seed']}"
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append("SIGTERM"))


def note(word: str) -> None:
    with open(run / "attempts.log", "a", encoding="utf-8") as log:
        log.write(f"{word} {os.getpid()} job {os.environ.get('SLURM_JOB_ID')}\n")


try:
    with lock.run_lock(run):
        run.mkdir(parents=True, exist_ok=True)
        steps = run / "steps.log"
        done = len(steps.read_text().splitlines()) if steps.exists() else 0
        note(f"from {done}")
        for step in range(done + 1, int(options["--until"]) + 1):
            if stop:
                note(f"stopped by {stop[0]}")
                sys.exit(75)
            time.sleep(settings["seconds"])
            while Path("hold").exists() and not stop:
                time.sleep(0.1)
            with open(steps, "a", encoding="utf-8") as log:
                log.write(f"{step}\n")
except ValueError as error:
    with open(run.parent / "refused.log", "a", encoding="utf-8") as log:
        log.write(f"{error}\n")
    sys.exit(f"error: {error}")
Path(options["--done"]).parent.mkdir(parents=True, exist_ok=True)
Path(options["--done"]).write_text("{}\n", encoding="utf-8")
print("train: done")
