"""The supervisor's loop: descriptors to watch and moments to wait for, one thread."""

import heapq
import itertools
import selectors
import time
from collections.abc import Callable

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_LONGEST_S = 86400.0  # that the kernel is asked to wait at once: it counts milliseconds in 31 bits


class Loop:
    """Calls back when a descriptor is ready or a moment has come; a turn does both, each once."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._moments: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def watch(self, fd: int, events: int, callback: Callable[[], None]) -> None:
        self._selector.register(fd, events, callback)

    def unwatch(self, fd: int) -> None:
        """Stop watching; nothing happens if ``fd`` was not watched."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def is_watched(self, fd: int) -> bool:
        return fd in self._selector.get_map()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._moments, (time.monotonic() + delay_s, next(self._order), callback))

    def turn(self) -> None:
        """Wait for what comes first, and serve it; a wait of days may end with nothing to serve."""
        wait_s = min(_LONGEST_S, max(0.0, self._moments[0][0] - time.monotonic())) if self._moments else None
        for key, _ in self._selector.select(wait_s):
            if self.is_watched(key.fd):  # an earlier callback of this turn may have closed it
                key.data()
        while self._moments and self._moments[0][0] <= time.monotonic():
            heapq.heappop(self._moments)[2]()

    def close(self) -> None:
        self._selector.close()
