"""The shipped profile on a real Slurm: one route end to end on two nodes, and what may happen to a job.

All cases run side by side on one cluster, since most of their time is waiting for Slurm; hence one test with
a subtest per case. In every case the log of steps must be whole: nothing lost, nothing done twice, no two
writers in a run directory.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.slurm import real
from tests.slurm.cluster import Cluster, why_not
from tests.slurm.scenario import Scenario
from tests.workflow.pipeline import ROOT, SNAKEMAKE

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.slow,
]


def limit(s: Scenario) -> int:
    """The job reaches its wall-clock limit of a minute; Snakemake tries again."""
    s.start(site=("train:runtime=1",))
    return s.finish()


def requeue(s: Scenario) -> int:
    """An administrator requeues the job: the same job starts again, Snakemake keeps waiting."""
    s.start()
    s.wait_for_steps(3)
    job = s.jobs()[-1]
    s.cluster.run("scontrol", "requeue", job)
    s.wait(lambda: s.attempts[-1] == "stopped by SIGTERM", "the first start to stop")

    def again() -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):  # else it is held for two minutes
            s.cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(1)
        return len(s.attempts) > 2

    s.wait(again, "the requeued job to start")
    return s.finish()


def cancel(s: Scenario) -> int:
    """Someone cancels the job behind Snakemake's back: noticed, tried again."""
    s.start()
    s.wait_for_steps(3)
    s.cluster.run("scancel", s.jobs()[-1])
    return s.finish()


def interrupt(s: Scenario) -> tuple[int, bool, int]:
    """Ctrl-C: the job is cancelled at once, a rerun needs no unlocking. Codes, and whether the job left."""
    s.start()
    s.wait_for_steps(3)
    s.signal(signal.SIGINT)
    first = s.finish()
    s.wait(lambda: s.attempts[-1].startswith("stopped"), "the job to stop")
    gone = s.jobs()[-1] not in s.cluster.run("squeue", "-h", "-t", "R,PD", "-o", "%i").split()
    s.start()
    return first, gone, s.finish()


def kill(s: Scenario) -> tuple[int, int]:
    """Snakemake dies; the job lives on, and the rerun's job must not write beside it. Codes of the reruns."""
    (s.folder / "hold").touch()
    s.start("--retries", "0")
    s.wait(lambda: s.attempts, "the job to start")
    s.signal(signal.SIGKILL)
    s.finish()
    s.unlock()
    s.start("--retries", "0")
    second = s.finish()
    (s.folder / "hold").unlink()
    s.wait_for_steps(s.steps)
    s.start("--retries", "0")
    return second, s.finish()


