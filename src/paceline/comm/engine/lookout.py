"""Whether what is waited for can still be done: deadlines, and the end of peers.

Whoever waits looks, on behalf of all: at the peers of everything that is under way, not of his own operation alone.

[Note: failing alone] An operation whose deadline is infinite is watched by whoever has submitted it. If it cannot be
done, it fails by itself, and the group goes on.

The invariant: a peer counts as gone only when nothing of what it did before can be on its way any more, so whether an
operation succeeds does not depend on how soon its peers end after it.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from paceline import waits
from paceline.comm.engine.operation import Operation
from paceline.comm.engine.queue import Queue
from paceline.comm.transport import Transport
from paceline.errors import CollectiveTimeoutError, PeerError
from paceline.rendezvous.peers import name_ranks

_LOOK_S = 0.1  # between two looks at the peers
_FEW = 8  # ranks that are named one by one
_DOUBT_S = 0.25  # how long news of a peer that is gone may be on its way

# Operations, each with the ranks that have something to do still before it can be done.
_Awaited: TypeAlias = list[tuple[Operation, tuple[int, ...]]]


class Lookout:
    """Looks after what one group waits for.

    Args:
        ranks: the global rank of each rank in the group.
    """

    def __init__(self, queue: Queue, transport: Transport, ranks: Sequence[int]) -> None:
        self._queue = queue
        self._transport = transport
        self._ranks = ranks
        self._next_look = 0.0
        self._doubted_since = math.inf

    def look_after(
        self, operation: Operation, is_done: Callable[[], bool], deadline: float, timeout_s: float | None = None
    ) -> None:
        """Fail what cannot be done any more: peers of anything under way are gone, or it is too late for ``operation``.

        Args:
            timeout_s: from which ``deadline`` comes, where that is not the operation's own.
        Raises:
            PeerError, CollectiveTimeoutError: so it is, and ``operation`` fails with it.
        """
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            if (found := self._find_gone(operation, now)) is not None:
                self._fail_of(*found, operation, is_done)
                return
        if now >= deadline:
            error = CollectiveTimeoutError(self._lateness(operation, timeout_s))
            with self._queue.lock:
                self._queue.advance()
                if is_done():
                    return
                if now >= operation.deadline:
                    self._queue.fail(str(error), error)
            raise error

    def tell(self, operation: Operation, waited_s: float) -> None:
        """Let the launcher know of a wait for ``operation`` that takes long."""
        if waits.is_told(waited_s):
            few = len(self._ranks) <= _FEW
            group = f"the group of {name_ranks(self._ranks)}" if few else f"a group of {len(self._ranks)} ranks"
            waits.note(f"{operation.call}, call number {operation.number} of {group}", self._who(operation), waited_s)

    def _fail_of(self, doomed: Operation, error: PeerError, operation: Operation, is_done: Callable[[], bool]) -> None:
        """``doomed`` cannot be done; raise if that concerns ``operation``, whose caller this is."""
        with self._queue.lock:
            self._queue.advance()  # the peer may have gone after it had done its part
            if is_done() or doomed.is_done:
                return
            if doomed.deadline == math.inf:  # [Note: failing alone]
                self._queue.cancel(doomed, error)
            else:
                self._queue.fail(str(error), error)
        if doomed is operation or doomed.deadline < math.inf:
            raise error

    def _find_gone(self, operation: Operation, now: float) -> tuple[Operation, PeerError] | None:
        """What cannot be done, and the error: a rank is gone that still has something to do for it."""
        if self._check(self._awaited(operation)) is None:
            self._doubted_since = math.inf
            return None
        # It may have done that, and gone then; news of it may still be on its way.
        self._doubted_since = min(self._doubted_since, now)
        with self._queue.lock:
            self._queue.advance()
            if not self._transport.is_settled() and now - self._doubted_since < _DOUBT_S:
                return None
            awaited = self._awaited(operation)
        return self._check(awaited)

    def _awaited(self, operation: Operation) -> _Awaited:
        """Of all that is under way, and of ``operation``, which need not be in the queue."""
        under_way = self._queue.first_of_each()
        others = [each for each in under_way if each is not operation]
        if operation.awaited is None and any(each.awaited is None for each in others):
            return [(each, tuple(self._awaited_by(each))) for each in others]  # it has to wait for the one that runs
        return [(each, tuple(self._awaited_by(each))) for each in [operation, *others] if not each.is_done]

    def _check(self, awaited: _Awaited) -> tuple[Operation, PeerError] | None:
        asked = set()
        for operation, ranks in awaited:
            if ranks not in asked:
                asked.add(ranks)
                try:
                    self._transport.check_peers(ranks)
                except PeerError as error:
                    return operation, error
        return None

    def _awaited_by(self, operation: Operation) -> Sequence[int]:
        return self._transport.absent() if operation.awaited is None else operation.awaited()

    def _who(self, operation: Operation) -> str:
        """Whom it waits for, in words."""
        absent = [self._ranks[rank] for rank in self._awaited_by(operation)]
        if (first := self._queue.awaited_before(operation)) is not None:
            return f"{first.call}, called before it, is not done either"
        if not absent:
            return "all ranks have come to it"
        others = "" if operation.is_message else ", the others have"
        return f"{name_ranks(absent)} {'has' if len(absent) == 1 else 'have'} not come to it{others}"

    def _lateness(self, operation: Operation, timeout_s: float | None) -> str:
        given = (
            f"{operation.timeout_s:g} s, the timeout that it was given"
            if timeout_s is None
            else f"{timeout_s:g} s, the timeout of this wait"
        )
        return (
            f"rank {self._ranks[self._transport.rank]}: {operation.call}, call number {operation.number} of this "
            f"group, was not done after {given}: {self._who(operation)}. Look where the ranks are."
        )
