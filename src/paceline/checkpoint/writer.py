"""One thing at a time, done beside training.

The invariant: no failure is lost. It is logged, and raised by the next call that asks, once.
"""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("paceline.checkpoint")


class Writer:
    """Runs work in a thread, which lives no longer than the work; python waits for it at its end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin; nothing else may be under way."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(work,), name="paceline checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is under way.

        Raises:
            Exception: what the work has raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def check(self) -> None:
        """As ``wait``, if the work is done already."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._failure = error
            logger.error("%s (The next step raises this, or wait(), if there is one.)", error)
