"""Where a group waits: every thread that waits for an operation takes turns at driving all of them.

Where nobody waits, a thread in the background looks after what is under way, so that ranks never depend on when the
others come to wait.

[Note: waiting] A wait looks again at once for some microseconds, since peers that run are mostly about to come; then it
yields the core; then it sleeps in the kernel, which wakes it with a higher priority than those that have been
computing, and on a free core, if there is one. So a yield that took long, because somebody else has computed on this
core, is the last before it sleeps. Where ranks outnumber the cores, that somebody is mostly the peer that it waits for:
there it yields at once, and many times.

The invariant: a wait ends: with what it waits for, or with an error that says which rank has not come, and why.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline import waits
from paceline.comm.engine.background import Driver
from paceline.comm.engine.lookout import Lookout
from paceline.comm.engine.operation import Operation
from paceline.comm.engine.queue import Queue
from paceline.comm.transport import Transport
from paceline.errors import PacelineError

_NUM_SPINS, _NUM_YIELDS = 40, 60
_NUM_YIELDS_CROWDED = 300  # where ranks outnumber the cores
_LONG_YIELD_S = 30e-6
_PAUSE_S = 0.05  # at most, before the peers are looked at


class Engine:
    """Drives the operations of one group.

    Args:
        ranks: the global rank of each rank in the group.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], timeout_s: float) -> None:
        self.transport = transport
        self.timeout_s = timeout_s
        self._queue = Queue(transport, f"rank {ranks[transport.rank]}")
        self._lookout = Lookout(self._queue, transport, ranks)
        self._drivers: list[Driver] = []
        self._is_crowded = transport.num_local > _num_cores()

    # -- operations ----------------------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Queue ``operation`` and go on as far as can be without waiting.

        Raises:
            CommunicationError: the group has failed before, was closed, or is a parent's.
        """
        queue = self._queue
        queue.check_usable()
        try:
            with queue.lock:
                queue.add(operation)
                queue.advance()
            queue.resolve()
        except PacelineError:
            raise
        except BaseException as interruption:  # the caller takes it for not called; the other ranks do not
            self.abort(f"{operation.call} was interrupted by {type(interruption).__name__}")
            raise

    def watch(self, *, at_once: bool = False) -> None:
        """What was submitted is not waited for: let the background go on with it, soon if nobody else does, or now."""
        driver = next((driver for driver in self._drivers if not driver.is_calling_back), None)
        if driver is None:
            driver = Driver(self._queue, self._lookout, lambda: self.watch(at_once=True))
            self._drivers.append(driver)
        driver.wake(at_once=at_once)

    def check_own(self) -> None:
        """Raise CommunicationError in a process that was forked from the rank: it may not touch what is shared."""
        self._queue.check_own()

    def drive(self) -> None:
        """Go on as far as can be without waiting.

        Raises:
            CommunicationError: the group is a parent's.
        """
        self._queue.check_own()
        try:
            with self._queue.lock:
                self._queue.advance()
        finally:
            self._queue.resolve()

    def also_advance(self, advance: Callable[[], bool]) -> None:
        """Whenever anybody drives, call ``advance`` too, with the lock; it says whether anything ended."""
        self._queue.also_advance(advance)

    def promise(self, operation: Operation) -> "torch.futures.Future[Any]":
        """A future of ``operation``. Somebody may wait for it where nobody can drive, so the background does.

        Raises:
            CommunicationError: the group is a parent's.
        """
        self._queue.check_own()
        future, signal = operation.promise()
        with self._queue.lock:
            operation.signals.append(signal)
            is_done = operation.is_done
            if is_done:
                self._queue.finished.append(operation)
        self._queue.resolve()
        if not is_done:
            self.watch(at_once=True)
        return future

    def cancel(self, message: Operation) -> None:
        """Wait for it no more, if it is not done: as if it had never been asked for.

        Raises:
            CommunicationError: the group is a parent's.
        """
        self._queue.check_own()
        with self._queue.lock:
            self._queue.cancel(message)

    # -- waiting -------------------------------------------------------------------------------------------------

    def wait(self, operation: Operation, timeout_s: float | None = None) -> None:
        """Drive until ``operation`` is done; raise its error if it failed.

        Args:
            timeout_s: from now; by default the operation's own deadline stands.
        """
        if not operation.is_done:
            try:
                self.wait_until(lambda: operation.is_done, operation, timeout_s)
            finally:
                self._queue.resolve()
        if operation.error is not None:
            raise operation.error

    def wait_until(self, is_done: Callable[[], bool], operation: Operation, timeout_s: float | None = None) -> None:
        """Drive until ``is_done()``, which is asked with the lock. [Note: waiting]

        Args:
            operation: what is waited for, for errors; it need not be in the queue.
            timeout_s: of this wait, from now; by default the operation's own deadline stands.
        Raises:
            PeerError, CollectiveTimeoutError, CommunicationError: it will not be done.
        """
        self._queue.check_own()
        try:
            self._wait_until(is_done, operation, timeout_s)
        except PacelineError:
            raise
        except BaseException as interruption:  # Ctrl-C: the other ranks need not wait for their deadline
            self.abort(f"the wait for {operation.call} was interrupted by {type(interruption).__name__}")
            raise
        finally:
            waits.forget()

    def _wait_until(self, is_done: Callable[[], bool], operation: Operation, timeout_s: float | None) -> None:
        queue, num_looks, since = self._queue, 0, time.perf_counter()
        deadline = operation.deadline if timeout_s is None else time.monotonic() + timeout_s
        num_spins, num_yields = (0, _NUM_YIELDS_CROWDED) if self._is_crowded else (_NUM_SPINS, _NUM_YIELDS)
        while True:
            with queue.lock:
                has_ended = queue.advance()
                if is_done():
                    return
                queue.check_going()
                num_looks = 1 if has_ended else num_looks + 1
                sleeps = num_looks > num_spins + num_yields
                queue.num_sleepers += sleeps  # with the lock: who ends the operation after this will ring
            if sleeps:
                queue.sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))
            if sleeps or has_ended:  # beside others that end all the time, it might never come to sleep
                self._lookout.look_after(operation, is_done, deadline, timeout_s)
                self._lookout.tell(operation, time.perf_counter() - since)
            elif num_looks > num_spins and self._yield_core(since):
                num_looks = num_spins + num_yields

    def _yield_core(self, since: float) -> bool:
        """Whether it is time to sleep, after a wait that has begun at ``since``. [Note: waiting]"""
        start = time.perf_counter()
        os.sched_yield()
        if self._is_crowded:  # a yield may take as long as all others compute
            return start - since > _PAUSE_S
        return time.perf_counter() - start > _LONG_YIELD_S

    def nudge(self) -> None:
        """Something has happened that rings no bell: let those who sleep look."""
        with self._queue.lock:
            self.transport.nudge()

    # -- its end -------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Give the group up: all that is under way fails, here and on the other ranks."""
        if self._queue.is_own:
            with self._queue.lock:
                self._queue.fail(reason)
            self._queue.resolve()

    def depart(self, last_words: str) -> None:
        """Tell the other ranks that this one will call nothing any more, and why, if it failed."""
        if self._queue.is_own and not self._queue.is_closed:
            self.transport.depart(last_words)

    def close(self) -> None:
        """End the background and free what the transport holds. Twice does no harm."""
        if not self._queue.is_own:
            return
        with self._queue.lock:
            was_open = self._queue.close()
        self._queue.resolve()
        for driver in self._drivers:
            driver.stop()
        self._drivers.clear()
        self._queue.forget_others()
        if was_open:
            self.transport.close()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
