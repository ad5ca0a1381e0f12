"""How the ranks of a job meet, wait for one another, and part.

Every job has one key-value store that all ranks reach. A launcher may serve it; else rank 0 does, at a given address
(``tcp://``, ``env://``) or at one that it writes into a given file (``file://``).

The invariant: two jobs, or two lives of one job, never meet by mistake. Rank 0 opens each life under a new number and
closes it at the end; whoever finds its seat in a life taken waits for the next. Rank 0 takes its port by binding it.

[Note: the port stays] A store that rank 0 serves lives on until its process ends, so that ``init`` after ``shutdown``
meets at the same place without a race between the old server's end and the new one's start.
"""

import contextlib
import functools
import json
import os
import pathlib
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import psutil
import torch.distributed as dist

from paceline.environment import Placement, meeting_point
from paceline.errors import PeerError, RendezvousError, WorldError

_PARTING_S = 10.0  # for the others to finish; a rank that has crashed will never say so
_POLL_S = 0.01

# The stores that this process serves, by process and port. [Note: the port stays]
_served: dict[tuple[int, int], dist.TCPStore] = {}


@dataclass
class Meeting:
    """The store that the ranks share, and who they are.

    Attributes:
        store: keys of this life only.
        peers: by rank, once ``introduce`` has been called.
    """

    rank: int
    world_size: int
    store: dist.Store
    close: Callable[[], None] = lambda: None  # rank 0: nobody joins this life any more
    peers: list["Peer"] = field(default_factory=list)

    def introduce(self, me: "Peer") -> None:
        """Learn who the other ranks are; ``peers`` is then indexed by rank."""
        self.store.set(f"peer/{self.rank}", json.dumps(vars(me)))
        keys = [f"peer/{rank}" for rank in range(self.world_size)]
        self.store.wait(keys)
        self.peers = [Peer(**json.loads(text)) for text in self.store.multi_get(keys)]

    def await_ranks(
        self, ranks: Iterable[int], key: str, timeout_s: float, *, late: Callable[[str], Exception]
    ) -> None:
        """Wait until each of ``ranks`` has set ``{key}/{rank}``.

        Raises:
            PeerError: one of them died.
            late(names): the exception made by ``late`` of the missing ranks' names, at the deadline.
        """
        missing = list(ranks)
        deadline, pause_s = time.monotonic() + timeout_s, 0.0005
        while True:
            missing = [rank for rank in missing if not self.store.check([f"{key}/{rank}"])]
            if not missing:
                return
            for rank in missing:
                # Asked again after it was found dead: its last words may have come in between.
                if self.peers and not self.peers[rank].is_alive() and not self.store.check([f"{key}/{rank}"]):
                    raise PeerError(
                        f"rank {self.rank}: rank {rank} (pid {self.peers[rank].pid}) ended without reaching "
                        f"{key.split('/')[0]!r}. Its own output says why."
                    )
            if time.monotonic() > deadline:
                raise late(name_ranks(missing))
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.02)

    def part(self, *, wait: bool) -> None:
        """Leave; with ``wait``, once all others leave too, so that nobody's last message is cut off."""
        # A peer that crashed cannot be waited for, nor can a store that went with it.
        with contextlib.suppress(dist.DistError, PeerError, RendezvousError):
            self.close()
            self.store.set(f"left/{self.rank}", "")
            if wait:
                self.await_ranks(range(self.world_size), "left", _PARTING_S, late=RendezvousError)


