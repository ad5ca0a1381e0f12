"""Stopping before the end, by agreement: ``should_stop`` and what it takes.

The invariant: no rank is told to go on at a step at which another is told to stop.

[Note: one step] Ranks may be at different steps, and while there is nothing to agree on, none waits for another. Who is
to stop wakes all ranks through the store, in which a thread of each sleeps. Each rank then votes for the first step
that it has not answered yet, and which it will not answer before it has seen all votes. The largest is the step at
which all stop: nobody has passed it, and whoever leaves without having been woken votes for the step after his last.
Votes come from the threads, so a rank that waits for them never waits for one that waits for it in a collective.
"""

import contextlib
import dataclasses
import signal
import threading
from datetime import timedelta

import torch.distributed as dist

from paceline.errors import BarrierTimeoutError, PeerError, WorldError
from paceline.rendezvous import Meeting
from paceline.world.signals import Signals

_VOTE = "should_stop"
_LONG = timedelta(days=20)  # c10d waits for at most 31 bits of milliseconds
_JOIN_S = 1.0  # for the thread, where the store no longer answers


class Stopping:
    """One rank's part in the agreement. It costs nothing before the first step, and keeps the count from then on."""

    def __init__(self) -> None:
        self._signals: Signals | None = None
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._is_wanted = False
        self._has_asked = False
        self._lock = threading.Lock()  # over the step and the vote
        self._step = 0
        self._vote: int | None = None
        self._stop_at: int | None = None
        self._reason = ""

    def request(self, meeting: Meeting, reason: str = "") -> None:
        """Wake all ranks; this one votes at its next step at the latest.

        Args:
            reason: the name of a signal.
        """
        self._is_wanted = True
        for rank in range(meeting.world_size):
            _wake(meeting, rank, reason)

    def at_next_step(self, meeting: Meeting, timeout_s: float) -> bool:
        """Count a step, and tell whether to stop at it.

        Raises:
            BarrierTimeoutError, PeerError: while waiting for votes, as ``Meeting.await_ranks`` does.
            WorldError: the first call is not in the main thread, or the world has ended.
        """
        if self._is_over:
            raise WorldError(
                f"rank {meeting.rank}: should_stop() was called after shutdown(). Ask the world of init()."
            )
        signals = self._signals or self._begin(meeting)
        if (signals.came or self._is_wanted) and not self._has_asked:
            self._has_asked = True
            self.request(meeting, signals.came.name if signals.came else "")
            self._cast_vote(meeting)  # here and not by the thread: a world of one stops at this very step
        with self._lock:
            self._step += 1
            step = self._step
        if self._vote is None or step < self._vote:
            return False
        if self._stop_at is None:
            self._stop_at = _largest_vote(meeting, timeout_s)
        return step >= self._stop_at

    def end(self, meeting: Meeting) -> None:
        """Before this rank leaves: vote, if that has not been done, and give back the signals."""
        self._is_over = True
        if self._thread is not None:
            if self._vote is None:
                with contextlib.suppress(PeerError):
                    _wake(meeting, meeting.rank)
            self._thread.join(_JOIN_S)
        if self._signals is not None:
            self._signals.give_back(more_to_come=self._reason == signal.SIGUSR1.name)

    def _begin(self, meeting: Meeting) -> Signals:
        self._signals = Signals(meeting.rank)
        # A connection of its own: others must not wait until this one is woken.
        store = meeting.store.clone()  # type: ignore[attr-defined]  # torch's stubs do not know it
        own = dataclasses.replace(meeting, store=store)
        self._thread = threading.Thread(
            target=self._vote_when_woken, args=(own,), name="paceline stopping", daemon=True
        )
        self._thread.start()
        return self._signals

    def _vote_when_woken(self, meeting: Meeting) -> None:
        key = f"stop/{meeting.rank}"
        with contextlib.suppress(dist.DistError, PeerError):  # the store is gone, as the next step will notice
            while not meeting.store.check([key]):
                with contextlib.suppress(dist.DistStoreError):  # the time is up, or the store gone, as check will say
                    meeting.store.wait([key], _LONG)
            self._reason = meeting.read("stop", meeting.rank)
            self._cast_vote(meeting)

    def _cast_vote(self, meeting: Meeting) -> None:
        with self._lock:
            if self._vote is not None:
                return
            self._vote = self._step + 1
        meeting.announce(_VOTE, str(self._vote))


def _wake(meeting: Meeting, rank: int, reason: str = "") -> None:
    dataclasses.replace(meeting, rank=rank).announce("stop", reason)


def _largest_vote(meeting: Meeting, timeout_s: float) -> int:
    def late(names: str) -> Exception:
        return BarrierTimeoutError(
            f"rank {meeting.rank}: the ranks were asked to stop, but {names} of {meeting.world_size} did not say "
            f"within {timeout_s:g} s which step comes next. All ranks must call should_stop() once a step."
        )

    meeting.await_ranks(range(meeting.world_size), _VOTE, timeout_s, late=late)
    return max(int(vote) for vote in meeting.read_all(_VOTE))
