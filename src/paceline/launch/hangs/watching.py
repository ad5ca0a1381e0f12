"""Noticing that ranks wait for others for too long.

Two things tell of it, and both cost a look at some memory or a file in /proc, now and then. A rank tells of its waits
in paceline's own groups: see ``paceline.waits``. In torch's groups a main thread that waits sleeps in the kernel: as
long as it has not gone to sleep anew, it has not moved, and what it is in is asked only once that has lasted.

The invariant: a rank that moves is not said to hang, however slow it is, and each hang is told once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.launch.hangs.asking import Status
from paceline.launch.hangs.stacks import Answer, collective_of, is_in_backward
from paceline.launch.life import Life
from paceline.launch.loop import Loop

_LOOK_S = 1.0  # at most, between two looks


@dataclass
class _Sleep:
    """A main thread that has not moved.

    Attributes:
        number: how often it had gone to sleep; None until it is known again, after a signal has woken it.
        is_told: it has been asked where it is since.
    """

    number: str | None
    since_s: float
    is_told: bool = False


class Watch:
    """Watches the ranks of ``life``.

    Args:
        hang_s: how long a wait may last, in seconds.
        ask: called when a wait has lasted: to have the ranks asked where they are.
        is_asking: whether they are being asked, which wakes them.
    """

    def __init__(
        self, loop: Loop, life: Life, hang_s: float, ask: Callable[[], None], is_asking: Callable[[], bool]
    ) -> None:
        self._loop = loop
        self._life = life
        self._hang_s = hang_s
        self._ask = ask
        self._sleeps: dict[int, _Sleep] = {}  # by local rank
        self._told: set[tuple[int, float]] = set()  # local rank, and since when it waits
        self._is_asking = is_asking
        self._later()

    def _later(self) -> None:
        self._loop.call_later(min(_LOOK_S, self._hang_s / 4), self._look)

    def _look(self) -> None:
        if not self._life.is_open or self._life.is_stopping:
            return
        if not self._is_asking():
            for local_rank, pid in self._life.living():
                self._watch_sleep(local_rank, Status(pid, pid), time.monotonic())
            if any(self._overdue()):
                self._ask()
        self._later()

    def _watch_sleep(self, local_rank: int, status: Status, now_s: float) -> None:
        number = status.get("voluntary_ctxt_switches", "") if status.get("State", "")[:1] in ("S", "D") else ""
        known = self._sleeps.get(local_rank)
        if known is not None and known.number is None:
            known.number = number
        elif known is None or not number or known.number != number:
            self._sleeps[local_rank] = _Sleep(number, now_s)

    def _overdue(self) -> tuple[set[int], set[tuple[int, float]]]:
        """The ranks whose sleep, and the waits, that have lasted and have not been told."""
        since_s = time.monotonic() - self._hang_s
        sleeps = {rank for rank, sleep in self._sleeps.items() if sleep.since_s <= since_s and not sleep.is_told}
        return sleeps, {wait for wait in self._waits() if wait[1] <= since_s} - self._told

    def _waits(self) -> set[tuple[int, float]]:
        told = [(local_rank, self._life.pages[local_rank].read()) for local_rank, _ in self._life.living()]
        return {(local_rank, wait.since_s) for local_rank, words in told if words for wait in words.waits}

    def hear(self, answers: Sequence[Answer], source: Callable[[str, int], str]) -> tuple[list[Answer], list[int]]:
        """What ranks have answered, whoever has asked: with what is known of their sleep, and the ranks that hang.

        Args:
            source: see :func:`~paceline.launch.hangs.stacks.collective_of`.
        """
        first_rank = self._life.layout.first_rank
        sleeps, waits = self._overdue()
        answers = [replace(answer, stands_still=answer.rank - first_rank in sleeps) for answer in answers]
        hanging = [
            answer.rank
            for answer in answers
            if (answer.stands_still and (collective_of(answer.stack, source) or is_in_backward(answer.stack)))
            or any(answer.rank - first_rank == wait[0] for wait in waits)
        ]
        for local_rank, sleep in self._sleeps.items():
            sleep.number = None  # the question has woken it
            sleep.is_told = sleep.is_told or bool(hanging) or local_rank in sleeps
        if hanging:
            self._told = self._waits()
        return answers, hanging
