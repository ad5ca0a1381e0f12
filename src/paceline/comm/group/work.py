"""c10d's handle of an operation under way.

[Note: works that only C++ holds] torch hands some works to C++ alone, as that with which its DistributedDataParallel
counts the ranks that have not joined. Of a Python object, C++ then has what the base class can do, which is to wait for
ever. So the last works of a group are kept, without their tensors, when Python has let go of them.
"""

import sys
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.engine import Engine, Operation


class Work(dist.Work):
    """What ``async_op=True`` returns."""

    def __init__(self, engine: Engine, operation: Operation) -> None:
        super().__init__()
        self._engine = engine
        self._operation = operation

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is done.

        Args:
            timeout: from now; zero (c10d's way to say none) lets the group's own timeout stand.
        Raises:
            PeerError, CollectiveMismatchError, CollectiveTimeoutError, CommunicationError: it was not done.
        """
        seconds = timeout.total_seconds() if timeout else 0.0
        self._engine.wait(self._operation, seconds if seconds > 0 else None)
        return True

    def is_completed(self) -> bool:
        """Whether it is done, or has failed."""
        if not self._operation.is_done:
            self._engine.drive()
        return self._operation.is_done

    def is_success(self) -> bool:
        return self.is_completed() and self._operation.error is None

    def exception(self) -> BaseException | None:
        return self._operation.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors that it has filled."""
        self.wait()
        return list(self._operation.result)

    def source_rank(self) -> int:
        """Who sent the message that was received, in the group's ranks."""
        assert self._operation.source is not None
        return self._operation.source

    _source_rank = source_rank

    def is_over(self) -> bool:
        """Whether it is done and nobody is still to be told."""
        return self._operation.is_over

    def forget_result(self) -> None:
        self._operation.result = ()

    def get_future(self) -> "torch.futures.Future[Any]":
        """A future of the tensors."""
        return self._engine.promise(self._operation)


class RecentWorks:
    """The works of a group. [Note: works that only C++ holds]"""

    def __init__(self) -> None:
        self._given: list[Work] = []
        self._recent: deque[Work] = deque(maxlen=256)

    def add(self, work: Work) -> Work:
        for given in tuple(self._given):
            # Held by the list, the tuple, the loop, and as an argument of getrefcount: by nobody else in Python.
            if given.is_over() and sys.getrefcount(given) == 4:
                self._given.remove(given)
                given.forget_result()
                self._recent.append(given)
        self._given.append(work)
        return work
