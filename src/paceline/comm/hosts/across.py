"""Sums over hosts that go on while the ranks compute: what averages of gradients need between hosts.

They are gloo's, one group for each lane: its threads need neither this process's interpreter nor its attention. The
group is of its own, since averages start when gradients are ready, in an order which tells nothing of that of other
collectives.

The invariant: no thread of gloo's is left waiting for a host that will not answer, or destroying a group would.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.engine import Engine
from paceline.comm.memory.averages import Averages
from paceline.comm.memory.transport import SharedMemory
from paceline.errors import PeerError
from paceline.rendezvous.forks import make_immortal

_GRACE_S = 0.3  # in which who has broken a connection may say why
_UNUSED_TAG = 1 << 30

_all: "weakref.WeakSet[Across]" = weakref.WeakSet()


class Across:
    """Starts sums over hosts of tensors of equal sizes, in the same order on all hosts.

    Args:
        address: of this host, where the others reach it.
        find_gone: the error, if the ranks of this lane that are on other hosts are known to take part no more.
        mates: their names, for errors.
    """

    def __init__(
        self,
        store: dist.Store,
        host: int,
        num_hosts: int,
        *,
        address: str,
        timeout_s: float,
        find_gone: Callable[[], PeerError | None],
        mates: str,
    ) -> None:
        self._find_gone = find_gone
        self._mates = mates
        self._other = (host + 1) % num_hosts
        self._works: list[dist.Work] = []
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        self._group: Any = dist.ProcessGroupGloo(store, host, num_hosts, options)
        _all.add(self)

    def __call__(self, share: Tensor) -> dist.Work:
        """Sum a flat tensor, in place."""
        self._works = [work for work in self._works if not work.is_completed()]
        work = self._group.allreduce([share])
        self._works.append(work)
        return _Sum(work, self)

    def explain(self, error: Exception | None) -> PeerError:
        """Why a sum has failed, as far as this rank has been told."""
        return self._find_gone() or PeerError(
            f"the connection to {self._mates} broke while a sum over hosts was under way: {error}"
        )

    def is_told(self) -> bool:
        """Whether it is known that others take part no more."""
        return self._find_gone() is not None

    def abort(self) -> None:
        """Let all that is under way fail, here and on the other hosts."""
        if self._group is None or all(work.is_completed() for work in self._works):
            return
        # What gloo calls a timeout of one message ends all connections of its group, and with them all waits.
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.empty(1, device="cpu")], self._other, _UNUSED_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Twice does no harm."""
        self.abort()
        self._works.clear()
        self._group = None


class _Sum(dist.Work):
    """A sum under way."""

    def __init__(self, work: dist.Work, across: Across) -> None:
        super().__init__()
        self._work = work
        self._across = across
        self._error: RuntimeError | None = None
        self._failed_at = 0.0

    def is_completed(self) -> bool:
        """Whether it is done, or has failed."""
        if self._error is None and self._work.is_completed():
            try:
                return self._work.wait()
            except RuntimeError as error:
                self._error, self._failed_at = error, time.monotonic()
        if self._across.is_told():
            return True
        return self._error is not None and time.monotonic() - self._failed_at > _GRACE_S

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is done.

        Raises:
            PeerError: it failed.
        """
        if self._error is None and (self._work.is_completed() or not self._across.is_told()):
            try:
                return self._work.wait(timeout)
            except RuntimeError as error:
                self._error = error
        raise self._across.explain(self._error) from None

    def get_future(self) -> Any:
        """What tells in another thread that it is done; nothing, if it is done already."""
        return _Future(self._work.get_future())


class _Future:
    """Of what is done already, torch calls back at once: in the middle of what the caller does, with his locks."""

    def __init__(self, future: "torch.futures.Future[Any]") -> None:
        self._future = future

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        me = threading.get_ident()
        self._future.add_done_callback(lambda done: None if threading.get_ident() == me else call(done))


class AveragesOverHosts(Averages):
    """Averages of which this host's ranks share one memory.

    Args:
        members: the ranks of this host.
    """

    def __init__(self, shared: SharedMemory, engine: Engine, *, members: Sequence[int], **others: Any) -> None:
        super().__init__(shared, engine, **others)
        self._members = members

    def _unfinished(self, number: int) -> list[int]:
        return [self._members[place] for place in super()._unfinished(number)]


def _leave_to_parent() -> None:
    """In a forked child: the threads are the parent's, and a destructor would wait for them."""
    for across in _all:
        make_immortal(across._group)


os.register_at_fork(after_in_child=_leave_to_parent)