def end_to_end(cluster: Cluster, folder: Path) -> subprocess.CompletedProcess[str]:
    """data, probe, two-node training, validation, export and benchmarks of one route, all through sbatch."""
    real.make_study(folder)
    command = [
        *(SNAKEMAKE, "--profile", "slurm", "-s", ROOT / "Snakefile", "--directory", folder),
        *("--slurm-init-seconds-before-status-checks", "5", "--slurm-no-account", "--retries", "0"),
        *("--set-resources", *real.TWO_NODES),
        *("--config", f"recipes={folder / 'recipes'}", "study=tiny", "--", "recipe_bf16"),
    ]
    return subprocess.run(
        list(map(str, command)),
        cwd=ROOT, env={**cluster.environment, "GLOO_SOCKET_IFNAME": "lo"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400, check=False,
    )  # fmt: skip


CASES: dict[str, tuple[Callable, dict]] = {
    "limit": (limit, {"steps": 100, "seconds": 1.0}),
    "requeue": (requeue, {"steps": 12, "seconds": 0.5}),
    "cancel": (cancel, {"steps": 12, "seconds": 0.5}),
    "interrupt": (interrupt, {"steps": 12, "seconds": 0.5}),
    "kill": (kill, {"steps": 6, "seconds": 0.2}),
}


class Lab:
    """The cluster with every case under way."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cluster = folder, Cluster()
        try:
            self.cluster.start()
        except BaseException:
            self.cluster.stop()
            raise
        self.pool = ThreadPoolExecutor(len(CASES) + 1)
        self.scenarios: dict[str, Scenario] = {}
        self.futures: dict[str, Future] = {
            "end_to_end": self.pool.submit(end_to_end, self.cluster, folder / "real")
        }
        for name, (script, settings) in CASES.items():
            self.scenarios[name] = Scenario(self.cluster, folder / name, **settings)
            self.futures[name] = self.pool.submit(script, self.scenarios[name])

    def result(self, name: str):
        """(scenario, what its script returned)."""
        return self.scenarios.get(name), self.futures[name].result(420)

    def close(self) -> None:
        for scenario in self.scenarios.values():
            scenario.close()
        self.cluster.stop()
        self.pool.shutdown(wait=False, cancel_futures=True)


def check_kill(lab: Lab) -> None:
    s, (second, third) = lab.result("kill")
    assert second == 1, s.log[-3000:]
    (refused,) = s.lines("refused.log")
    assert "another process owns this run (pid " in refused
    assert third == 0, s.log[-3000:]
    s.assert_whole()
    assert s.attempts[0] == "from 0"
    assert set(s.attempts[1:]) <= {f"from {s.steps}"}  # a later job found nothing left to do
    assert (s.folder / s.marker).is_file()


def check_cancel(lab: Lab) -> None:
    s, code = lab.result("cancel")
    assert code == 0, s.log[-3000:]
    s.assert_whole()
    first, stopped, again = s.attempts
    assert (first, stopped) == ("from 0", "stopped by SIGTERM") and int(again.split()[1]) >= 3
    assert len(s.jobs()) == 2


def check_interrupt(lab: Lab) -> None:
    s, (first, gone, second) = lab.result("interrupt")
    assert first == 1 and gone, s.log[-3000:]
    assert second == 0, s.log[-3000:]
    s.assert_whole()
    assert s.attempts[:2] == ["from 0", "stopped by SIGTERM"]
    assert len(s.jobs()) == 2


def check_requeue(lab: Lab) -> None:
    s, code = lab.result("requeue")
    assert code == 0, s.log[-3000:]
    s.assert_whole()
    assert len(s.attempts) == 3 and int(s.attempts[2].split()[1]) >= 3
    assert len(s.jobs()) == 1


def check_limit(lab: Lab) -> None:
    s, code = lab.result("limit")
    assert code == 0, s.log[-3000:]
    s.assert_whole()
    assert len(s.jobs()) == 2
    first, stopped, again = s.attempts
    assert (first, stopped) == ("from 0", "stopped by SIGTERM")
    assert int(again.split()[1]) >= 30  # what was done before the limit was kept
    assert "JobState=TIMEOUT" in lab.cluster.run("scontrol", "show", "job", s.jobs()[0])


def check_end_to_end(lab: Lab) -> None:
    """Every stage of a route, one job each."""
    _, done = lab.result("end_to_end")
    assert done.returncode == 0, done.stdout[-5000:]
    results = lab.folder / "real" / "results" / "tiny"
    for stage in ("train", "probe", "validation", "downstream"):
        assert list((results / "done" / stage / "bf16").rglob("*.json")), stage
    assert done.stdout.count("has been submitted with SLURM jobid") == 5


def check_two_nodes(lab: Lab) -> None:
    """Its training was one run of two processes, each on a node of its own."""
    lab.result("end_to_end")
    run = lab.folder / "real" / "results" / "tiny" / "runs" / "bf16" / "s0"
    (start,) = json.loads((run / "manifest.json").read_text())["starts"]
    assert (start["world_size"], start["local_batch"], start["accumulation"]) == (2, 1, 1)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "complete" and summary["steps"] == 4
    assert pq.read_table(run / "metrics.parquet")["step"].to_pylist() == [1, 2, 3, 4]
    jobs = lab.cluster.run("scontrol", "show", "jobs", "--oneliner").splitlines()
    (train,) = [job for job in jobs if "rule_train" in job and str(lab.folder / "real") in job]
    assert "NumNodes=2" in train and "Partition=gpu" in train and "TresPerNode=gres:gpu:1" in train


CHECKS = {
    "SIGKILL of Snakemake: the rerun's job stays out of a run that is alive": check_kill,
    "scancel from outside is noticed and tried again": check_cancel,
    "SIGINT to Snakemake takes its jobs along": check_interrupt,
    "scontrol requeue: the same job goes on": check_requeue,
    "one route end to end": check_end_to_end,
    "training on two nodes through torchrun": check_two_nodes,
    "wall-clock limit: the next job goes on": check_limit,
}


def test_shipped_profile_on_a_real_slurm(tmp_path: Path, subtests: pytest.Subtests) -> None:
    lab = None
    try:
        lab = Lab(tmp_path)
        for name, check in CHECKS.items():
            with subtests.test(name):
                check(lab)
    finally:
        if lab:
            lab.close()
