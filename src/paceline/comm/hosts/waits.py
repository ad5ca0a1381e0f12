"""What a rank waits for, near and far, and how it sleeps meanwhile.

Ranks of this host ring a bell, those of others write to sockets, and one cannot sleep on both.

The invariant: whatever is waited for is counted here while it is, so no sleep is deaf to it for long.
"""

import time
from collections.abc import Iterable

from paceline.comm.hosts.frames import Parcel
from paceline.comm.hosts.post import Post
from paceline.comm.hosts.wire import Wire
from paceline.comm.memory.transport import SharedMemory
from paceline.comm.transport import Call, Steps

_SHORTEST_NAP_S, _LONGEST_NAP_S = 5e-4, 5e-3


class Waits:
    """The waits of one rank.

    Attributes:
        num_near, num_far: for ranks of this host, and for others.
        parcels: of the collective that waits for them; the last one first.
    """

    def __init__(self, local: SharedMemory, wire: Wire, post: Post) -> None:
        self.num_near = self.num_far = 0
        self.parcels: list[Parcel] = []
        self._local = local
        self._wire = wire
        self._post = post

    def meet(self, call: Call | None = None) -> Steps:
        """With the ranks of this host; compare their calls if a collective begins."""
        meetings = self._local.meetings
        meetings.come(call)
        self.num_near += 1
        try:
            yield from meetings.await_all(call)
        finally:
            self.num_near -= 1

    def near(self, steps: Steps) -> Steps:
        """Steps that wait for ranks of this host."""
        self.num_near += 1
        try:
            yield from steps
        finally:
            self.num_near -= 1

    def far(self, parcels: Iterable[Parcel]) -> Steps:
        """Until they have come, or been sent."""
        self.parcels = [parcel for parcel in parcels if not parcel.is_done]
        self.num_far += 1
        try:
            while self.parcels:
                if self.parcels[-1].is_done:
                    self.parcels.pop()
                else:
                    yield
        finally:
            self.num_far -= 1
            self.parcels = []

    def pause(self, timeout_s: float) -> bool:
        """See ``Transport``."""
        if self.num_far and not self.num_near:
            self._post.sleep(min(timeout_s, _LONGEST_NAP_S))
            return False
        if self.num_far or self._wire.is_expecting or self._post.num_unsent:
            quiet_s = time.monotonic() - self._post.last_news
            timeout_s = min(timeout_s, max(_SHORTEST_NAP_S, min(quiet_s / 4, _LONGEST_NAP_S)))
        return self._local.pause(timeout_s)
