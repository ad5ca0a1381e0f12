"""The job, seen from one of its processes.

The invariant: what the ranks do together here passes through the store, with a deadline and a look at the others.
"""

import contextlib
import hashlib
import os
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy
import torch

from paceline.errors import BarrierTimeoutError, PeerError, WorldError
from paceline.rendezvous import Meeting
from paceline.world import leaving
from paceline.world.stopping import Stopping
from paceline.world.timeouts import seconds_of

_ASKING_S = 1.0

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


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
    _stopping: Stopping = field(default_factory=Stopping, repr=False)

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
        timeout_s = self._timeout_s if timeout is None else seconds_of(timeout)
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

    def should_stop(self) -> bool:
        """Whether to stop at this step, before the job's time is up: the same answer on all ranks at the same step.

        To be called once a step on every rank. True from the step on that the ranks agree on once any of them has
        received SIGUSR1 or SIGTERM, or has called ``request_stop``; a step without that costs about a microsecond and
        waits for nobody::

            with paceline.init() as world:
                first = load_if_saved(model, optimizer)
                for step in range(first, num_steps):
                    train(model, optimizer, step)
                    if world.should_stop():
                        if world.is_main:
                            save(model, optimizer, step + 1)
                        break

        The first call installs handlers for both signals, which call those that were there before; ``shutdown`` gives
        them back. A second SIGTERM does what it would have done without them. A SIGUSR1 that comes to this rank when
        another's has stopped it already is ignored. Slurm sends SIGUSR1 to the workers of loaders too: those that are
        forked after the first call take no notice, others die of it.

        Raises:
            WorldError: the first call is not in the main thread, or the world has ended, or this process was forked
                from a rank and is none.
            BarrierTimeoutError: a rank is to stop, and another has not called this within ``init``'s timeout.
            PeerError: a rank is to stop, and another has died, or has left without ever calling this.
        """
        self._check_not_forked("should_stop")
        return self._stopping.at_next_step(self._meeting, self._timeout_s)

    def request_stop(self) -> None:
        """Let ``should_stop`` say so on all ranks soon. One rank is enough; any thread may call it, and more than once.

        Raises:
            PeerError: the store is gone with the rank that served it.
            WorldError: this process was forked from a rank and is none.
        """
        self._check_not_forked("request_stop")
        self._stopping.request(self._meeting)

    def who_is_gone(self) -> str:
        """Which of the other ranks has left the job or died, and why, in words; empty where all are there.

        It needs no other rank. It looks for a second before it says that all are there: a process's connections break
        before it is seen to have died. It takes no longer where nobody answers any more.
        """
        told: list[str] = []
        deadline = time.monotonic() + _ASKING_S

        def ask() -> None:
            try:
                while not (gone := self._meeting.who_is_gone()) and time.monotonic() < deadline:
                    time.sleep(0.02)
                told.append(gone)
            except PeerError as error:
                told.append(str(error).removeprefix(f"rank {self.rank}: "))

        asking = threading.Thread(target=ask, name="paceline who is gone", daemon=True)
        asking.start()
        asking.join(_ASKING_S + 0.1)
        return told[0] if told else ""

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
        leaving.leave(self, error)

    def _count(self, name: str) -> int:
        self._check_not_forked(name)
        self._calls[name] += 1
        return self._calls[name]

    def _check_not_forked(self, name: str) -> None:
        if self._pid != os.getpid():
            raise WorldError(
                f"this process was forked from rank {self.rank} and is no rank itself. Call {name} in the rank, or "
                "init() here for a world of its own."
            )

    def _first_of_my_node(self) -> int:
        peers = self._meeting.peers
        mine = [rank for rank in range(self.world_size) if peers[rank].node == peers[self.rank].node]
        return min(mine, key=lambda rank: (peers[rank].local_rank or 0, rank))
