"""A thread that drives a group's operations while nobody else does.

Ranks must not depend on when others come to wait, so what nobody waits for goes on here.

The invariant: a future that somebody has asked for is told in time, even while what another one calls back waits.
"""

import contextlib
import threading
import time
from collections.abc import Callable

from paceline.comm.engine.lookout import Lookout
from paceline.comm.engine.operation import Operation
from paceline.comm.engine.queue import Queue
from paceline.errors import PacelineError

_TICK_S = 0.002  # how long nobody may drive before the thread does
_IDLE_TICK_S = 0.02  # between two of its looks while there is nothing to drive
_LINGER_S = 1.0  # without anything to drive, before it goes to sleep


class Driver:
    """The thread.

    Args:
        stand_in: has another one drive, at once.

    Attributes:
        is_calling_back: whether it runs what users have asked futures to call. That may wait for other operations, so
            while it lasts, another driver is needed.
    """

    def __init__(self, queue: Queue, lookout: Lookout, stand_in: Callable[[], None]) -> None:
        self._queue = queue
        self._lookout = lookout
        self._stand_in = stand_in
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
        queue, num_advances, idle_since = self._queue, -1, time.monotonic()
        while not self._is_stopped:
            pending = queue.pending()
            if pending:
                idle_since = time.monotonic()
            has_promised = any(operation.signals for operation in pending)
            if pending and (has_promised or queue.num_advances == num_advances):
                self._drive()
            elif time.monotonic() - idle_since > _LINGER_S:
                self._is_parked = True
                if not queue.pending():  # again: some may have come before it was parked
                    self._awake.wait()
                self._is_parked = False
                idle_since = time.monotonic()
            else:
                self._awake.wait(_TICK_S if pending else _IDLE_TICK_S)
            self._awake.clear()
            num_advances = queue.num_advances

    def _drive(self) -> None:
        queue = self._queue
        with queue.lock, contextlib.suppress(Exception):  # the group has failed then, and whoever waits is told
            queue.advance()
        self._call_back()
        with queue.lock:
            sleeps = bool(queue.pending())
            queue.num_sleepers += sleeps
        if sleeps:
            queue.sleep(_TICK_S)
            for operation in queue.pending():
                self._look_after(operation)
            self._call_back()

    def _look_after(self, operation: Operation) -> None:
        with contextlib.suppress(PacelineError):  # whoever waits for it is told
            self._lookout.look_after(operation, lambda: operation.is_done, operation.deadline)

    def _call_back(self) -> None:
        if not self._queue.finished:
            return
        self.is_calling_back = True
        try:
            if self._queue.pending():
                self._stand_in()
            self._queue.resolve()
        finally:
            self.is_calling_back = False
