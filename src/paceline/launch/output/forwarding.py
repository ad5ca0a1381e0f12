"""Forwards what the ranks print, to the launcher's own output as fast as that is read and no faster, and to files."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.launch.loop import READ, Loop
from paceline.launch.output.display import Display
from paceline.launch.output.files import LogFile
from paceline.launch.output.plumbing import Outlet, copy_window_size

_READ_BYTES = 1 << 16
# After a rank has ended: how long its output must be still before it is closed, and how long it may go on at most,
# since a process that the rank left behind may hold it open, or write, for ever.
_STILL_S = 0.1
_DRAIN_S = 1.0


@dataclass(frozen=True)
class Channel:
    """What a rank says in one stream, and where that goes.

    Attributes:
        fd: where it is read.
        outlet: None where it is not shown.
        file: None where it is not written to one.
    """

    fd: int
    rank: int
    outlet: Outlet | None
    file: LogFile | None = None


class Forwarder:
    """All channels of a launch, and its outlets.

    Args:
        loop: what watches the descriptors.
        outlets: the launcher's own output.
        on_closed: called once, when a reader of stdout has gone away.
        on_file_error: called when a file cannot be written any more.

    Attributes:
        display: the outlets.
    """

    def __init__(
        self,
        loop: Loop,
        outlets: list[Outlet],
        on_closed: Callable[[], None],
        on_file_error: Callable[[OSError], None],
    ) -> None:
        self._loop = loop
        self.display = Display(loop, outlets, on_closed, self._hold, self._resume)
        self._on_file_error = on_file_error
        self._channels: dict[int, Channel] = {}  # by reading end
        self._last_read_s: dict[int, float] = {}

    @property
    def is_drained(self) -> bool:
        """Whether the ranks have nothing more to say."""
        return not self._channels

    @property
    def is_flushed(self) -> bool:
        """Whether all that they have said is written."""
        return self.display.is_flushed

    def attach(self, channel: Channel) -> None:
        self._channels[channel.fd] = channel
        self._watch(channel.fd)

    def rank_ended(self, rank: int) -> None:
        """Close the rank's channels once they are still: all that it wrote itself is there by now."""
        ended_s = time.monotonic()
        for fd in [fd for fd, channel in self._channels.items() if channel.rank == rank]:
            self._loop.call_later(_STILL_S, lambda fd=fd: self._close_if_still(fd, ended_s))  # type: ignore[misc]

    def follow_window(self) -> None:
        for fd, channel in self._channels.items():
            if channel.outlet is not None and channel.outlet.is_terminal:
                copy_window_size(channel.outlet, fd)

    def _watch(self, fd: int) -> None:
        self._loop.watch(fd, READ, lambda: self._read(fd))

    def _read(self, fd: int) -> None:
        channel = self._channels[fd]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # how a terminal says that nobody holds its other end
            data = b""
        if not data:
            self._close(fd)
            return
        self._last_read_s[fd] = time.monotonic()
        if channel.file is not None:
            self._keep(lambda file: file.write(data), channel.file)
        if channel.outlet is not None:
            self.display.show(channel.outlet, channel.rank, data)

    def _keep(self, act: Callable[[LogFile], None], file: LogFile) -> None:
        try:
            act(file)
        except OSError as error:
            self._on_file_error(error)

    def _close_if_still(self, fd: int, ended_s: float) -> None:
        if fd not in self._channels:
            return
        now = time.monotonic()
        is_held_up = not self._loop.is_watched(fd)
        is_still = now - self._last_read_s.get(fd, ended_s) >= _STILL_S
        if not is_held_up and (is_still or now - ended_s > _DRAIN_S):
            self._close(fd)
        else:
            self._loop.call_later(_STILL_S, lambda: self._close_if_still(fd, ended_s))

    def _close(self, fd: int) -> None:
        channel = self._channels.pop(fd)
        self._last_read_s.pop(fd, None)
        self._loop.unwatch(fd)
        os.close(fd)
        if channel.file is not None:
            self._keep(LogFile.close, channel.file)
        if channel.outlet is not None:
            self.display.finish(channel.outlet, channel.rank)

    def _hold(self, outlet: Outlet) -> None:
        for fd in self._channels_of(outlet):
            self._loop.unwatch(fd)

    def _resume(self, outlet: Outlet) -> None:
        for fd in self._channels_of(outlet):
            if not self._loop.is_watched(fd):
                self._watch(fd)

    def _channels_of(self, outlet: Outlet) -> list[int]:
        """Those that end where ``outlet`` writes; it may share that with others."""
        return [fd for fd, channel in self._channels.items() if channel.outlet and channel.outlet.fd == outlet.fd]
