"""Telling the other hosts that ranks here have failed: at once, or when what explains it has had time to be told."""

import socket
import time

from paceline.launch.failures.ending import first_failure
from paceline.launch.failures.words import describe
from paceline.launch.hosts.rendezvous import Rendezvous
from paceline.launch.lives.life import Life
from paceline.launch.loop import Loop
from paceline.launch.supervisor.course import Course

_CLAIM_S = 0.5  # before a host says that it failed first, where its ranks have merely raised


class Claims:
    """What this host claims to have failed first.

    Args:
        is_alone: there is no other host.
    """

    def __init__(self, loop: Loop, rendezvous: Rendezvous, course: Course, *, is_alone: bool) -> None:
        self._loop = loop
        self._rendezvous = rendezvous
        self._course = course
        self._is_alone = is_alone
        self._claimed: Life | None = None

    def claim_soon(self, life: Life) -> None:
        """A rank of ``life`` has failed."""
        first = first_failure(life.endings_so_far())
        has_raised = first is not None and first.report is not None and first.report.kind == "raised"
        # Of several hosts, that of a rank that died or has left speaks first: it explains what others have raised.
        delay_s = _CLAIM_S if has_raised and not self._is_alone else 0.0
        life.explained_by_s = time.monotonic() + delay_s
        self._loop.call_later(delay_s, lambda: self.claim(life))

    def claim(self, life: Life) -> None:
        """Tell them, once for each life, unless it is over or another host has failed before."""
        if not life.is_open or life is self._claimed or self._course.peer_failure is not None:
            return
        first = first_failure(life.endings_so_far())
        if first is not None:
            self._claimed = life
            text = describe([first], first)
            self._rendezvous.fail({"host": socket.gethostname(), "exit_status": first.exit_status, "text": text})
