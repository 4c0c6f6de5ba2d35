"""A real Slurm on loopback: munged, slurmctld and four slurmd in one directory, started in a second.

Two "nodes" have eight GPUs each (device nodes like /dev/null), two have none. No accounting, no cgroups, no
systemd. Commands reach it through a folder of wrappers that comes first on PATH, because nested job steps
lose SLURM_CONF. Every process is ended by its own pid.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo", "sacct", "sacctmgr", "sshare")
GPU_NODES, CPU_NODES = ("n1", "n2"), ("c1", "c2")


def why_not() -> str | None:
    """Why no cluster can be started here; None when it can."""
    absent = [name for name in (*DAEMONS, "sbatch") if not _find(name)]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)}); Debian: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root (slurmd starts jobs as their users)"
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.mknod(Path(folder) / "gpu", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except OSError as error:
            return f"device nodes for the stand-in GPUs cannot be made here ({error.strerror})"
    return None


def _find(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin:/sbin")


def _ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """One cluster in a directory of its own; ``start`` it, use ``environment``, ``stop`` it."""

    def __init__(self) -> None:
        # short: a socket's path has at most 107 characters
        self.root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.processes: list[subprocess.Popen] = []

    def start(self) -> None:
        self._write()
        root = self.root
        munge = ["--foreground", "--force", f"--key-file={root}/munge.key", f"--socket={root}/munge.socket"]
        munge += [f"--{name}-file={root}/munge.{name}" for name in ("pid", "log", "seed")]
        self._launch("munged", *munge)
        self._wait(lambda: (root / "munge.socket").exists(), "munged")
        self._launch("slurmctld", "-D", "-f", root / "slurm.conf")
        for node in (*GPU_NODES, *CPU_NODES):
            self._launch("slurmd", "-D", "-N", node, "-f", root / "slurm.conf")
        self._wait(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * 4, "nodes")

    def _launch(self, name: str, *arguments: object) -> None:
        with open(self.root / f"{name}.out", "ab") as out:
            self.processes.append(
                subprocess.Popen(
                    [_find(name), *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env={**os.environ, "SLURM_CONF": str(self.root / "slurm.conf")},
                    start_new_session=True,
                )
            )

    def _wait(self, ready, what: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if ready():
                    return
            except (OSError, subprocess.SubprocessError):
                pass
            time.sleep(0.1)
        logs = "".join(f"\n{p.name}: {p.read_text(errors='replace')[-800:]}" for p in self.root.glob("*.out"))
        raise RuntimeError(f"{what} did not come up in {seconds:.0f} s{logs}")

    def stop(self) -> None:
        """Cancel what runs, end every daemon by its pid, remove the directory."""
        try:
            self.run("scancel", "--user=root", "--signal=KILL", "--full")
            self.run("scancel", "--user=root")
            self._wait(lambda: not self.run("squeue", "-h").strip(), "an empty queue", 20)
        except (OSError, subprocess.SubprocessError, RuntimeError):
            pass
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which Slurm's commands talk to this cluster."""
        return {**os.environ, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}"}

    def run(self, command: str, *arguments: object) -> str:
        """Standard output of a Slurm command; CalledProcessError when it fails."""
        done = subprocess.run(
            [self.root / "bin" / command, *map(str, arguments)],
            capture_output=True, text=True, timeout=60, check=True, env=self.environment,
        )  # fmt: skip
        return done.stdout

    def _write(self) -> None:
        root, host = self.root, socket.gethostname()
        (root / "munge.key").write_bytes(os.urandom(1024))
        (root / "munge.key").chmod(0o400)
        for name in ("state", "spool", "bin", "gpus"):
            (root / name).mkdir()
        for number in range(8):
            os.mknod(root / "gpus" / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        for name in COMMANDS:
            path = root / "bin" / name
            path.write_text(f'#!/bin/sh\nSLURM_CONF={root}/slurm.conf exec {_find(name)} "$@"\n')
            path.chmod(0o755)
        control, *nodes = _ports(5)
        lines = [
            "ClusterName=loopback",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={control}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={root}/munge.socket",
            "CredType=cred/munge",
            f"StateSaveLocation={root}/state",
            f"SlurmdSpoolDir={root}/spool/%n",
            f"SlurmctldPidFile={root}/slurmctld.pid",
            f"SlurmdPidFile={root}/slurmd-%n.pid",
            f"SlurmctldLogFile={root}/slurmctld.log",
            f"SlurmdLogFile={root}/slurmd-%n.log",
            "MpiDefault=none",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SwitchType=switch/none",
            "AccountingStorageType=accounting_storage/none",
            "ReturnToService=2",
            "KillWait=5",
            "MinJobAge=300",
            "JobRequeue=1",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            "SlurmdParameters=config_overrides",
            "GresTypes=gpu",
        ]
        for node, port in zip((*GPU_NODES, *CPU_NODES), nodes):
            gres = " Gres=gpu:8" if node in GPU_NODES else ""
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 "
                f"RealMemory=2000000{gres} State=UNKNOWN"
            )
        lines.append(f"PartitionName=gpu Nodes={','.join(GPU_NODES)} State=UP MaxTime=INFINITE")
        lines.append(f"PartitionName=cpu Nodes={','.join(CPU_NODES)} Default=YES State=UP MaxTime=INFINITE")
        (root / "slurm.conf").write_text("\n".join(lines) + "\n")
        (root / "gres.conf").write_text(f"Name=gpu File={root}/gpus/gpu[0-7]\n")
        (root / "cgroup.conf").write_text("")
