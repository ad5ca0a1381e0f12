"""Where operations wait: the queue of a group, the backing off, deadlines, and the end of peers.

Collectives run one after another, in the order in which they were called; messages run beside them. Every thread that
waits for an operation takes turns at driving all of them. Where nobody waits, a thread in the background looks after
what is under way, so that ranks never depend on when the others come to wait.

[Note: waiting] A wait looks again at once for some microseconds, since peers that run are mostly about to come; then it
yields the core; then it sleeps in the kernel, which wakes it with a higher priority than those that have been
computing, and on a free core, if there is one. So a yield that took long, because somebody else has computed on this
core, is the last before it sleeps. Where ranks outnumber the cores, that somebody is mostly the peer that it waits for:
there it yields at once, and many times.

The invariant: an operation that fails leaves the ranks out of step, so all later ones of the group fail too, with the
first one's reason, on this rank and on all others; a mismatch alone, which is found before anything is done, does not.
"""

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.comm.transport import Call, Steps, Transport
from paceline.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    PacelineError,
    PeerError,
)
from paceline.rendezvous.peers import name_ranks

_NUM_SPINS, _NUM_YIELDS = 40, 60
_NUM_YIELDS_CROWDED = 300  # where ranks outnumber the cores
_LONG_YIELD_S = 30e-6
_PAUSE_S = 0.05  # at most, before the peers are looked at
_LOOK_S = 0.1  # between two looks at the peers
_DOUBT_S = 0.25  # how long news of a peer that is gone may be on its way
_TICK_S = 0.002  # how long nobody may drive before the thread in the background does
_IDLE_TICK_S = 0.02  # between two of its looks while there is nothing to drive
_LINGER_S = 1.0  # without anything to drive, before it goes to sleep


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