@dataclass(frozen=True)
class Peer:
    """A rank as a process on some host."""

    node: str
    local_rank: int | None
    pid: int
    started: float
    pid_namespace: str

    @classmethod
    def myself(cls, placement: Placement) -> "Peer":
        node = f"node {placement.node_rank}" if placement.node_rank is not None else _host_identity()
        pid = os.getpid()
        return cls(node, placement.local_rank, pid, psutil.Process(pid).create_time(), _pid_namespace())

    def is_alive(self) -> bool:
        """Whether the process runs, where this process can tell; else true."""
        if self.pid_namespace != _pid_namespace():
            return True
        try:
            process = psutil.Process(self.pid)
            return bool(process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


def meet(placement: Placement, method: str | None, timeout_s: float) -> Meeting:
    """Meet the other ranks and return once all are there.

    Args:
        placement: with ``rank`` and ``world_size`` settled.
        method: ``env://``, ``tcp://host:port``, ``file:///path`` or None, which means ``env://``.
        timeout_s: for the whole meeting.
    Raises:
        RendezvousError: not all came in time; the message names who did not.
        WorldError: the method is malformed, or the address is taken.
    """
    deadline = time.monotonic() + timeout_s
    url = urlparse(method or "env://")
    if placement.world_size == 1 and url.scheme == "env":
        return Meeting(0, 1, dist.HashStore())
    if url.scheme == "env":
        meeting = _meet_at(meeting_point(placement), placement, deadline)
    elif url.scheme == "tcp":
        if url.hostname is None or url.port is None:
            raise WorldError(f"init_method={method!r}: expected tcp://HOST:PORT, such as tcp://127.0.0.1:29500.")
        meeting = _meet_at((url.hostname, url.port), placement, deadline)
    elif url.scheme == "file":
        if not url.path or url.netloc:
            raise WorldError(f"init_method={method!r}: expected file:///absolute/path, with three slashes.")
        meeting = _meet_by_file(_AddressFile(pathlib.Path(url.path)), placement, deadline)
    else:
        raise WorldError(f"init_method={method!r}: expected env://, tcp://HOST:PORT or file:///PATH.")
    _await_all(meeting, deadline)
    return meeting


def rank_and_size_of(method: str | None) -> dict[str, int]:
    """``rank`` and ``world_size`` where the method carries them, as in ``tcp://host:1?rank=0&world_size=2``."""
    query = parse_qs(urlparse(method or "").query)
    try:
        return {name: int(query[name][0]) for name in ("rank", "world_size") if name in query}
    except ValueError:
        raise WorldError(f"init_method={method!r}: rank and world_size must be integers.") from None


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 1, 2 and 5``."""
    names = [str(rank) for rank in ranks]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def describe_port_holder(port: int) -> str:
    """Who listens on ``port`` here, as far as this user may see: ``pid 12 (python train.py), since 10:31:07``."""
    for connection in psutil.net_connections(kind="tcp"):
        if connection.laddr and connection.laddr.port == port and connection.pid is not None:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(connection.pid)
                since = time.strftime("%H:%M:%S", time.localtime(process.create_time()))
                return f"pid {process.pid} ({' '.join(process.cmdline())[:120]}), started at {since}"
    return "a process of another user"


def _meet_at(address: tuple[str, int], placement: Placement, deadline: float) -> Meeting:
    if placement.store_is_hosted or placement.rank != 0:
        try:
            store = dist.TCPStore(*address, None, False, timeout=_until(deadline))
        except dist.DistError:
            raise RendezvousError(
                f"rank {placement.rank}: nobody answered at {_spell(address)} before the deadline. Is rank 0 running, "
                "and is MASTER_ADDR an address of its host that this host reaches?"
            ) from None
    else:
        store = _serve(address, deadline)
    scoped = dist.PrefixStore(f"paceline/{placement.attempt}", store)
    if placement.rank == 0:
        return _open_life(scoped, placement)
    meeting = _join_life(scoped, placement, deadline)
    if meeting is None:
        raise RendezvousError(f"rank {placement.rank}: rank 0 did not come to {_spell(address)} before the deadline.")
    return meeting


def _meet_by_file(file: "_AddressFile", placement: Placement, deadline: float) -> Meeting:
    if placement.rank == 0:
        file.check()
        store = _serve(("127.0.0.1", 0), deadline)
        meeting = _open_life(dist.PrefixStore(f"paceline/{file.token}", store), placement)
        file.write(store.port)
        close_life = meeting.close

        def close() -> None:
            file.remove()
            close_life()

        meeting.close = close
        return meeting
    while time.monotonic() < deadline:
        token, address = file.find()
        if address is not None:
            with contextlib.suppress(dist.DistError):
                store = dist.TCPStore(*address, None, False, timeout=_until(deadline))
                scoped = dist.PrefixStore(f"paceline/{token}", store)
                joined = _join_life(scoped, placement, deadline, while_=functools.partial(file.still_says, token))
                if joined is not None:
                    return joined
        time.sleep(_POLL_S)
    raise RendezvousError(
        f"rank {placement.rank}: rank 0 did not write its address to {file.path} before the deadline."
    )


def _serve(address: tuple[str, int], deadline: float) -> dist.TCPStore:
    """The store that rank 0 serves at ``address``; port 0 stands for any."""
    host, port = address
    mine = [served for pid, served in _served if pid == os.getpid() and port in (0, served)]
    if mine:
        return _served[os.getpid(), mine[0]]
    if port and _is_taken(port):
        raise WorldError(
            f"rank 0: port {port} is in use by {describe_port_holder(port)}. End that process if it is left over, or "
            "choose another MASTER_PORT (0 lets `paceline run` find a free one)."
        )
    store = dist.TCPStore(
        host, port, None, True, timeout=_until(deadline), wait_for_workers=False, multi_tenant=port != 0
    )
    _served[os.getpid(), store.port] = store
    return store


def _open_life(store: dist.Store, placement: Placement) -> Meeting:
    life = store.add("lives", 1)
    meeting = Meeting(0, placement.world_size, dist.PrefixStore(str(life), store))
    meeting.close = lambda: store.set("open", "")
    meeting.store.set("size", str(placement.world_size))
    meeting.store.set("joined/0", "")
    store.set("open", str(life))
    return meeting


def _join_life(
    store: dist.Store, placement: Placement, deadline: float, while_: Callable[[], bool] = lambda: True
) -> Meeting | None:
    """Take this rank's seat in a life that rank 0 has opened; None once ``while_`` is false or time is up."""
    taken = ""
    while while_() and time.monotonic() < deadline:
        life = store.get("open").decode() if store.check(["open"]) else ""
        if life in ("", taken):
            time.sleep(_POLL_S)
            continue
        meeting = Meeting(placement.rank, placement.world_size, dist.PrefixStore(life, store))
        size = int(meeting.store.get("size"))
        if size != placement.world_size:
            raise WorldError(
                f"rank {placement.rank} was told that the world has {placement.world_size} processes, but rank 0 "
                f"expects {size}. Give all of them the same WORLD_SIZE."
            )
        if meeting.store.add(f"seat/{placement.rank}", 1) == 1:
            meeting.store.set(f"joined/{placement.rank}", "")
            return meeting
        taken = life  # by this rank's earlier life, which rank 0 has not closed yet; or by a double
    if taken:
        raise RendezvousError(
            f"rank {placement.rank} has joined this job already. Two processes were given the same RANK, or another "
            "job meets at this address: give each process its own RANK and each job its own MASTER_PORT."
        )
    return None


def _await_all(meeting: Meeting, deadline: float) -> None:
    def late(names: str) -> Exception:
        return RendezvousError(
            f"rank {meeting.rank}: {names} of {meeting.world_size} did not join before the deadline. Look at their "
            "output, and whether they were started at all."
        )

    meeting.await_ranks(range(meeting.world_size), "joined", deadline - time.monotonic(), late=late)


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


def _spell(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass
class _AddressFile:
    """The file by which ranks find rank 0: a token against stale files, and rank 0's addresses."""

    path: pathlib.Path
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def check(self) -> None:
        """Refuse to overwrite what paceline has not written."""
        if not self.path.parent.is_dir():
            raise WorldError(f"init_method: {self.path.parent} is not a directory; create it, or name another file.")
        if self.path.exists() and self.path.read_bytes().strip() and not self._record():
            raise WorldError(
                f"init_method: {self.path} exists and holds something else than an address. Name a file that does not "
                "exist; if an interrupted job of another library left this one, delete it."
            )

    def write(self, port: int) -> None:
        addresses = [
            entry.address
            for entries in psutil.net_if_addrs().values()
            for entry in entries
            if entry.family == socket.AF_INET and not entry.address.startswith("127.")
        ]
        record = {
            "paceline": self.token,
            "peer": vars(Peer.myself(Placement())),
            "port": port,
            "addresses": addresses,
        }
        draft = self.path.with_name(f".{self.path.name}.{self.token}")
        try:
            draft.write_text(json.dumps(record))
            draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)

    def find(self) -> tuple[str, tuple[str, int] | None]:
        """The token, and an address at which rank 0 answers; None while nothing or a dead run's is written."""
        record = self._record()
        if not record or not Peer(**record["peer"]).is_alive():
            return "", None
        if record["peer"]["node"] == _host_identity():
            return record["paceline"], ("127.0.0.1", record["port"])
        for host in record["addresses"]:
            with contextlib.suppress(OSError), socket.create_connection((host, record["port"]), timeout=1.0):
                return record["paceline"], (host, record["port"])
        return record["paceline"], None

    def still_says(self, token: str) -> bool:
        return self._record().get("paceline") == token

    def remove(self) -> None:
        if self.still_says(self.token):
            self.path.unlink(missing_ok=True)

    def _record(self) -> dict[str, Any]:
        try:
            record = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) and "paceline" in record else {}


def _host_identity() -> str:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid") + _host_identity()
    except OSError:
        return _host_identity()
