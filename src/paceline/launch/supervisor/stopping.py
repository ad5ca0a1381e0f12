"""Ending the ranks of a life: asked first, killed when their grace is over; and whom the launcher cannot end."""

import contextlib
import os
import signal
import time
from collections import deque

from paceline.launch.failures.words import describe_wait
from paceline.launch.hangs.asking import survives
from paceline.launch.lives.life import Life
from paceline.launch.loop import Loop
from paceline.launch.spec.launch import LaunchSpec
from paceline.launch.supervisor.audience import Audience
from paceline.launch.supervisor.course import Course
from paceline.waits import ASKING_SIGNAL

_PATIENCE_S = 1.0  # for ranks to end, before it is said that they are waited for


class Stopping:
    """Ends the ranks of ``life`` when it is told to."""

    def __init__(self, life: Life, loop: Loop, spec: LaunchSpec, audience: Audience, course: Course) -> None:
        self._life = life
        self._loop = loop
        self._spec = spec
        self._audience = audience
        self._course = course
        self._last = signal.SIGTERM
        self._next: deque[signal.Signals] = deque()

    def stop(self, *signals: signal.Signals) -> None:
        """Send each signal in turn, a grace apart. The first call decides."""
        if self._life.is_open and not self._life.is_stopping:
            self._life.stop_at_s = time.monotonic()
            self._next = deque(signals)
            self._escalate()
            self._loop.call_later(_PATIENCE_S, self._look_who_is_left)

    def hurry(self) -> None:
        """Kill them now."""
        self._next = deque([signal.SIGKILL])
        self._escalate()

    def catch_up(self, local_rank: int) -> None:
        """A rank has been born: if the others have been signalled already, it is now."""
        if self._life.is_stopping:
            self._signal(local_rank, self._last)

    def signal_groups(self, signum: signal.Signals) -> None:
        """Signal all ranks that run, and what they have started."""
        for local_rank, _ in list(self._life.living()):
            self._signal(local_rank, signum)

    def _escalate(self) -> None:
        if self._next and self._life.is_open:
            self._last = self._next.popleft()
            self.signal_groups(self._last)
            self._loop.call_later(self._spec.grace_s, self._escalate)

    def _signal(self, local_rank: int, signum: signal.Signals) -> None:
        # A rank that has reported its failure is on its way out, and its exit code is wanted.
        is_leaving = signum == signal.SIGTERM and local_rank in self._life.reports
        if is_leaving and self._course.ending_signal is None:
            return
        is_ours = self._life.signal_group(local_rank, signum)
        if not is_ours and signum == signal.SIGKILL:
            self._let_go(local_rank)

    def _let_go(self, local_rank: int) -> None:
        """Of a rank that has become another user's, as `sudo` does: only they can end it."""
        rank, pid = self._life.layout.first_rank + local_rank, dict(self._life.living())[local_rank]
        self._course.broken = self._course.broken or (
            f"rank {rank} (pid {pid}) has become another user's process, which this launcher may not end: it goes on"
        )
        self._life.lost([local_rank])

    def _look_who_is_left(self) -> None:
        """Where ranks take their time to end: say why they are to, and which they are."""
        life = self._life
        if life.is_open and not life.has_ended:
            self._nudge()
            ranks = [life.layout.first_rank + rank for rank, _ in life.living()]
            self._audience.say(describe_wait(life.reports, ranks, has_keys=self._audience.has_keys))

    def _nudge(self) -> None:
        """Wake ranks that have slept through a signal that their script handles.

        Python runs a handler between two instructions. If the signal comes after the last one before a call that
        sleeps, or to another thread than the main one, only another signal ends that sleep.
        """
        for _, pid in self._life.living():
            if survives(pid, ASKING_SIGNAL):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, ASKING_SIGNAL)