class Engine:
    """Drives the operations of one group.

    Args:
        ranks: the global rank of each rank in the group.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], timeout_s: float) -> None:
        self.transport = transport
        self.timeout_s = timeout_s
        self._ranks = ranks
        self.name_of_me = f"rank {ranks[transport.rank]}"
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held while anything advances, never while anybody sleeps
        self._collectives: deque[Operation] = deque()
        self._messages: list[Operation] = []
        self._finished: list[Operation] = []  # whose futures are to be told
        self._failure = ""
        self._is_closed = False
        self._num_calls = 0
        self._num_sleepers = 0
        self._num_drives = 0
        self._next_look = 0.0
        self._doubted_since = math.inf
        self._drivers: list[_Driver] = []
        self._others: list[Callable[[], bool]] = []
        self._is_crowded = transport.num_local > _num_cores()

    # -- what a group calls --------------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Queue ``operation`` and go on as far as can be without waiting.

        Raises:
            CommunicationError: the group has failed before, was closed, or is a parent's.
        """
        self._check_usable()
        with self._lock:
            self._num_calls += 1
            operation.number = self._num_calls
            if operation.is_message:
                self._messages.append(operation)
            else:
                self._collectives.append(operation)
            self._advance()
        self._resolve()

    def watch(self, *, at_once: bool = False) -> None:
        """What was submitted is not waited for: let the background go on with it, soon if nobody else does, or now."""
        driver = next((driver for driver in self._drivers if not driver.is_calling_back), None)
        if driver is None:
            driver = _Driver(self)
            self._drivers.append(driver)
        driver.wake(at_once=at_once)

    def wait(self, operation: Operation, timeout_s: float | None = None) -> None:
        """Drive until ``operation`` is done; raise its error if it failed.

        Args:
            timeout_s: from now; by default the operation's own deadline stands.
        """
        if not operation.is_done:
            deadline = operation.deadline if timeout_s is None else time.monotonic() + timeout_s
            try:
                self.wait_until(lambda: operation.is_done, operation, deadline)
            finally:
                self._resolve()
        if operation.error is not None:
            raise operation.error

    def wait_until(self, is_done: Callable[[], bool], operation: Operation, deadline: float) -> None:
        """Drive until ``is_done()``, which is asked with the lock. [Note: waiting]

        Args:
            operation: what is waited for, for errors; it need not be in the queue.
        Raises:
            PeerError, CollectiveTimeoutError, CommunicationError: it will not be done.
        """
        self._check_own()
        try:
            self._wait_until(is_done, operation, deadline)
        except PacelineError:
            raise
        except BaseException as interruption:  # Ctrl-C: the other ranks need not wait for their deadline
            self.abort(f"the wait for {operation.call} was interrupted by {type(interruption).__name__}")
            raise

    def _wait_until(self, is_done: Callable[[], bool], operation: Operation, deadline: float) -> None:
        num_spins, num_yields = (0, _NUM_YIELDS_CROWDED) if self._is_crowded else (_NUM_SPINS, _NUM_YIELDS)
        num_looks = 0
        while True:
            with self._lock:
                if self._advance():
                    num_looks = 0
                if is_done():
                    return
                self._check_usable()
                num_looks += 1
                sleeps = num_looks > num_spins + num_yields
                self._num_sleepers += sleeps  # with the lock: who ends the operation after this will ring
            if sleeps:
                self._sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))
                self._look_after(operation, is_done, deadline)
            elif num_looks > num_spins and self._yield_core():
                num_looks = num_spins + num_yields

    def cancel(self, message: Operation) -> None:
        """Wait for it no more, if it is not done: as if it had never been asked for."""
        with self._lock:
            if not message.is_done:
                message.withdraw()
                self._end(message, CommunicationError(f"{self.name_of_me}: {message.call} was cancelled."))

    def drive(self) -> None:
        """Go on as far as can be without waiting."""
        with self._lock:
            self._advance()
        self._resolve()

    def promise(self, operation: Operation) -> "torch.futures.Future[Any]":
        """A future of ``operation``. Somebody may wait for it where nobody can drive, so the background does."""
        future, signal = operation.promise()
        with self._lock:
            operation.signals.append(signal)
            is_done = operation.is_done
            if is_done:
                self._finished.append(operation)
        self._resolve()
        if not is_done:
            self.watch(at_once=True)
        return future

    def abort(self, reason: str) -> None:
        """Give the group up: all that is under way fails, here and on the other ranks."""
        if self._pid == os.getpid():
            with self._lock:
                self._fail(reason)
            self._resolve()

    def depart(self, last_words: str) -> None:
        """Tell the other ranks that this one will call nothing any more, and why, if it failed."""
        if self._pid == os.getpid() and not self._is_closed:
            self.transport.depart(last_words)

    def close(self) -> None:
        """End the background and free what the transport holds. Twice does no harm."""
        if self._pid != os.getpid():
            return
        with self._lock:
            is_open = not self._is_closed
            self._is_closed = True
            for operation in self._pending():
                self._end(operation, CommunicationError(f"{self.name_of_me}: the process group was destroyed."))
        self._resolve()
        for driver in self._drivers:
            driver.stop()
        self._drivers.clear()
        self._others.clear()
        if is_open:
            self.transport.close()

    def also_advance(self, advance: Callable[[], bool]) -> None:
        """Whenever anybody drives, call ``advance`` too, with the lock; it says whether anything ended."""
        self._others.append(advance)

    def nudge(self) -> None:
        """Something has happened that rings no bell: let those who sleep look."""
        with self._lock:
            self.transport.nudge()

    # -- with the lock -------------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Go on as far as can be without waiting; whether anything ended."""
        self._num_drives += 1
        self.transport.poll()
        has_ended = False
        while self._collectives and self._advance_one(self._collectives[0]):
            has_ended = True
        for message in list(self._messages):
            if not message.is_done:  # as when another has failed
                has_ended = self._advance_one(message) or has_ended
        for advance in self._others:
            try:
                has_ended = advance() or has_ended
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")
                raise
        if has_ended and self._num_sleepers:
            self.transport.nudge()  # another thread may wait for what has ended
        return has_ended

    def _advance_one(self, operation: Operation) -> bool:
        try:
            error = operation.advance()
        except BaseException as interruption:  # Ctrl-C in the middle of it: nobody may take it for done
            self._end(operation, CommunicationError(f"{self.name_of_me}: {operation.call} was interrupted."))
            self._fail(f"{operation.call} was interrupted by {type(interruption).__name__}")
            raise
        if error is None and not operation.is_done:
            return False
        self._end(operation, error)
        if error is not None and not isinstance(error, CollectiveMismatchError):
            self._fail(f"{operation.call} failed: {type(error).__name__}: {error}")
        return True

    def _end(self, operation: Operation, error: BaseException | None) -> None:
        operation.finish(error)
        if operation.is_message:
            self._messages.remove(operation)
        else:
            self._collectives.remove(operation)
        if operation.signals:
            self._finished.append(operation)

    def _fail(self, reason: str, error: Exception | None = None) -> None:
        """All that is under way ends with ``error``; nothing can begin any more, here and on the other ranks."""
        if self._failure or self._is_closed:
            return
        self._failure = reason
        for operation in self._pending():
            self._end(operation, error or CommunicationError(self._refusal()))
        self.transport.give_up(reason)
        if self._num_sleepers:
            self.transport.nudge()

    def _pending(self) -> list[Operation]:
        return [*self._collectives, *self._messages]

    # -- without it ----------------------------------------------------------------------------------------------

    def _sleep(self, timeout_s: float) -> None:
        """Counted among ``_num_sleepers`` before."""
        has_heard = False
        try:
            has_heard = self.transport.pause(timeout_s)
        finally:
            with self._lock:
                self._num_sleepers -= 1
                if has_heard:
                    self.transport.heard()

    def _look_after(self, operation: Operation, is_done: Callable[[], bool], deadline: float) -> None:
        """Fail what cannot be done any more: its peers are gone, or it is too late."""
        now = time.monotonic()
        error: Exception | None = None
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            error = self._find_gone(operation, now)
        if error is None and now >= deadline:
            error = CollectiveTimeoutError(self._lateness(operation))
        if error is None:
            return
        with self._lock:
            self._advance()  # the peer may have gone after it had done its part
            if is_done():
                return
            if isinstance(error, PeerError) or now >= operation.deadline:
                self._fail(str(error), error)
        raise error

    def _yield_core(self) -> bool:
        """Whether it is time to sleep. [Note: waiting]"""
        start = time.perf_counter()
        os.sched_yield()
        return not self._is_crowded and time.perf_counter() - start > _LONG_YIELD_S

    def look_after(self, operation: Operation) -> None:
        self._look_after(operation, lambda: operation.is_done, operation.deadline)

    def _find_gone(self, operation: Operation, now: float) -> PeerError | None:
        """The error, if a rank is gone that still has something to do for ``operation``."""
        try:
            self.transport.check_peers(self._awaited(operation))
            self._doubted_since = math.inf
        except PeerError:
            pass
        else:
            return None
        # It may have done that, and gone then; news of it may still be on its way.
        self._doubted_since = min(self._doubted_since, now)
        with self._lock:
            self._advance()
            if not self.transport.is_settled() and now - self._doubted_since < _DOUBT_S:
                return None
            awaited = self._awaited(operation)
        try:
            self.transport.check_peers(awaited)
        except PeerError as error:
            return error
        return None

    def _awaited(self, operation: Operation) -> Sequence[int]:
        """The ranks that have something to do still before ``operation`` can be done."""
        return self.transport.absent() if operation.awaited is None else operation.awaited()

    def _lateness(self, operation: Operation) -> str:
        absent = [self._ranks[rank] for rank in self._awaited(operation)]
        if self._collectives and operation is not self._collectives[0] and not operation.is_message:
            who = f"{self._collectives[0].call}, called before it, is not done either"
        elif absent:
            others = "" if operation.is_message else ", the others have"
            who = f"{name_ranks(absent)} {'has' if len(absent) == 1 else 'have'} not come to it{others}"
        else:
            who = "all ranks have come to it"
        return (
            f"{self.name_of_me}: {operation.call}, call number {operation.number} of this group, was not done after "
            f"{operation.timeout_s:g} s, the timeout that it was given: {who}. Look where the ranks are."
        )

    def _resolve(self) -> None:
        """Tell futures, without the lock: they may call back."""
        while self._finished:
            try:
                operation = self._finished.pop()
            except IndexError:  # another thread has
                return
            operation.resolve()

    def _check_own(self) -> None:
        if self._pid != os.getpid():
            raise CommunicationError(
                f"this process was forked from {self.name_of_me}, and the process group is its parent's. Call "
                "collectives in the rank, or init() here for a world of its own."
            )

    def _check_usable(self) -> None:
        self._check_own()
        if self._is_closed:
            raise CommunicationError(f"{self.name_of_me}: the process group was destroyed.")
        if self._failure:
            raise CommunicationError(self._refusal())

    def _refusal(self) -> str:
        return (
            f"{self.name_of_me}: this process group has failed before, and its ranks are out of step. End them all and "
            f"start from a checkpoint. The first error was: {self._failure}"
        )


