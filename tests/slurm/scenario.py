"""One Snakemake with the shipped profile on the loopback cluster, and what its single training job does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import yaml

from fp4core import recipe
from tests.slurm.cluster import Cluster
from tests.workflow.pipeline import ROOT, SNAKEMAKE, Project, make_project

# what a site with small jobs would ask for instead of the profile's eight GPUs and a day
SITE = (
    *("train:runtime=5", "train:mem_mb=1000", "train:cpus_per_task=2", "train:gres=gpu:1"),
    *("train:launch=python", "train:slurm_partition=gpu", "train:slurm_extra=--requeue --open-mode=append"),
)


class Scenario:
    """A project whose only missing file is one training marker; the trainer is tests/slurm/trainer.py."""

    def __init__(self, cluster: Cluster, folder: Path, *, steps: int, seconds: float) -> None:
        self.cluster, self.folder, self.steps = cluster, folder, steps
        self.project: Project = make_project(folder, ("bf16",))
        data = recipe.to_dict(recipe.load_study("tiny", folder / "recipes"))
        data["train"].update(steps=steps, cuts=[steps], endpoint_step=steps)
        data["downstream"]["step"] = data["dgrad"]["step"] = steps
        self.project.study().write_text(yaml.safe_dump(data), encoding="utf-8")
        shutil.copy(Path(__file__).with_name("trainer.py"), folder / "fp4core" / "__main__.py")
        lock = str(ROOT / "fp4core" / "train" / "lock.py")
        (folder / "stub.json").write_text(json.dumps({"lock": lock, "seconds": seconds}), encoding="utf-8")
        plan = recipe.make_plan({"study": "tiny", "recipes": str(folder / "recipes")})[1]
        self.marker = plan.done("train", "bf16", 0, plan.segments[-1].name)
        data_marker = folder / plan.done("data")
        data_marker.parent.mkdir(parents=True)
        data_marker.write_text("{}\n", encoding="utf-8")
        self.run = folder / "results" / "tiny" / "runs" / "bf16" / "s0"
        self.process: subprocess.Popen | None = None

    def start(self, *options: str, site: tuple[str, ...] = ()) -> None:
        """Start Snakemake in the background; its output is in snakemake.log."""
        command = [
            *(SNAKEMAKE, "--profile", "slurm", "-s", ROOT / "Snakefile", "--directory", self.folder),
            *("--slurm-init-seconds-before-status-checks", "5", "--slurm-no-account", *options),
            *("--set-resources", *SITE, *site),
            *("--config", f"recipes={self.folder / 'recipes'}", "study=tiny", "--", self.marker),
        ]
        with open(self.folder / "snakemake.log", "ab") as log:
            self.process = subprocess.Popen(
                list(map(str, command)),
                cwd=ROOT, stdout=log, stderr=log, env=self.cluster.environment, start_new_session=True,
            )  # fmt: skip

    def unlock(self) -> None:
        command = [SNAKEMAKE, "--profile", "slurm", "-s", ROOT / "Snakefile", "--directory", self.folder]
        config = ("--unlock", "--config", f"recipes={self.folder / 'recipes'}", "study=tiny")
        subprocess.run(
            list(map(str, [*command, *config])),
            cwd=ROOT, env=self.cluster.environment, check=True, capture_output=True, timeout=120,
        )  # fmt: skip

    @property
    def log(self) -> str:
        return (self.folder / "snakemake.log").read_text(encoding="utf-8", errors="replace")

    def lines(self, name: str) -> list[str]:
        path = self.run / name if name != "refused.log" else self.run.parent / name
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    @property
    def attempts(self) -> list[str]:
        """What the processes that held the run said: "from K" and "stopped by WHY"."""
        return [line.split(" job ")[0].rpartition(" ")[0] for line in self.lines("attempts.log")]

    def jobs(self) -> list[str]:
        """Slurm jobs that held the run, in order, each once."""
        return list(dict.fromkeys(line.split(" job ")[1] for line in self.lines("attempts.log")))

    def wait(self, ready, what: str, seconds: float = 300) -> None:
        """Wait until ``ready()``; AssertionError with Snakemake's log otherwise."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if ready():
                return
            time.sleep(0.2)
        raise AssertionError(f"{what}: not within {seconds:.0f} s\n{self.log[-3000:]}")

    def wait_for_steps(self, count: int) -> None:
        self.wait(lambda: len(self.lines("steps.log")) >= count, f"{count} steps")

    def finish(self, seconds: float = 300) -> int:
        """Exit code of Snakemake."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"Snakemake still runs after {seconds:.0f} s\n{self.log[-3000:]}") from None

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)

    def assert_whole(self) -> None:
        """Every step was done once: nothing lost, nothing done twice, no two writers."""
        assert self.lines("steps.log") == [str(n) for n in range(1, self.steps + 1)]
