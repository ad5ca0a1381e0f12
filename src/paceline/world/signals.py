"""The signals by which a scheduler says that the time is nearly up.

The invariant: whoever handled them before still does, and once they are given back, everything is as it was. In a
forked child, which is no rank, SIGTERM is as it was from the start, and SIGUSR1, which Slurm sends to every process of
a step, does not end a loader's worker.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

from paceline.errors import WorldError

_HEEDED = (signal.SIGUSR1, signal.SIGTERM)

_in_force: "list[Signals]" = []


class Signals:
    """SIGUSR1 and SIGTERM, heeded from the making of this until ``give_back``.

    A handler that was not installed from Python, which Python could not give back, is left alone.

    Attributes:
        came: the one that has come last.
    """

    def __init__(self, rank: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise WorldError(
                f"rank {rank}: should_stop() was first called in thread {threading.current_thread().name!r}, where "
                "Python cannot install signal handlers. Call it in the main thread first; after that, any thread may."
            )
        self.came: signal.Signals | None = None
        self._was_told_to_end = False  # by SIGTERM, which may come once without doing what it would have done
        self._is_over = False
        self._more_to_come = False
        self._before: dict[int, Any] = {}
        for signum in _HEEDED:
            before = signal.getsignal(signum)
            if before is not None:
                self._before[signum] = before
                signal.signal(signum, self._on_signal)
        _in_force.append(self)

    def give_back(self, *, more_to_come: bool) -> None:
        """Heed them no longer. Outside the main thread the handlers stay, and only hand on what comes.

        Args:
            more_to_come: SIGUSR1 is on its way here, since others have received it; or for the second time, where both
                Slurm and a launcher send it. It then finds this process leaving,
                and must not kill it: where nobody handled it, it is ignored to the end, as only SIG_IGN outlives
                Python's own end.
        """
        self._more_to_come = more_to_come  # first: it may come between any two of these lines
        self._is_over = True
        if self in _in_force:
            _in_force.remove(self)
        if threading.current_thread() is threading.main_thread():
            handlers = dict(self._before)
            if more_to_come and handlers.get(signal.SIGUSR1) == signal.SIG_DFL:
                handlers[signal.SIGUSR1] = signal.SIG_IGN
            self._restore(handlers)

    def leave_to_parent(self) -> None:
        """In a forked child."""
        before = dict(self._before)
        if not callable(before.get(signal.SIGUSR1)):
            before[signal.SIGUSR1] = _do_nothing  # not SIG_IGN, which programs that the child starts would inherit
        self._restore(before)

    def _restore(self, handlers: dict[int, Any]) -> None:
        for signum, handler in handlers.items():
            if signal.getsignal(signum) == self._on_signal:  # else somebody else's, who may call ours
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        # It may have interrupted anything, so it takes no lock and talks to nobody.
        before = self._before[signum]
        is_late = self._more_to_come and signum == signal.SIGUSR1
        hands_on = (self._is_over and not is_late) or (signum == signal.SIGTERM and self._was_told_to_end)
        if not self._is_over:
            self.came = signal.Signals(signum)
            self._was_told_to_end |= signum == signal.SIGTERM
        if callable(before):
            before(signum, frame)
        elif hands_on and before == signal.SIG_DFL:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    pass


def _leave_to_parent() -> None:
    for signals in _in_force:
        signals.leave_to_parent()
    _in_force.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
