"""Asking ranks where they are, though they may be stuck in C, or in the kernel.

The rank's part is faulthandler's, which writes the stack from the handler of a signal, without Python's help: see
ranks/rank.py. Whether it has finished is seen in /proc, where the signal is neither pending nor held back any more.

The invariant: nobody is signalled whom the signal could end, and nothing is written into a file that is not the
launcher's.
"""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from paceline.launch.hangs.stacks import Answer, parse
from paceline.launch.lives.life import Life
from paceline.launch.loop import Loop
from paceline.waits import ASKING_SIGNAL, Page, Words

_LOOK_S = 0.02
_PATIENCE_S = 3.0  # for an answer, on a machine that has much else to do
_NOT_PYTHON = "in a program that is not Python's, as far as can be seen: gdb may show where"


class Status(dict[str, str]):
    """What the kernel says of a thread, by the names in proc(5); empty once it is gone."""

    def __init__(self, pid: int, thread: int) -> None:
        super().__init__()
        with contextlib.suppress(OSError):
            lines = pathlib.Path(f"/proc/{pid}/task/{thread}/status").read_text(errors="replace").splitlines()
            self.update((name, value.strip()) for name, _, value in (line.partition(":") for line in lines))

    def has(self, which: str, signum: int) -> bool:
        """Whether ``signum`` is among those caught (SigCgt), ignored (SigIgn), held back (SigBlk), ..."""
        return bool(int(self.get(which, "0"), 16) >> (signum - 1) & 1)


def survives(pid: int, signum: int) -> bool:
    """Whether ``pid`` handles or ignores ``signum``. To hold it back is not enough: shells do so for a moment."""
    status = Status(pid, pid)
    return status.has("SigCgt", signum) or status.has("SigIgn", signum)


@dataclass(frozen=True)
class _Asked:
    local_rank: int
    pid: int
    page: Page
    words: Words
    deaf: frozenset[str]  # threads that hold the signal back anyway


class Inquiry:
    """Asks the ranks of ``life`` that run; ``on_answered`` is called once with what they said.

    Args:
        among: these local ranks only.
        is_command: the ranks run a program of any kind.
    """

    def __init__(
        self,
        loop: Loop,
        life: Life,
        on_answered: Callable[[list[Answer]], None],
        *,
        among: Collection[int] | None,
        is_command: bool,
    ) -> None:
        self._loop = loop
        self._life = life
        self._on_answered = on_answered
        self._answers: dict[int, Answer] = {}  # by local rank
        self._asked: dict[int, _Asked] = {}
        self._deadline = time.monotonic() + _PATIENCE_S
        for local_rank, pid in life.living():
            if among is not None and local_rank not in among:
                continue
            page = life.pages[local_rank]
            words = page.read()
            silence = _NOT_PYTHON if is_command else _silence(pid, page, words)
            if words is None or silence:
                self._answer(local_rank, silence=silence)
                continue
            page.clear_stack()
            self._asked[local_rank] = _Asked(local_rank, pid, page, words, frozenset(_deaf_threads(pid)))
            with contextlib.suppress(OSError):  # it has just gone, or is another user's by now: it will not answer
                os.kill(pid, ASKING_SIGNAL)
        loop.call_later(0.0, self._look)

    def _look(self) -> None:
        if not self._life.is_open:
            return
        living = dict(self._life.living())
        is_late = time.monotonic() >= self._deadline
        for asked in list(self._asked.values()):
            if asked.local_rank not in living:
                del self._asked[asked.local_rank]
            elif is_late or _has_written(asked):
                self._hear(asked)
        if self._asked:
            self._loop.call_later(_LOOK_S, self._look)
        else:
            self._on_answered([self._answers[local_rank] for local_rank in sorted(self._answers)])

    def _hear(self, asked: _Asked) -> None:
        del self._asked[asked.local_rank]
        dump = asked.page.read_stack()
        words = asked.page.read() or asked.words
        if not dump:
            state = Status(asked.pid, asked.pid).get("State", "gone")
            self._answer(asked.local_rank, silence=f"without an answer within {_PATIENCE_S:g} s: its state is {state}")
            return
        main, threads = parse(dump, words.main_thread)
        waits = words.of_main_thread()
        if not waits and main and main[0].module:  # it may itself wait for another thread, as in a backward on a GPU
            waits = words.waits
        rank = self._life.layout.first_rank + asked.local_rank
        self._answers[asked.local_rank] = Answer(rank, main, threads, tuple(waits))

    def _answer(self, local_rank: int, *, silence: str) -> None:
        self._answers[local_rank] = Answer(self._life.layout.first_rank + local_rank, silence=silence)


def _silence(pid: int, page: Page, words: Words | None) -> str:
    """Why a rank cannot be asked; empty where it can."""
    if words is None:
        return "not yet in its script"
    if not Status(pid, pid).has("SigCgt", ASKING_SIGNAL):
        return _NOT_PYTHON
    try:
        theirs, ours = os.stat(f"/proc/{pid}/fd/{words.fd}"), os.fstat(page.fd)
    except OSError:
        theirs, ours = None, os.fstat(page.fd)
    if theirs is None or (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino):
        return "without a stack to be seen: it has closed files that it had not opened"
    return ""


def _has_written(asked: _Asked) -> bool:
    """Whether all of the stack is there. While it is being written, the writing thread holds the signal back."""
    is_pending = Status(asked.pid, asked.pid).has("ShdPnd", ASKING_SIGNAL)
    is_writing = not is_pending and not asked.deaf.issuperset(_deaf_threads(asked.pid))
    return not is_pending and not is_writing and bool(asked.page.read_stack())


def _deaf_threads(pid: int) -> list[str]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [thread for thread in threads if Status(pid, int(thread)).has("SigBlk", ASKING_SIGNAL)]
