"""A collective or a message under way, and the futures of it.

The invariant: an operation is done exactly once; whoever asked for a future is told after that, and without a lock.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.comm.transport import Call, Steps


class Operation:
    """A collective or a message under way.

    Args:
        steps: what it does; a message's steps return its source.
        awaited: tells which ranks in the group have something to do still before it can end; by default those that have
            not come to the collective that runs.
        result: what its future is to hold.
    """

    def __init__(
        self,
        call: Call,
        steps: Steps,
        *,
        timeout_s: float,
        result: Sequence[Any] = (),
        is_message: bool = False,
        awaited: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self.call = call
        self.is_message = is_message
        self.awaited = awaited
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.number = 0
        self.is_done = False
        self.error: BaseException | None = None
        self.source: int | None = None
        self.result = result
        self.signals: list[torch.futures.Future[Any]] = []  # of those who asked for a future
        self._steps: Steps | None = steps

    def advance(self) -> Exception | None:
        """Go on as far as can be without waiting; the error, if that raised one."""
        assert self._steps is not None
        try:
            next(self._steps)
        except StopIteration as end:
            self.source = end.value
            self.is_done = True
        except Exception as error:
            return error
        return None

    def finish(self, error: BaseException | None) -> None:
        self.error = error
        self.is_done = True
        self._steps = None  # and with it the tensors

    def withdraw(self) -> None:
        """Undo what has been begun."""
        if self._steps is not None:
            self._steps.close()

    def promise(self) -> "tuple[torch.futures.Future[Any], torch.futures.Future[Any]]":
        """A future of the result, and the one that is to be set when it is there.

        What the second calls makes the first fail, where the operation failed: in C++, an exception that is *set* on a
        future would count as its value.
        """
        signal: torch.futures.Future[Any] = torch.futures.Future()
        return signal.then(self._conclude), signal

    def _conclude(self, _: object) -> list[Any]:
        if self.error is not None:
            raise self.error
        return list(self.result)

    def resolve(self) -> None:
        """Tell those who asked for a future. Not with the engine's lock: they may call back."""
        while self.signals:
            self.signals[-1].set_result(None)
            self.signals.pop()  # after that, nobody need keep the result
