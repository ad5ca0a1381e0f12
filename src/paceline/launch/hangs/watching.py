"""Noticing that ranks wait for others for too long.

Two things tell of it, and both cost a look at some memory or a file in /proc, now and then. A rank tells of its waits
in paceline's own groups: see ``paceline.waits``. In torch's groups a main thread that waits sleeps in the kernel: as
long as it has not gone to sleep anew, it has not moved, and what it is in is asked only once that has lasted.

The invariant: a rank that moves is not said to hang, however slow it is, and each hang is told once.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from paceline.launch.hangs.asking import Status
from paceline.launch.hangs.stacks import Answer, collective_of, is_in_backward
from paceline.launch.lives.life import Life
from paceline.launch.loop import Loop

_LOOK_S = 1.0  # at most, between two looks


@dataclass
class _Sleep:
    """A main thread that has not moved.

    Attributes:
        number: how often it had gone to sleep; -1 while it runs.
        is_told: it has been asked where it is since.
    """

    number: int
    since_s: float
    is_told: bool = False


class Watch:
    """Watches the ranks of ``life``.

    Args:
        hang_s: how long a wait may last, in seconds.
        ask: called when something has lasted that long, to have ranks asked where they are: these local ranks, or all.
        is_asking: whether they are being asked, which wakes them.
    """

    def __init__(
        self,
        loop: Loop,
        life: Life,
        hang_s: float,
        ask: Callable[[Collection[int] | None], None],
        is_asking: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._life = life
        self._hang_s = hang_s
        self._ask = ask
        self._sleeps: dict[int, _Sleep] = {}  # by local rank
        self._told: set[tuple[int, float]] = set()  # local rank, and since when it waits
        self._is_asking = is_asking
        self._pause_s = min(_LOOK_S, hang_s / 4)
        self._last_look_s = self._steady_since_s = time.monotonic()
        self._loop.call_later(self._pause_s, self._look)

    def _look(self) -> None:
        if not self._life.is_open or self._life.is_stopping:
            return
        now_s = time.monotonic()
        if now_s - self._last_look_s > 10 * self._pause_s:  # Ctrl-Z, say: all have stood still, for no fault of theirs
            self._steady_since_s = now_s
            for sleep in self._sleeps.values():
                sleep.since_s = now_s
        self._last_look_s = now_s
        if not self._is_asking():
            self.refresh()
            suspects = [rank for rank, sleep in self._long_sleeps().items() if not sleep.is_told]
            if self._long_waits():
                self._ask(None)
            elif suspects:  # alone: they may sleep for reasons of their own, which are no reason to wake the others
                self._ask(suspects)
        self._loop.call_later(self._pause_s, self._look)

    def refresh(self) -> None:
        """Look who sleeps: also before anybody else has the ranks asked, which wakes them."""
        for local_rank, pid in self._life.living():
            self._watch_sleep(local_rank, Status(pid, pid))

    def _watch_sleep(self, local_rank: int, status: Status) -> None:
        is_asleep = status.get("State", "")[:1] in ("S", "D")
        number = int(status.get("voluntary_ctxt_switches", -1)) if is_asleep else -1
        known = self._sleeps.get(local_rank)
        if known is None or number < 0 or known.number != number:
            self._sleeps[local_rank] = _Sleep(number, time.monotonic())

    def _long_sleeps(self) -> dict[int, _Sleep]:
        since_s = time.monotonic() - self._hang_s
        return {local_rank: sleep for local_rank, sleep in self._sleeps.items() if sleep.since_s <= since_s}

    def _long_waits(self) -> set[tuple[int, float]]:
        """Those that have not been told."""
        since_s = time.monotonic() - self._hang_s
        return {wait for wait in self._waits() if max(wait[1], self._steady_since_s) <= since_s} - self._told

    def _waits(self) -> set[tuple[int, float]]:
        told = [(local_rank, self._life.pages[local_rank].read()) for local_rank, _ in self._life.living()]
        return {(local_rank, wait.since_s) for local_rank, words in told if words for wait in words.of_main_thread()}

    def hear(
        self, answers: Sequence[Answer], source: Callable[[str, int], str], *, is_all: bool
    ) -> tuple[list[Answer], list[int]]:
        """What ranks have answered, whoever has asked: with what is known of their sleep, and the ranks that hang.

        Args:
            source: see :func:`~paceline.launch.hangs.stacks.collective_of`.
            is_all: all ranks were asked. If any hangs, that is told now, and not again.
        """
        first_rank = self._life.layout.first_rank
        sleeps, waits = self._long_sleeps(), {local_rank for local_rank, _ in self._long_waits()}
        answers = [replace(answer, stands_still=answer.rank - first_rank in sleeps) for answer in answers]
        hanging = []
        for answer in answers:
            local_rank = answer.rank - first_rank
            is_new = local_rank in sleeps and not sleeps[local_rank].is_told
            if local_rank in waits or (is_new and _waits_asleep(answer, source)):
                hanging.append(answer.rank)
        for local_rank in {answer.rank - first_rank for answer in answers} & self._sleeps.keys():
            sleep = self._sleeps[local_rank]
            sleep.is_told |= is_all if hanging else local_rank in sleeps
            sleep.number += 1  # the question has woken it, and it has gone to sleep again
        if is_all and hanging:
            self._told = self._waits()
        return answers, hanging


def _waits_asleep(answer: Answer, source: Callable[[str, int], str]) -> bool:
    """Whether a rank that has not moved waits for others."""
    return bool(answer.waits or collective_of(answer.stack, source) or is_in_backward(answer.stack))
