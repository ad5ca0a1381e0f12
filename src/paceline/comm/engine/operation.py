"""A collective or a message under way, and the futures of it.

[Note: inference mode] Outside of it torch refuses to write to tensors that were made in it; in it, any may be written.
It belongs to a thread. So neither the caller of a collective nor its tensors say what the thread that goes on with it
may do, and a view of shared memory that was made for one collective serves the next. Therefore all steps run in it,
whoever drives. What they leave to others, who may not be in it, must have been made outside.

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
        self.signals: list[torch.futures.Future[Any]] = []  # of those who asked for a future, to be set
        self._promised: list[torch.futures.Future[Any]] = []  # the same, until all that hangs on them has been called
        self._steps: Steps | None = steps

    def advance(self) -> Exception | None:
        """Go on as far as can be without waiting; the error, if that raised one."""
        assert self._steps is not None
        try:
            with torch._C._InferenceMode(
                True
            ):  # [Note: inference mode]; torch.inference_mode() takes a microsecond more
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
        self._promised.append(signal)
        return signal.then(self._conclude), signal

    def _conclude(self, _: object) -> list[Any]:
        if self.error is not None:
            raise self.error
        return list(self.result)

    def resolve(self) -> None:
        """Tell those who asked for a future. Not with the engine's lock: they may call back."""
        while True:
            try:
                signal = self.signals.pop()  # before it is set: what that calls may ask for another, and come here
            except IndexError:
                return
            signal.set_result(None)
            self._promised.remove(signal)

    @property
    def is_over(self) -> bool:
        """Whether it is done and nobody is still to be told, so that nobody need keep the result."""
        return self.is_done and not self._promised
