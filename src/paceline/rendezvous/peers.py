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

from paceline.environment import Placement, shares_memory
from paceline.processes import started_at


@dataclass(frozen=True)
class Peer:
    """What a rank tells the others about itself.

    Attributes:
        node: the same on all ranks of one host.
        local_rank: where the launcher said.
        started: in clock ticks since the machine started; with the pid, it names a process for good. 0 where it could
            not be read.
        shares_memory: whether it may, where nobody has named a backend for it.
    """

    node: str
    local_rank: int | None
    pid: int
    started: int
    pid_namespace: str
    shares_memory: bool = True

    @classmethod
    def myself(cls, placement: Placement) -> "Peer":
        node = f"node {placement.node_rank}" if placement.node_rank is not None else host_identity()
        pid = os.getpid()
        try:
            started = started_at(pid) or 0
        except OSError:  # as when this process may open no more files
            started = 0
        return cls(node, placement.local_rank, pid, started, _pid_namespace(), shares_memory(os.environ))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Peer":
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(vars(self))

    def is_alive(self) -> bool:
        """Whether the process runs, where this process can tell; else true."""
        if not self.is_visible():
            return True
        try:
            return _exists(self.pid) if self.started == 0 else started_at(self.pid) == self.started
        except OSError:  # this process's trouble, as when it may open no more files
            return True

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


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


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
