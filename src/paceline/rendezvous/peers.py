"""A rank as a process on some host: who it is, and whether it still runs.

The invariant: a process is found dead only where this process can tell, which is in one pid namespace; and a process
that has taken over a dead one's pid is not mistaken for it.
"""

import functools
import json
import os
import pathlib
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.environment import Placement


@dataclass(frozen=True)
class Peer:
    """What a rank tells the others about itself.

    Attributes:
        node: the same on all ranks of one host.
        local_rank: where the launcher said.
        started: in clock ticks since the machine started; with the pid, it names a process for good.
    """

    node: str
    local_rank: int | None
    pid: int
    started: int
    pid_namespace: str

    @classmethod
    def myself(cls, placement: Placement) -> "Peer":
        node = f"node {placement.node_rank}" if placement.node_rank is not None else host_identity()
        pid = os.getpid()
        return cls(node, placement.local_rank, pid, _started(pid) or 0, _pid_namespace())

    @classmethod
    def from_json(cls, text: str | bytes) -> "Peer":
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(vars(self))

    def is_alive(self) -> bool:
        """Whether the process runs, where this process can tell; else true."""
        return not self.is_visible() or _started(self.pid) == self.started

    def is_visible(self) -> bool:
        """Whether this process can tell if that one runs."""
        return self.pid_namespace == _pid_namespace()


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 1, 2 and 5``."""
    names = [str(rank) for rank in ranks]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def host_identity() -> str:
    """What all processes of this host have in common, and none of another. A network namespace is a host of its own."""
    return f"{socket.gethostname()} {_boot()} {_namespace('net')}"


def _pid_namespace() -> str:
    return f"{_boot()} {_namespace('pid')}"


def _started(pid: int) -> int | None:
    """When ``pid`` was started; None where there is no such process, or only its unreaped remains."""
    # Not psutil's create_time(): it adds the time of boot, which moves when the clock is set.
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name, in brackets, may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


@functools.cache
def _boot() -> str:
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""
