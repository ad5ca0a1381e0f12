"""``init``, ``shutdown`` and the ``World`` between them: who takes part, on which device, over which backend.

A world of one is a world like any other: it has a process group, and every method does what it says.

The invariant: what ``init`` has made, ``shutdown`` ends, and nothing else. A process group that somebody else has made
is used and left; in a forked child, the parent's world and group are the parent's.
"""

import atexit
import contextlib
import dataclasses
import hashlib
import math
import os
import random
import socket
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy
import torch
import torch.distributed as dist

from paceline.devices import check_backend, check_device, choose_device
from paceline.environment import Placement, read_placement
from paceline.errors import BarrierTimeoutError, EnvironmentVariableError, PeerError, WorldError
from paceline.rendezvous import Meeting, Method, Peer, meet, parse_method
from paceline.rendezvous.forks import forget_group_of_parent, make_immortal
from paceline.rendezvous.peers import host_identity
from paceline.rendezvous.stores import connect, serve

_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's

# Told of this process's leaving, before anything is taken down.
_listeners: "list[weakref.WeakMethod[Callable[[str], None]]]" = []

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_current: "World | None" = None


@dataclass(frozen=True, eq=False)
class World:
    """All processes of a job, seen from one of them. Made by ``init``; a context manager that ends with ``shutdown``.

    Attributes:
        rank: of this process among all, from 0.
        world_size: the number of processes, not of machines.
        local_rank: of this process among those of its host; picks the device.
        local_world_size: the number of processes on this host.
        node_rank: of this host among all, from 0.
        num_nodes: the number of hosts.
        device: where this rank's tensors belong.
        backend: of the default process group, in c10d's spelling.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    backend: str
    _meeting: Meeting = field(repr=False)
    _timeout_s: float = field(repr=False)
    _group: object = field(default=None, repr=False)  # the default process group
    _hooks: tuple[_Hook, _Hook] | None = field(default=None, repr=False)  # see _end; None for a group of others
    _pid: int = field(default_factory=os.getpid, repr=False)
    _calls: Counter[str] = field(default_factory=Counter, repr=False)  # tells one barrier from the next
    _own_seed: list[int] = field(default_factory=list, repr=False)  # what the ranks' streams part with, if seeded

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def barrier(self, timeout: float | timedelta | None = None) -> None:
        """Wait until every rank has called this.

        It passes through the store, not through the devices: it does not wait for CUDA kernels.

        Args:
            timeout: seconds or a timedelta; by default that of ``init``.
        Raises:
            BarrierTimeoutError: the deadline passed; the message names the ranks that did not come.
            PeerError: a rank left the job, or died where this process can tell; the message says why, if it said.
            WorldError: ``timeout`` is not positive, or this process was forked from a rank and is none.
        """
        timeout_s = self._timeout_s if timeout is None else _seconds(timeout)
        number = self._count("barrier")

        def late(names: str) -> Exception:
            return BarrierTimeoutError(
                f"rank {self.rank}: {names} of {self.world_size} did not reach barrier number {number} within "
                f"{timeout_s:g} s. Look where they are; all ranks must call barrier() equally often."
            )

        self._meeting.announce(f"barrier/#{number}")
        self._meeting.await_ranks(range(self.world_size), f"barrier/#{number}", timeout_s, late=late)
        if number > 1:  # who has reached this one has passed the last one
            self._meeting.forget(f"barrier/#{number - 1}")

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Let one rank of each host (its local rank 0) run the block before the host's others do.

        For what must happen once a host, such as unpacking data; the others then find it done.

        Raises:
            PeerError: on the others, if the block raised in the first (the message carries its traceback) or it died.
            BarrierTimeoutError: the first did not finish within ``init``'s timeout.
            WorldError: this process was forked from a rank and is none.
        """
        key = f"main_first/#{self._count('main_first')}"
        first = self._first_of_my_node()
        if self.rank == first:
            try:
                yield
            except BaseException:
                self._meeting.announce(key, traceback.format_exc())
                raise
            self._meeting.announce(key)
            return

        def late(name: str) -> Exception:
            return BarrierTimeoutError(
                f"rank {self.rank}: {name} has not finished its main_first block within {self._timeout_s:g} s. Give "
                "init() a longer timeout if the work takes that long."
            )

        self._meeting.await_ranks([first], key, self._timeout_s, late=late)
        if error := self._meeting.read(key, first):
            raise PeerError(f"rank {self.rank}: the main_first block failed on rank {first}, which reports:\n{error}")
        yield

    def print(self, *values: object, **options: Any) -> None:
        """``print`` on rank 0; nothing on the others."""
        if self.is_main:
            print(*values, **options)  # noqa: T201

    def seed(self, n: int) -> int:
        """Seed Python's, NumPy's and torch's generators so that models agree and data differ between ranks.

        torch's generators start alike on all ranks, for the model's first weights. Once a model has been wrapped,
        they part, so that dropout differs from rank to rank. Python's and NumPy's, which augmentation draws from,
        differ at once.

        Args:
            n: any integer from 0 to 2**63 - 1, the same on all ranks.
        Returns:
            This rank's own seed, derived from ``n`` and the rank.
        Raises:
            WorldError: ``n`` is out of range.
        """
        if not 0 <= n < 2**63:
            raise WorldError(f"seed({n}): expected an integer from 0 to 2**63 - 1.")
        digest = hashlib.blake2b(f"{n}/{self.rank}".encode(), digest_size=8).digest()
        own = int.from_bytes(digest, "big") >> 1
        random.seed(own)
        numpy.random.seed(own % 2**32)
        torch.manual_seed(n)
        self._own_seed[:] = [own]
        return own

    def part_random_streams(self) -> None:
        """After ``seed``: from now on torch's generators differ between ranks. Wrapping a model calls this."""
        if self._own_seed:
            torch.manual_seed(self._own_seed.pop())

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if _current is self:
            _end(wait=not _is_failure(error), last_words=_last_words(error))

    def _count(self, name: str) -> int:
        if self._pid != os.getpid():
            raise WorldError(
                f"this process was forked from rank {self.rank} and is no rank itself. Call {name} in the rank, or "
                "init() here for a world of its own."
            )
        self._calls[name] += 1
        return self._calls[name]

    def _first_of_my_node(self) -> int:
        peers = self._meeting.peers
        mine = [rank for rank in range(self.world_size) if peers[rank].node == peers[self.rank].node]
        return min(mine, key=lambda rank: (peers[rank].local_rank or 0, rank))


