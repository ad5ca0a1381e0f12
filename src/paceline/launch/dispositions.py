"""How a process treats signals, so that a rank can start with what ``python script.py`` would have found.

A signal that was ignored when the launcher started (``nohup``, a background job) stays ignored in the ranks.
"""

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any


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
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)

    def restore_mask(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)


def only_wake(signum: int, frame: FrameType | None) -> None:
    """A handler for signals that are read from the wakeup fd: python's own part is done when it has been called."""