class _Driver:
    """A thread in the background that drives a group's operations while nobody else does.

    Attributes:
        is_calling_back: whether it runs what users have asked futures to call. That may wait for other operations, so
            while it lasts, another driver is needed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._awake = threading.Event()
        self._is_stopped = False
        self._is_parked = False
        self.is_calling_back = False
        self._thread = threading.Thread(target=self._run, name="paceline collectives", daemon=True)
        self._thread.start()

    def wake(self, *, at_once: bool) -> None:
        """Have it look: now, or within ``_IDLE_TICK_S``. To wake a thread takes time of the one that computes."""
        if at_once or self._is_parked:
            self._awake.set()

    def stop(self) -> None:
        self._is_stopped = True
        self._awake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        engine, num_drives, idle_since = self._engine, -1, time.monotonic()
        while not self._is_stopped:
            pending = engine._pending()
            if pending:
                idle_since = time.monotonic()
            has_promised = any(operation.signals for operation in pending)
            if pending and (has_promised or engine._num_drives == num_drives):
                self._drive()
            elif time.monotonic() - idle_since > _LINGER_S:
                self._is_parked = True
                if not engine._pending():  # again: some may have come before it was parked
                    self._awake.wait()
                self._is_parked = False
                idle_since = time.monotonic()
            else:
                self._awake.wait(_TICK_S if pending else _IDLE_TICK_S)
            self._awake.clear()
            num_drives = engine._num_drives

    def _drive(self) -> None:
        engine = self._engine
        with engine._lock:
            engine._advance()
        self._call_back()
        with engine._lock:
            sleeps = bool(engine._pending())
            engine._num_sleepers += sleeps
        if sleeps:
            engine._sleep(_TICK_S)
            for operation in engine._pending():
                with contextlib.suppress(PacelineError):  # whoever waits for it is told
                    engine.look_after(operation)
            self._call_back()

    def _call_back(self) -> None:
        if not self._engine._finished:
            return
        self.is_calling_back = True
        if self._engine._pending():
            self._engine.watch(at_once=True)
        self._engine._resolve()
        self.is_calling_back = False


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
