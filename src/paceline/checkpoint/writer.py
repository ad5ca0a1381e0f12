"""One thing at a time, done beside training.

The invariant: no failure is lost. It is logged, and raised by the next call that asks, once.

Waiting is for an event, and not for the thread: a thread whose ``join`` is interrupted, as by Ctrl-C, counts as ended
in Python 3.11, and python would not wait for it at its end. In a forked child there is no thread, and nothing to wait
for.
"""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("paceline.checkpoint")


class Writer:
    """Runs work in a thread, which lives no longer than the work; python waits for it at its end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._is_done = threading.Event()
        self._failure: Exception | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin; nothing else may be under way."""
        assert self._thread is None
        self._is_done.clear()
        self._thread = threading.Thread(target=self._run, args=(work,), name="paceline checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is under way.

        Raises:
            Exception: what the work has raised.
        """
        if self._thread is not None:
            while self._thread.is_alive() and not self._is_done.wait(1.0):
                pass
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def check(self) -> None:
        """As ``wait``, if the work is done already."""
        if self._is_done.is_set():
            self.wait()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._failure = error
            logger.error("%s (The next step raises this, or wait(), if there is one.)", error)
        finally:
            self._is_done.set()
