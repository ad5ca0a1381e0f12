"""The launcher's own output: what ranks say appears line by line, as fast as it is read and no faster."""

import time
from collections.abc import Callable

from paceline.launch.loop import WRITE, Loop
from paceline.launch.output.plumbing import Outlet, is_selectable

LAST_WORDS_S = 1.0  # for what waits when the launcher ends in a hurry, if somebody reads it
_LINE_S = 0.05  # for the end of a line that was begun; python writes a line in pieces under PYTHONUNBUFFERED


class Display:
    """All outlets of a launch.

    Args:
        loop: what watches the descriptors.
        outlets: the launcher's own output.
        on_closed: called once, when a reader of stdout has gone away.
        on_full, on_room: called when an outlet takes no more for now, and when it does again.
    """

    def __init__(
        self,
        loop: Loop,
        outlets: list[Outlet],
        on_closed: Callable[[], None],
        on_full: Callable[[Outlet], None],
        on_room: Callable[[Outlet], None],
    ) -> None:
        self._loop = loop
        self._outlets = outlets
        self._on_closed = on_closed
        self._on_full = on_full
        self._on_room = on_room
        self._is_closed = False
        self._fed_s: dict[tuple[int, int], float] = {}  # by outlet and rank, where the start of a line waits

    @property
    def is_flushed(self) -> bool:
        """Whether all that was said is written."""
        return all(outlet.is_empty for outlet in self._outlets)

    def flush(self, timeout_s: float) -> None:
        """Have all that was said written, as far as it is read in that time. From outside of the loop."""
        is_late: list[bool] = []
        self._loop.call_later(timeout_s, lambda: is_late.append(True))
        while not self.is_flushed and not is_late:
            self._loop.turn()

    def show(self, outlet: Outlet, rank: int, data: bytes) -> None:
        """``rank`` has said ``data``."""
        self.put(outlet, outlet.interleaver.feed(rank, data))
        if outlet.interleaver.holds_start(rank):
            is_new = (outlet.fd, rank) not in self._fed_s
            self._fed_s[outlet.fd, rank] = time.monotonic()
            if is_new:
                self._loop.call_later(_LINE_S, lambda: self._release(outlet, rank))

    def finish(self, outlet: Outlet, rank: int) -> None:
        """``rank`` says no more."""
        self.put(outlet, outlet.interleaver.finish(rank))

    def put(self, outlet: Outlet, data: bytes) -> None:
        """Write ``data`` after all that was put before."""
        outlet.put(data)
        if not is_selectable(outlet.fd):
            while not outlet.is_empty:
                outlet.write_some(len(data))
        elif not outlet.is_empty and not self._loop.is_watched(outlet.fd):
            self._loop.watch(outlet.fd, WRITE, lambda: self._write(outlet))
        self._note_broken(outlet)
        if outlet.is_full:
            self._on_full(outlet)

    def _release(self, outlet: Outlet, rank: int) -> None:
        """Show the start of a line, unless it is still growing."""
        fed_s = self._fed_s[outlet.fd, rank]
        if outlet.interleaver.holds_start(rank) and time.monotonic() - fed_s < _LINE_S:
            self._loop.call_later(_LINE_S, lambda: self._release(outlet, rank))
        else:
            del self._fed_s[outlet.fd, rank]
            self.put(outlet, outlet.interleaver.release(rank))

    def _write(self, outlet: Outlet) -> None:
        outlet.write_some()
        self._note_broken(outlet)
        if outlet.is_empty:
            self._loop.unwatch(outlet.fd)
        if not outlet.is_full:
            self._on_room(outlet)

    def _note_broken(self, outlet: Outlet) -> None:
        if outlet.is_broken and "stdout" in outlet.streams and not self._is_closed:
            self._is_closed = True
            self._on_closed()