def init(
    backend: str = "auto",
    init_method: str | None = None,
    *,
    world_size: int | None = None,
    rank: int | None = None,
    timeout: float | timedelta | None = None,
    device: str | torch.device = "auto",
) -> World:
    """Join the job that the environment describes, or make a world of one where it describes none.

    Understood are torchrun's variables (``paceline run`` sets the same), Slurm's and MPI's. Where torch.distributed has
    been initialised already, its default group is taken over, on all ranks; ``shutdown`` then leaves that group to
    whoever made it. Called again, this returns the world that exists.

    Args:
        backend: ``auto`` is nccl (with gloo for CPU tensors) where the device is a GPU; else shm where all ranks are
            on one host, and hier across hosts. Or any name that ``torch.distributed.init_process_group`` takes; mpi
            too, where ``paceline[mpi]`` is installed.
        init_method: ``env://`` (the default), ``tcp://HOST:PORT`` or ``file:///PATH``.
        world_size, rank: where the environment does not say, or against what it says.
        timeout: seconds or a timedelta, for joining and for every collective later; torch's 30 minutes by default.
        device: ``auto`` is ``cuda:local_rank`` where there is CUDA, else ``cpu``.
    Returns:
        The world, which ``shutdown`` ends.
    Raises:
        EnvironmentVariableError: a launcher's variables are incomplete or contradict each other.
        RendezvousError: not all ranks came before the deadline.
        PeerError: a rank came, and died before all had.
        WorldError: arguments that cannot be honoured here, or given to a world that exists already.
    """
    global _current
    timeout_s = _seconds(_DEFAULT_TIMEOUT if timeout is None else timeout)
    _drop_what_is_not_ours()
    if dist.is_initialized():
        given = (backend, init_method, world_size, rank) != ("auto", None, None, None)
        if given or (_current is not None and (timeout is not None or device != "auto")):
            raise WorldError(
                "init() was given arguments, but this process has joined a job already. Call shutdown() (or, for a "
                "group that torch has made, destroy_process_group()) first."
            )
        return _current or _adopt(timeout_s, device)
    method = parse_method(init_method)
    placement = _placed(method, world_size, rank)
    backend = check_backend(backend)
    check_device(device)
    if backend == "mpi":
        return _init_by_mpi(placement, method, timeout_s, device)
    meeting = meet(placement, method, timeout_s)
    hook = sys.excepthook
    try:
        world = _world_of(placement, meeting, timeout_s, backend, device)
        dist.init_process_group(
            world.backend,
            store=dist.PrefixStore("group", meeting.store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=world.device if world.device.type == "cuda" and "nccl" in world.backend else None,
        )
    except BaseException as error:
        meeting.part(wait=False, last_words=_last_words(error))
        meeting.dismiss()
        raise
    _current = dataclasses.replace(world, _group=dist.GroupMember.WORLD, _hooks=(hook, sys.excepthook))
    return _current


def _init_by_mpi(placement: Placement, method: Method, timeout_s: float, device: str | torch.device) -> World:
    """MPI knows its ranks by itself, and they meet over it."""
    global _current
    if not method.is_env:
        raise WorldError(f"init_method={method.text!r}: over MPI, ranks find each other by themselves. Leave it out.")
    hook = sys.excepthook
    dist.init_process_group("mpi", timeout=timedelta(seconds=timeout_s))
    try:
        of_mpi = (dist.get_rank(), dist.get_world_size())
        is_told = (placement.launcher, placement.rank, placement.world_size) != ("none", 0, 1)
        if is_told and of_mpi != (placement.rank, placement.world_size):
            raise WorldError(
                f"rank={placement.rank}, world_size={placement.world_size}: to MPI, this is rank {of_mpi[0]} of "
                f"{of_mpi[1]}. Leave both out; MPI's launcher sets them, as in `mpirun -n 4 python script.py`."
            )
        world = _adopt(timeout_s, device)
    except BaseException:
        dist.destroy_process_group()
        raise
    _current = dataclasses.replace(world, _hooks=(hook, sys.excepthook))
    return _current


def current() -> World | None:
    """The world that ``init`` made, until ``shutdown``; in a forked child, the parent's."""
    return _current


def shutdown() -> None:
    """Leave the job: wait for the other ranks to leave too, then give back sockets and groups. Twice does no harm.

    It waits no longer than ten seconds, and not for ranks that have died. A process group that ``init`` found and took
    over stays.
    """
    _end(wait=True)


def on_leaving(listener: Callable[[str], None]) -> None:
    """When this process leaves its job, or ends, call ``listener`` first, with its last words if it failed.

    Args:
        listener: a method, whose object is not kept alive.
    """
    _listeners[:] = [known for known in _listeners if known() is not None]
    _listeners.append(weakref.WeakMethod(listener))


def _tell_listeners(last_words: str) -> None:
    for reference in _listeners:
        listener = reference()
        if listener is not None:
            listener(last_words)


def _end(*, wait: bool, last_words: str = "") -> None:
    global _current
    world, _current = _current, None
    if world is None:
        return
    if world._pid != os.getpid():
        make_immortal(world)
        return
    if world._hooks is not None:  # else the groups outlive the world
        _tell_listeners(last_words)
    try:
        # Whoever is first through the last collective must not close its sockets under the others.
        world._meeting.part(wait=wait, last_words=last_words)
    finally:
        if world._hooks is not None:
            before, torchs = world._hooks  # torch writes [rank0] before each line of a traceback, once for each life
            if sys.excepthook is torchs:
                sys.excepthook = before
            if dist.GroupMember.WORLD is world._group:
                dist.destroy_process_group()
        world._meeting.dismiss()


@atexit.register
def _end_at_exit() -> None:
    error = getattr(sys, "last_value", None)  # set once an exception has ended the script
    _tell_listeners(_last_words(error))
    _end(wait=not _is_failure(error), last_words=_last_words(error))
    forget_group_of_parent()


def _drop_what_is_not_ours() -> None:
    """Forget a world whose group was destroyed without ``shutdown``, and what a forked child has from its parent."""
    forget_group_of_parent()
    if _current is not None and _current._group is not dist.GroupMember.WORLD:
        _end(wait=False)


def _placed(method: Method, world_size: int | None, rank: int | None) -> Placement:
    """The environment's placement with the caller's arguments over it, checked."""
    arguments = {"rank": rank, "world_size": world_size}
    given = method.given | {name: value for name, value in arguments.items() if value is not None}
    placement = read_placement(os.environ, **given)
    if placement.launcher == "none" and (given or not method.is_env):
        for name in ("rank", "world_size"):
            if name not in given:
                raise WorldError(
                    f"init(init_method={method.text!r}{''.join(f', {k}={v}' for k, v in given.items())}) needs {name} "
                    "too, and no launcher has set it. Pass init(..., rank=r, world_size=n)."
                )
    if given.items() <= vars(placement).items():
        return placement
    # The launcher spoke of another rank's place on its host.
    placed = dataclasses.replace(
        placement,
        rank=given.get("rank", placement.rank),
        world_size=given.get("world_size", placement.world_size),
        local_rank=None,
        local_world_size=None,
        node_rank=None,
        num_nodes=None,
    )
    if placed.world_size < 1 or not 0 <= placed.rank < placed.world_size:
        raise WorldError(
            f"rank={placed.rank}, world_size={placed.world_size}: expected a world_size of at least 1 and a rank from "
            "0 to world_size - 1."
        )
    return placed


def _world_of(
    placement: Placement, meeting: Meeting, timeout_s: float, backend: str, device: str | torch.device
) -> World:
    """Complete what the launcher left open from what the ranks told one another."""
    nodes = [peer.node for peer in meeting.peers]
    mine = nodes[placement.rank]
    order = list(dict.fromkeys(nodes))
    local_rank = placement.local_rank
    if local_rank is None:
        local_rank = nodes[: placement.rank].count(mine)
    chosen = choose_device(device, placement.rank, local_rank)
    if backend == "auto":
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else _choose_cpu_backend(meeting.peers)
    return World(
        rank=placement.rank,
        world_size=placement.world_size,
        local_rank=local_rank,
        local_world_size=placement.local_world_size or nodes.count(mine),
        node_rank=order.index(mine) if placement.node_rank is None else placement.node_rank,
        num_nodes=placement.num_nodes or len(order),
        device=chosen,
        backend=backend,
        _meeting=meeting,
        _timeout_s=timeout_s,
    )


def _choose_cpu_backend(peers: Sequence[Peer]) -> str:
    """Shared memory within a host, a hierarchy across hosts; Gloo where a host's ranks cannot share memory."""
    views = {(peer.node, peer.pid_namespace) for peer in peers}
    nodes = {peer.node for peer in peers}
    if not {"shm", "hier"} <= set(dist.Backend.backend_list) or len(views) > len(nodes):
        return "gloo"
    return "shm" if len(nodes) == 1 else "hier"


def _adopt(timeout_s: float, device: str | torch.device) -> World:
    """A world around the default group that torch.distributed was given by somebody else."""
    global _current
    rank, world_size = dist.get_rank(), dist.get_world_size()
    placement = Placement(rank, world_size)
    with contextlib.suppress(EnvironmentVariableError):  # whoever made the group did without
        told = read_placement(os.environ)
        if (told.rank, told.world_size) == (rank, world_size):
            placement = told
    store = _store_over_mpi(timeout_s) if dist.get_backend() == "mpi" else dist.distributed_c10d._get_default_store()
    # The store may have served an earlier adoption, whose barriers must not count.
    number = store.add(f"paceline/adoptions/{rank}", 1)
    meeting = Meeting(rank, world_size, dist.PrefixStore(f"paceline/{number}", store))
    meeting.join(Peer.myself(placement))
    meeting.await_all(time.monotonic() + timeout_s)
    world = _world_of(placement, meeting, timeout_s, dist.get_backend(), device)
    _current = dataclasses.replace(world, _group=dist.GroupMember.WORLD)
    return _current


def _store_over_mpi(timeout_s: float) -> dist.Store:
    """c10d gives MPI's groups a store that holds nothing. So rank 0 serves one, whose address goes over MPI."""
    deadline = time.monotonic() + timeout_s
    rank = dist.get_rank()
    store: dist.Store = serve(None, deadline) if rank == 0 else dist.HashStore()
    told: list[Any] = [(host_identity(), socket.gethostname(), getattr(store, "port", 0))]
    dist.broadcast_object_list(told, src=0)
    host, name, port = told[0]
    if rank != 0:
        store = connect(("127.0.0.1" if host == host_identity() else name, port), rank, deadline)
    # Groups of other backends that are made later meet in it too.
    c10d = dist.distributed_c10d
    c10d._world.pg_map[c10d._get_default_group()] = ("mpi", dist.PrefixStore("group", store))
    return store


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < math.inf:
        raise WorldError(f"timeout={timeout!r}: expected a positive number of seconds, or a timedelta.")
    return seconds


def _is_failure(error: BaseException | None) -> bool:
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def _last_words(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error)) if error is not None and _is_failure(error) else ""
