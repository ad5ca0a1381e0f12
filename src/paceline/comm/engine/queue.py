"""The operations of a group that are under way: what goes on, in which order, and what ends them.

Collectives run one after another, in the order in which they were called; messages run beside them.

The invariant: an operation that fails leaves the ranks out of step, so all later ones of the group fail too, with the
first one's reason, on this rank and on all others; a mismatch alone, which is found before anything is done, does not.
"""

import os
import threading
from collections import deque
from collections.abc import Callable

from paceline.comm.engine.operation import Operation
from paceline.comm.transport import Transport
from paceline.errors import CollectiveMismatchError, CommunicationError


class Queue:
    """What is under way in one group.

    Args:
        name_of_me: this rank, in errors.

    Attributes:
        lock: held while anything advances, never while anybody sleeps.
        num_sleepers: how many threads sleep, or are about to: they are woken when something ends.
        num_advances: how often anybody has driven.
        finished: operations whose futures are to be told.
    """

    def __init__(self, transport: Transport, name_of_me: str) -> None:
        self.lock = threading.Lock()
        self.num_sleepers = 0
        self.num_advances = 0
        self.finished: list[Operation] = []
        self._transport = transport
        self._name_of_me = name_of_me
        self._pid = os.getpid()
        self._collectives: deque[Operation] = deque()
        self._messages: list[Operation] = []
        self._others: list[Callable[[], bool]] = []
        self._num_calls = 0
        self._failure = ""
        self._cause: Exception | None = None
        self._is_closed = False

    # -- with the lock -------------------------------------------------------------------------------------------

    def add(self, operation: Operation) -> None:
        self._num_calls += 1
        operation.number = self._num_calls
        if operation.is_message:
            self._messages.append(operation)
        else:
            self._collectives.append(operation)

    def advance(self) -> bool:
        """Go on as far as can be without waiting; whether anything ended."""
        self.num_advances += 1
        try:
            self._transport.poll()
        except BaseException as interruption:  # news that it had taken may be lost
            self.fail(f"a look for news was interrupted by {type(interruption).__name__}: {interruption}")
            raise
        has_ended = False
        while self._collectives and self._advance_one(self._collectives[0]):
            has_ended = True
        for message in list(self._messages):
            if not message.is_done:  # as when another has failed
                has_ended = self._advance_one(message) or has_ended
        for advance in self._others:
            try:
                has_ended = advance() or has_ended
            except BaseException as error:
                self.fail(f"{type(error).__name__}: {error}")
                raise
        if has_ended and self.num_sleepers:
            self._transport.nudge()  # another thread may wait for what has ended
        return has_ended

    def _advance_one(self, operation: Operation) -> bool:
        try:
            error = operation.advance()
        except BaseException as interruption:  # Ctrl-C in the middle of it: nobody may take it for done
            self._end(operation, CommunicationError(f"{self._name_of_me}: {operation.call} was interrupted."))
            self.fail(f"{operation.call} was interrupted by {type(interruption).__name__}")
            raise
        if error is None and not operation.is_done:
            return False
        self._end(operation, error)
        if error is not None and not isinstance(error, CollectiveMismatchError):
            self.fail(f"{operation.call} failed: {type(error).__name__}: {error}")
        return True

    def _end(self, operation: Operation, error: BaseException | None) -> None:
        operation.finish(error)
        if operation.is_message:
            self._messages.remove(operation)
        else:
            self._collectives.remove(operation)
        if operation.signals:
            self.finished.append(operation)

    def cancel(self, message: Operation, error: Exception | None = None) -> None:
        """Let it be as if it had never been asked for, if it is not done; who waits for it gets ``error``."""
        if not message.is_done:
            message.withdraw()
            cancelled = CommunicationError(f"{self._name_of_me}: {message.call} was cancelled.")
            self._end(message, error or cancelled)

    def fail(self, reason: str, error: Exception | None = None) -> None:
        """All that is under way ends with ``error``; nothing can begin any more, here and on the other ranks."""
        if self._failure or self._is_closed:
            return
        self._failure, self._cause = reason, error
        for operation in self.pending():
            self._end(operation, error or CommunicationError(self._refusal()))
        self._transport.give_up(reason)
        if self.num_sleepers:
            self._transport.nudge()

    def close(self) -> bool:
        """All that is under way ends; nothing can begin any more. Whether it was open."""
        was_open = not self._is_closed
        self._is_closed = True
        for operation in self.pending():
            self._end(operation, CommunicationError(f"{self._name_of_me}: the process group was destroyed."))
        return was_open

    # -- without it ----------------------------------------------------------------------------------------------

    def also_advance(self, advance: Callable[[], bool]) -> None:
        """Whenever anybody drives, call ``advance`` too, with the lock; it says whether anything ended."""
        self._others.append(advance)

    def forget_others(self) -> None:
        """Undo ``also_advance``."""
        self._others.clear()

    def pending(self) -> list[Operation]:
        """What is not done, in order; the messages last."""
        return [*self._collectives, *self._messages]

    def first_of_each(self) -> list[Operation]:
        """The collective that runs, and all messages: what other ranks have something to do for now."""
        return [*list(self._collectives)[:1], *self._messages]

    def awaited_before(self, operation: Operation) -> Operation | None:
        """The collective that runs, where ``operation`` is another one that has to wait for it."""
        first = next(iter(self.pending()), operation)
        return None if operation.is_message or first.is_message or first is operation else first

    def sleep(self, timeout_s: float) -> None:
        """Until there may be news. With the lock, the caller has counted itself among ``num_sleepers`` before."""
        has_heard = False
        try:
            has_heard = self._transport.pause(timeout_s)
        finally:
            with self.lock:
                self.num_sleepers -= 1
                if has_heard:
                    self._transport.heard()

    def resolve(self) -> None:
        """Tell futures, without the lock: they may call back."""
        while self.finished:
            try:
                operation = self.finished.pop()
            except IndexError:  # another thread has
                return
            operation.resolve()

    @property
    def is_own(self) -> bool:
        """Whether this process is the one that has made the group, and not forked from it."""
        return self._pid == os.getpid()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def check_own(self) -> None:
        """Raise in a process that was forked from the one whose group this is."""
        if self._pid != os.getpid():
            raise CommunicationError(
                f"this process was forked from {self._name_of_me}, and the process group is its parent's. Call "
                "collectives in the rank, or init() here for a world of its own."
            )

    def check_usable(self) -> None:
        """Raise if nothing can begin.

        Raises:
            CommunicationError: the group has failed before, was closed, or is a parent's.
        """
        if self._is_closed or self._failure or self._pid != os.getpid():
            self.check_own()
            raise CommunicationError(
                self._refusal() if not self._is_closed else f"{self._name_of_me}: the process group was destroyed."
            )

    def check_going(self) -> None:
        """Raise if what is waited for cannot be done any more: what the group has failed of, where that is known."""
        if self._failure and self._cause is not None and not self._is_closed:
            raise self._cause
        self.check_usable()

    def _refusal(self) -> str:
        return (
            f"{self._name_of_me}: this process group has failed before, and its ranks are out of step. End them all "
            f"and start from a checkpoint. The first error was: {self._failure}"
        )
