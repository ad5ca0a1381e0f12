"""``init``, ``shutdown`` and the ``World`` between them: who takes part, on which device, over which backend.

A world of one is a world like any other: it has a process group, and every method does what it says.
"""

import atexit
import contextlib
import hashlib
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy
import torch
import torch.distributed as dist

from paceline.environment import Placement, read_placement
from paceline.errors import BarrierTimeoutError, PeerError, WorldError
from paceline.rendezvous import Meeting, Peer, meet, rank_and_size_of

_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's

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
            PeerError: a rank on this host died.
        """
        timeout_s = self._timeout_s if timeout is None else _seconds(timeout)
        key = self._next("barrier")
        self._meeting.store.set(f"{key}/{self.rank}", "")

        def late(names: str) -> Exception:
            return BarrierTimeoutError(
                f"rank {self.rank}: {names} of {self.world_size} did not reach barrier number {key.split('#')[1]} "
                f"within {timeout_s:g} s. Look where they are; all ranks must call barrier() equally often."
            )

        self._meeting.await_ranks(range(self.world_size), key, timeout_s, late=late)

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Let one rank of each host (its local rank 0) run the block before the host's others do.

        For what must happen once a host, such as unpacking data; the others then find it done.

        Raises:
            PeerError: on the others, if the block raised in the first; the message carries its traceback.
            BarrierTimeoutError: the first did not finish within ``init``'s timeout.
        """
        key = self._next("main_first")
        first = next(rank for rank in range(self.world_size) if self._is_first_of_my_node(rank))
        if self.rank == first:
            try:
                yield
            except BaseException:
                self._meeting.store.set(f"{key}/{first}", traceback.format_exc())
                raise
            self._meeting.store.set(f"{key}/{first}", "")
            return

        def late(name: str) -> Exception:
            return BarrierTimeoutError(
                f"rank {self.rank}: {name} has not finished its main_first block within {self._timeout_s:g} s. Give "
                "init() a longer timeout if the work takes that long."
            )

        self._meeting.await_ranks([first], key, self._timeout_s, late=late)
        if error := self._meeting.store.get(f"{key}/{first}").decode():
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
            ValueError: ``n`` is out of range.
        """
        if not 0 <= n < 2**63:
            raise ValueError(f"seed({n}): expected an integer from 0 to 2**63 - 1.")
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
            _end(wait=error is None)

    def _next(self, name: str) -> str:
        self._calls[name] += 1
        return f"{name}/#{self._calls[name]}"

    def _is_first_of_my_node(self, rank: int) -> bool:
        return self._meeting.peers[rank].node == self._meeting.peers[self.rank].node


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
    been initialised already, its default group is taken over.

    Args:
        backend: ``auto`` is nccl (with gloo for CPU tensors) where the device is a GPU, else gloo. Or any name that
            ``torch.distributed.init_process_group`` takes.
        init_method: ``env://`` (the default), ``tcp://HOST:PORT`` or ``file:///PATH``.
        world_size, rank: where the environment does not say.
        timeout: seconds or a timedelta, for joining and for every collective later; torch's 30 minutes by default.
        device: ``auto`` is ``cuda:local_rank`` where there is CUDA, else ``cpu``.
    Returns:
        The world, which ``shutdown`` ends.
    Raises:
        EnvironmentVariableError: a launcher's variables are incomplete or contradict each other.
        RendezvousError: not all ranks came before the deadline.
        WorldError: arguments that cannot be honoured here, or a world that exists already.
    """
    global _current
    timeout_s = _seconds(_DEFAULT_TIMEOUT if timeout is None else timeout)
    if _current is not None and not dist.is_initialized():
        _end(wait=False)  # torch's destroy_process_group was called in shutdown's place
    if dist.is_initialized():
        if (backend, init_method, world_size, rank) != ("auto", None, None, None):
            raise WorldError(
                "init() was given arguments, but this process has joined a job already. Call shutdown() first."
            )
        return _current or _adopt(timeout_s, device)
    placement = _placed(read_placement(os.environ), init_method, world_size, rank)
    _check_backend(backend)
    meeting = meet(placement, init_method, timeout_s)
    try:
        meeting.introduce(Peer.myself(placement))
        world = _world_of(placement, meeting, timeout_s, backend, device)
        dist.init_process_group(
            world.backend,
            store=dist.PrefixStore("group", meeting.store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=world.device if world.device.type == "cuda" and "nccl" in world.backend else None,
        )
    except BaseException:
        meeting.part(wait=False)
        raise
    _current = world
    return world


def current() -> World | None:
    """The world that ``init`` made, until ``shutdown``."""
    return _current


def shutdown() -> None:
    """Leave the job: wait for the other ranks to leave too, then give back sockets and groups. Twice does no harm."""
    _end(wait=True)


def _end(*, wait: bool) -> None:
    global _current
    world, _current = _current, None
    if world is None:
        return
    if wait:
        # Whoever is first through the last collective must not close its sockets under the others.
        world._meeting.part(wait=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    if not wait:
        world._meeting.part(wait=False)


@atexit.register
def _end_at_exit() -> None:
    _end(wait=getattr(sys, "last_value", None) is None)


def _placed(placement: Placement, method: str | None, world_size: int | None, rank: int | None) -> Placement:
    """The environment's placement with the caller's arguments over it, checked."""
    given = rank_and_size_of(method)
    if rank is not None:
        given["rank"] = rank
    if world_size is not None:
        given["world_size"] = world_size
    if method is not None and not method.startswith("env://") and placement.launcher == "none":
        for name in ("rank", "world_size"):
            if name not in given:
                raise WorldError(
                    f"init_method={method!r} needs {name}, and no launcher has set it. "
                    "Pass init(..., rank=r, world_size=n)."
                )
    if given.items() <= vars(placement).items():
        return placement
    placed = Placement(
        rank=given.get("rank", placement.rank),
        world_size=given.get("world_size", placement.world_size),
        address=placement.address,
        port=placement.port,
        attempt=placement.attempt,
        launcher=placement.launcher,
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
    chosen = _choose_device(device, local_rank, placement)
    if backend == "auto":
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
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


def _adopt(timeout_s: float, device: str | torch.device) -> World:
    """A world around the default group that torch.distributed was given by somebody else."""
    global _current
    rank, world_size = dist.get_rank(), dist.get_world_size()
    placement = read_placement(os.environ)
    if (placement.rank, placement.world_size) != (rank, world_size):
        placement = Placement(rank, world_size)
    store = dist.PrefixStore("paceline", dist.distributed_c10d._get_default_store())
    meeting = Meeting(rank, world_size, store)
    meeting.introduce(Peer.myself(placement))
    _current = _world_of(placement, meeting, timeout_s, dist.get_backend(), device)
    return _current


def _check_backend(backend: str) -> None:
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    for name in ["gloo"] if backend == "auto" else [part.rpartition(":")[2] for part in backend.lower().split(",")]:
        if not available.get(name, name in dist.Backend.backend_list):
            offered = sorted({name for name, here in available.items() if here} | set(dist.Backend.backend_list))
            offered = [name for name in offered if available.get(name, name != "undefined")]
            raise WorldError(
                f"backend={backend!r}: {name!r} is not available here; this torch offers {', '.join(offered)}."
            )
    if "nccl" in backend and not torch.cuda.is_available():
        raise WorldError(f"backend={backend!r}: NCCL needs a CUDA device, and torch sees none. Use 'gloo' or 'auto'.")


def _choose_device(device: str | torch.device, local_rank: int, placement: Placement) -> torch.device:
    if device != "auto":
        chosen = torch.device(device)
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise WorldError(f"device={str(device)!r}: torch sees no CUDA device here. Use 'cpu' or 'auto'.")
    else:
        chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.type == "cuda":
        index = local_rank if chosen.index is None else chosen.index
        if index >= torch.cuda.device_count():
            raise WorldError(
                f"rank {placement.rank}: its device would be cuda:{index}, but this host shows "
                f"{torch.cuda.device_count()} CUDA devices. Start fewer ranks per host, or pass device='cpu'."
            )
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    return chosen


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not seconds > 0:
        raise WorldError(f"timeout={timeout!r}: expected a positive number of seconds, or a timedelta.")
    return seconds
