"""Slurm, with nodes that are all this machine: a controller and a daemon for each node, on ports of their own.

The nodes share the host's name, its network, pids, files and /dev/shm, and their own names lead nowhere. It needs
Linux, root and Slurm's programs (Debian's slurm-wlm).

The invariant: when the block is over, however it ended, its jobs and daemons are gone. Nothing of an installed Slurm's
configuration is read or changed.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from support.commands import run_command, wait_until

_CONFIGURATION = """
    ClusterName=paceline
    SlurmctldHost=localhost
    SlurmctldPort={controller_port}
    AuthType=auth/none
    CredType=cred/none
    SlurmUser=root
    SlurmdUser=root
    StateSaveLocation={folder}/state
    SlurmdSpoolDir={folder}/spool-%n
    SlurmctldPidFile={folder}/slurmctld.pid
    SlurmdPidFile={folder}/slurmd-%n.pid
    SlurmctldLogFile={folder}/slurmctld.log
    SlurmdLogFile={folder}/slurmd-%n.log
    ProctrackType=proctrack/linuxproc
    TaskPlugin=task/none
    JobAcctGatherType=jobacct_gather/none
    MpiDefault=none
    SchedulerType=sched/builtin
    SchedulerParameters=sched_interval=1,sched_min_interval=0
    SelectType=select/cons_tres
    SelectTypeParameters=CR_Core
    SlurmdParameters=config_overrides
    ReturnToService=2
    KillWait=2
    PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8\n"
_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")


@dataclass(frozen=True)
class Slurm:
    """A cluster that runs; ``folder`` is its own."""

    folder: pathlib.Path

    @property
    def env(self) -> dict[str, str | None]:
        """For commands that are to speak to this cluster, and scripts that are to find this python."""
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path, "OMP_NUM_THREADS": "1"}

    def run(self, *command: str, **options: Any) -> str:
        """What a command says that must succeed."""
        done = run_command(command, env=self.env, **options)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, cwd: pathlib.Path) -> str:
        """``sbatch ARGUMENTS``: the job's number."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd).strip()

    def is_idle(self) -> bool:
        """Whether all nodes are, and all has been heard of the jobs that they have had."""
        done = run_command(["sinfo", "--noheader", "--format=%T"], env=self.env)
        return done.stdout.split() == ["idle"]

    def state_of(self, job: str) -> str:
        """Such as PENDING, RUNNING, COMPLETED or FAILED."""
        return self._field(job, "JobState")

    def reason_of(self, job: str) -> str:
        """Why it waits, such as BeginTime."""
        return self._field(job, "Reason")

    def _field(self, job: str, name: str) -> str:
        found = re.search(rf"\b{name}=(\w+)", self.run("scontrol", "show", "job", job))
        assert found is not None
        return found[1]


def why_no_slurm() -> str | None:
    """What this machine lacks to run Slurm; None if nothing is known to be missing."""
    if os.geteuid() != 0:
        return "only root may run Slurm's daemons"
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(missing)} not found: install slurm-wlm" if missing else None


@contextlib.contextmanager
def slurm(folder: pathlib.Path, num_nodes: int = 2) -> Iterator[Slurm]:
    """A cluster of ``num_nodes`` nodes, n1 and so on, of 8 CPUs each; skips the test where there is no Slurm."""
    if reason := why_no_slurm():
        import pytest

        pytest.skip(reason)
    controller_port, *ports = _free_ports(1 + num_nodes)
    names = [f"n{number}" for number in range(1, num_nodes + 1)]
    nodes = [_NODE.format(name=name, port=port) for name, port in zip(names, ports, strict=True)]
    text = textwrap.dedent(_CONFIGURATION).format(folder=folder, controller_port=controller_port)
    (folder / "slurm.conf").write_text("".join(nodes) + text)
    (folder / "state").mkdir()
    cluster = Slurm(folder)
    with contextlib.ExitStack() as stack:
        for command in (["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in names)):
            stack.callback(_end, _start(cluster, command), folder)
        wait_until(cluster.is_idle)
        stack.callback(_cancel_all, cluster)
        yield cluster


def _start(cluster: Slurm, command: list[str]) -> "subprocess.Popen[bytes]":
    env = {name: value for name, value in {**os.environ, **cluster.env}.items() if value is not None}
    with (cluster.folder / "said").open("ab") as log:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _cancel_all(cluster: Slurm) -> None:
    def are_over() -> bool:
        return cluster.run("squeue", "--noheader") == ""

    if not are_over():
        cluster.run("scancel", "--user=root")
        with contextlib.suppress(AssertionError):  # what is left is killed with its daemon
            wait_until(are_over, 10.0)


def _end(daemon: "subprocess.Popen[bytes]", folder: pathlib.Path) -> None:
    """A daemon, and those who look after steps: they leave its process tree, but keep its configuration."""
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(10.0)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    for process in psutil.process_iter(["name", "environ"]):
        is_ours = (process.info["environ"] or {}).get("SLURM_CONF") == str(folder / "slurm.conf")
        if is_ours and process.info["name"].startswith("slurmstepd"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
