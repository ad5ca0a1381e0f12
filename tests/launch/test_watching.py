"""When a rank counts as hanging: a process that sleeps in one and the same call, and one that has moved."""

import os
import signal
import sysconfig
import time

import pytest

from paceline.launch.hangs.asking import Status
from paceline.launch.hangs.stacks import Answer, Frame
from paceline.launch.hangs.watching import Watch
from paceline.launch.layout import Layout
from paceline.launch.lives.life import Life
from paceline.launch.loop import Loop
from paceline.launch.output.forwarding import Forwarder
from paceline.waits import ASKING_SIGNAL, Page, Wait, Words
from support.commands import wait_until

IN_BARRIER = (Frame(f"{sysconfig.get_path('purelib')}/torch/distributed/distributed_c10d.py", 1, "barrier"),)
IN_SCRIPT = (Frame("/job/train.py", 1, "culprit"),)


class Sleeper:
    """A forked process that reads bytes; a signal interrupts it and lets it read on."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            signal.signal(ASKING_SIGNAL, lambda *_: None)
            os.close(self._writer)
            while os.read(reader, 1):
                pass
            os._exit(0)
        os.close(reader)
        wait_until(lambda: self._status().has("SigCgt", ASKING_SIGNAL) and self._sleeps_after(0))

    def is_asked(self) -> None:
        before = self._number()
        os.kill(self.pid, ASKING_SIGNAL)
        wait_until(lambda: self._sleeps_after(before))

    def moves(self) -> None:
        before = self._number()
        os.write(self._writer, b"x")
        wait_until(lambda: self._sleeps_after(before))

    def end(self) -> None:
        os.close(self._writer)
        os.waitpid(self.pid, 0)

    def _status(self) -> Status:
        return Status(self.pid, self.pid)

    def _number(self) -> int:
        return int(self._status()["voluntary_ctxt_switches"])

    def _sleeps_after(self, number: int) -> bool:
        return self._number() > number and self._status()["State"].startswith("S")


class Watched:
    """A life of one rank, and what its watch has asked for."""

    def __init__(self, pid: int) -> None:
        self.loop = Loop()
        forwarder = Forwarder(self.loop, [], lambda: None, lambda error: None)
        self.life = Life(Layout.of_one_host("job", 0, 1, 0), self.loop, forwarder, lambda: None)
        reader, writer = os.pipe()
        os.close(writer)
        self.page = Page.make()
        self.life.attach(0, [], reader, self.page)
        self.life.born(0, pid)
        self.asked: list[object] = []
        self.watch = Watch(self.loop, self.life, 0.05, self.asked.append, lambda: False)

    def asks(self) -> object:
        """What it asks for next."""
        self.asked.clear()
        deadline = time.monotonic() + 30
        while not self.asked:
            assert time.monotonic() < deadline
            self.loop.turn()
        return self.asked[0]

    def is_still(self) -> bool:
        """Whether it asks for nothing, in more looks than a hang takes."""
        self.asked.clear()
        for _ in range(15):
            self.loop.turn()
        return not self.asked

    def hears(self, stack: tuple[Frame, ...], *, is_all: bool) -> list[int]:
        answers, hanging = self.watch.hear([Answer(0, stack)], lambda path, line: "", is_all=is_all)
        assert answers == [Answer(0, stack, stands_still=answers[0].stands_still)]
        return hanging


@pytest.fixture
def sleeper():
    sleeper = Sleeper()
    yield sleeper
    sleeper.end()


@pytest.fixture
def watched(sleeper):
    watched = Watched(sleeper.pid)
    yield watched
    watched.life.close()
    watched.loop.close()


def test_a_rank_that_stands_still_in_a_collective_hangs_and_that_is_told_once_until_it_moves(sleeper, watched):
    for _ in range(2):
        assert watched.asks() == [0]
        sleeper.is_asked()
        assert watched.hears(IN_BARRIER, is_all=False) == [0]
        sleeper.is_asked()
        assert watched.hears(IN_BARRIER, is_all=True) == [0]
        assert watched.is_still()
        sleeper.moves()


def test_a_rank_that_sleeps_elsewhere_does_not_hang_and_is_asked_once(sleeper, watched):
    assert watched.asks() == [0]
    sleeper.is_asked()
    assert watched.hears(IN_SCRIPT, is_all=False) == []
    assert watched.is_still()
    sleeper.moves()
    assert watched.asks() == [0]


def test_a_wait_that_the_rank_tells_of_needs_no_sleep(sleeper, watched):
    watched.asks()
    sleeper.is_asked()
    watched.hears(IN_SCRIPT, is_all=False)  # from here on, its sleep is known
    for since_s in (time.monotonic() - 1.0, time.monotonic()):
        wait = Wait("barrier()", "rank 1 has not come to it", since_s, thread=9)
        watched.page.write(Words(0, 9, [wait]))
        assert watched.asks() is None
        sleeper.is_asked()
        assert watched.hears(IN_SCRIPT, is_all=True) == [0]
        assert watched.is_still()


def test_another_threads_wait_alone_is_no_hang(sleeper, watched):
    watched.page.write(Words(0, 9, [Wait("recv()", "rank 1", time.monotonic() - 1.0, thread=8)]))
    assert watched.asks() == [0]
    sleeper.is_asked()
    assert watched.hears(IN_SCRIPT, is_all=False) == []
    assert watched.is_still()
