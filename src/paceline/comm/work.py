"""c10d's handle of an operation under way."""

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

    def get_future(self) -> "torch.futures.Future[Any]":
        """A future of the tensors."""
        return self._engine.promise(self._operation)
