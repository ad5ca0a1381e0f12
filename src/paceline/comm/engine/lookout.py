"""Whether what is waited for can still be done: deadlines, and the end of peers.

The invariant: a peer counts as gone only when nothing of what it did before can be on its way any more, so whether an
operation succeeds does not depend on how soon its peers end after it.
"""

import math
import time
from collections.abc import Callable, Sequence

from paceline.comm.engine.operation import Operation
from paceline.comm.engine.queue import Queue
from paceline.comm.transport import Transport
from paceline.errors import CollectiveTimeoutError, PeerError
from paceline.rendezvous.peers import name_ranks

_LOOK_S = 0.1  # between two looks at the peers
_DOUBT_S = 0.25  # how long news of a peer that is gone may be on its way


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

    def look_after(self, operation: Operation, is_done: Callable[[], bool], deadline: float) -> None:
        """Fail what cannot be done any more: its peers are gone, or it is too late.

        Raises:
            PeerError, CollectiveTimeoutError: so it is.
        """
        now = time.monotonic()
        error: Exception | None = None
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            error = self._find_gone(operation, now)
        if error is None and now >= deadline:
            error = CollectiveTimeoutError(self._lateness(operation))
        if error is None:
            return
        with self._queue.lock:
            self._queue.advance()  # the peer may have gone after it had done its part
            if is_done():
                return
            if isinstance(error, PeerError) or now >= operation.deadline:
                self._queue.fail(str(error), error)
        raise error

    def _find_gone(self, operation: Operation, now: float) -> PeerError | None:
        """The error, if a rank is gone that still has something to do for ``operation``."""
        try:
            self._transport.check_peers(self._awaited(operation))
            self._doubted_since = math.inf
        except PeerError:
            pass
        else:
            return None
        # It may have done that, and gone then; news of it may still be on its way.
        self._doubted_since = min(self._doubted_since, now)
        with self._queue.lock:
            self._queue.advance()
            if not self._transport.is_settled() and now - self._doubted_since < _DOUBT_S:
                return None
            awaited = self._awaited(operation)
        try:
            self._transport.check_peers(awaited)
        except PeerError as error:
            return error
        return None

    def _awaited(self, operation: Operation) -> Sequence[int]:
        """The ranks that have something to do still before ``operation`` can be done."""
        return self._transport.absent() if operation.awaited is None else operation.awaited()

    def _lateness(self, operation: Operation) -> str:
        absent = [self._ranks[rank] for rank in self._awaited(operation)]
        if (first := self._queue.awaited_before(operation)) is not None:
            who = f"{first.call}, called before it, is not done either"
        elif absent:
            others = "" if operation.is_message else ", the others have"
            who = f"{name_ranks(absent)} {'has' if len(absent) == 1 else 'have'} not come to it{others}"
        else:
            who = "all ranks have come to it"
        return (
            f"rank {self._ranks[self._transport.rank]}: {operation.call}, call number {operation.number} of this "
            f"group, was not done after {operation.timeout_s:g} s, the timeout that it was given: {who}. Look where "
            "the ranks are."
        )
