"""How a process treats signals, so that a rank can start with what ``python script.py`` would have found.

A signal that was ignored when the launcher started (``nohup``, a background job) stays ignored in the ranks.
"""

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

# What a launcher does with signals: end with its ranks, pass on, or follow as the terminal asks.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
OF_TERMINAL = (signal.SIGTSTP, signal.SIGWINCH)
# What the fork server leaves to the supervisor, which ends it by hanging up.
OF_SUPERVISOR = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Dispositions:
    """The handlers and the mask that this process was started with."""

    handlers: dict[signal.Signals, Any]
    mask: frozenset[int]

    @classmethod
    def capture(cls, signals: Iterable[signal.Signals]) -> "Dispositions":
        handlers = {signum: signal.getsignal(signum) for signum in signals}
        return cls(handlers, frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())))

    def restore(self) -> None:
        """Handlers first, so that what was held back meets the right one when the mask opens."""
        self.restore_handlers()
        self.restore_mask()

    def restore_handlers(self) -> None:
        """Have signals mean what they did; those that are held back still are."""
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)

    def restore_mask(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)


def only_wake(signum: int, frame: FrameType | None) -> None:
    """A handler for signals that are read from the wakeup fd: python's own part is done when it has been called."""


@contextlib.contextmanager
def signals_as_bytes(signums: Iterable[signal.Signals]) -> Iterator[int]:
    """A descriptor on which signals come, one a byte; what was ignored before (nohup) stays so. In the main thread."""
    dispositions = Dispositions.capture(dict.fromkeys(signums))
    wake_reader, wake_writer = os.pipe()
    for end in (wake_reader, wake_writer):
        os.set_blocking(end, False)
    previous_fd = signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    try:
        for signum, handler in dispositions.handlers.items():
            if handler is not signal.SIG_IGN:  # nohup, or a shell's background job
                signal.signal(signum, only_wake)
        yield wake_reader
    finally:
        dispositions.restore()
        signal.set_wakeup_fd(previous_fd)
        os.close(wake_reader)
        os.close(wake_writer)
