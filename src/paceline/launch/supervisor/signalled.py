"""What signals to the launcher do: end the launch, pass on to the ranks, or follow as the terminal asks."""

import contextlib
import os
import signal
import socket
from collections.abc import Callable

from paceline.launch.dispositions import ENDING
from paceline.launch.hangs.asking import survives
from paceline.launch.hosts.rendezvous import Rendezvous
from paceline.launch.output.forwarding import Forwarder
from paceline.launch.supervisor.audience import Audience
from paceline.launch.supervisor.course import Course
from paceline.launch.supervisor.current import Current


class Signalled:
    """Acts on signals.

    Args:
        current: the life that there is, if any.
        stop: ends the launch by these signals to the ranks, in turn.
    """

    def __init__(
        self,
        audience: Audience,
        course: Course,
        rendezvous: Rendezvous,
        forwarder: Forwarder,
        current: Callable[[], Current | None],
        stop: Callable[..., None],
    ) -> None:
        self._audience = audience
        self._course = course
        self._rendezvous = rendezvous
        self._forwarder = forwarder
        self._current = current
        self._stop = stop

    def on_signals(self, signums: bytes) -> None:
        """Signals have come, one a byte."""
        for signum in map(signal.Signals, signums):
            if signum in ENDING:
                self._on_ending(signum)
            elif signum == signal.SIGTSTP:  # Ctrl-Z: the ranks are not in the terminal's foreground, so they are told
                self.signal_groups(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
                self.signal_groups(signal.SIGCONT)
            elif signum == signal.SIGWINCH:
                self.on_window()
            else:
                self._pass_on(signum)

    def signal_groups(self, signum: signal.Signals) -> None:
        """Signal all ranks that there are, and what they have started."""
        current = self._current()
        if current is not None:
            current.stopping.signal_groups(signum)

    def on_window(self) -> None:
        """The terminal has changed its size."""
        self._forwarder.follow_window()
        self.signal_groups(signal.SIGWINCH)

    def _pass_on(self, signum: signal.Signals) -> None:
        current = self._current()
        for _, pid in current.life.living() if current is not None else ():
            if signum != signal.SIGUSR2 or survives(pid, signum):
                with contextlib.suppress(PermissionError, ProcessLookupError):  # it has become another user's
                    os.kill(pid, signum)
        if signum == signal.SIGUSR2 and current is not None:
            current.whereabouts.tell()

    def _on_ending(self, signum: signal.Signals) -> None:
        course, current = self._course, self._current()
        if signum in (signal.SIGINT, signal.SIGQUIT):
            self._audience.on_keys()
        is_stopping = course.ending_signal is not None or (current is not None and current.life.is_stopping)
        if course.ending_signal is None:
            course.had_failed = is_stopping
        if is_stopping and signum == signal.SIGINT:  # the second Ctrl-C: no more patience
            course.is_hurried = True
            course.ending_signal = course.ending_signal or signum
            if current is not None:
                current.stopping.hurry()
        elif course.ending_signal is None:
            course.ending_signal = signum
            text = f"paceline: the launcher was interrupted by {signum.name}\n"
            self._rendezvous.fail({"host": socket.gethostname(), "exit_status": 128 + signum, "text": text})
            first = signum if signum in (signal.SIGINT, signal.SIGQUIT) else signal.SIGTERM
            self._stop(*dict.fromkeys((first, signal.SIGTERM, signal.SIGKILL)))
