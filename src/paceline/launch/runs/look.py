"""This user's runs on this host, and what launchers that have died have left behind.

Its invariant: a launcher that runs, and what descends from it, is never left over; nor is whoever asks.
"""

import os
import pathlib
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from paceline.processes import Launcher, is_own, launcher_of, read_stat, spell_command


@dataclass(frozen=True)
class Process:
    """One process, as it was seen.

    Args:
        started: in clock ticks since the machine was started; with the pid, it names a process for good.
        state: the kernel's letter.
        argv: its command line.
        launcher: the one that it descends from, if any.
    """

    pid: int
    started: int
    parent: int
    group: int
    state: str
    argv: tuple[str, ...]
    launcher: Launcher | None = None

    @property
    def command(self) -> str:
        """Its command line as the user typed it."""
        return spell_command(self.argv)

    @property
    def age_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.started / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Run:
    """A launcher that runs, and all that descends from it.

    Where one command runs several hosts it is the launcher, and what its agent has launched on this one is its own.
    """

    launcher: Process
    descendants: tuple[Process, ...]

    @property
    def processes(self) -> tuple[Process, ...]:
        return (self.launcher, *self.descendants)

    @property
    def ranks(self) -> tuple[Process, ...]:
        """Those that a fork server, a launcher's child, has put into groups of their own."""
        servers = {p.pid for p in self.descendants if p.launcher is not None and p.parent == p.launcher.pid}
        return tuple(p for p in self.descendants if p.parent in servers and p.pid not in servers and p.group == p.pid)


@dataclass(frozen=True)
class Findings:
    """Runs in the order in which they were started, and orphans likewise."""

    runs: tuple[Run, ...]
    orphans: tuple[Process, ...]


def sort_out(processes: Collection[Process], *, living: Collection[Launcher], spared: Collection[int]) -> Findings:
    """Tell runs from what is left over.

    Args:
        processes: what descends from launchers, and the launchers.
        living: launchers that run.
        spared: pids that are no orphans, whoever has started them.
    """
    ordered = sorted(processes, key=lambda process: (process.started, process.pid))
    identity = {process.pid: Launcher(process.pid, process.started) for process in ordered}
    heads = [head for head in ordered if identity[head.pid] in living]
    agents = {
        identity[head.pid]: head for head in heads if head.launcher in living and _started_by(head, head.launcher)
    }
    runs = tuple(
        Run(head, tuple(p for p in ordered if _head_of(p, agents) == identity[head.pid]))
        for head in heads
        if identity[head.pid] not in agents
    )
    orphans = tuple(
        process
        for process in ordered
        if process.launcher not in (None, *living)
        and identity[process.pid] not in living  # a launcher that a rank had started: it has a run of its own
        and process.pid not in spared
    )
    return Findings(runs, orphans)


def _started_by(process: Process, launcher: Launcher | None) -> bool:
    """Whether a launcher has started the process itself, rather than a rank of it."""
    return launcher is not None and process.parent == launcher.pid


def _head_of(process: Process, agents: Mapping[Launcher, Process]) -> Launcher | None:
    """The launcher of the run to which the process belongs."""
    launcher = process.launcher
    return agents[launcher].launcher if launcher is not None and launcher in agents else launcher


def look() -> Findings:
    """What there is now."""
    found = {process.pid: process for pid in _pids() if (process := read_process(pid)) and process.launcher}
    # Only now: a launcher that is found dead after its process was seen was not alive in between.
    launchers = {process.launcher for process in found.values() if process.launcher is not None}
    living = {launcher for launcher in launchers if launcher.is_alive()}
    for launcher in living:
        head = found.get(launcher.pid) or read_process(launcher.pid)
        if head is not None:
            found[launcher.pid] = head
    return sort_out(found.values(), living=living, spared=_lineage())


def read_process(pid: int) -> Process | None:
    """One of this user's processes; None where there is none of that pid, or it may not be looked into."""
    try:
        stat = read_stat(pid)
        if stat is None or not is_own(pid):
            return None
        argv = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return None
    words = tuple(os.fsdecode(word) for word in argv)
    return Process(pid, stat.started, stat.parent, stat.group, stat.state, words, launcher_of(pid))


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _lineage() -> set[int]:
    """This process and those above it: a terminal that a script has opened, say."""
    pids: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        try:
            stat = read_stat(pid)
        except OSError:
            break
        pid = stat.parent if stat else 0
    return pids
