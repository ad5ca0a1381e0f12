"""What carries bytes between the processes: a channel from each rank, and an outlet to the launcher's own output.

An outlet never blocks the launcher: a reader that stands still (a pager) holds the ranks up, but not Ctrl-C.
"""

import contextlib
import errno
import fcntl
import os
import pty
import select
import stat
import struct
import termios
import tty
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.launch.output.interleaving import Interleaver, Interleaving, Speakers

# A pipe or terminal that select finds writable takes this many bytes without blocking.
_SAFE_WRITE_BYTES = select.PIPE_BUF
_FULL_BYTES = 1 << 20
_READER_HAS_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EIO)  # the last is a terminal's


@dataclass(eq=False)
class Outlet:
    """One of the launcher's own output streams, or both where they lead to the same place.

    Attributes:
        waiting: what is not written yet; shared with other outlets that write to the same descriptor.
        why_broken: where it is not that the reader has gone: the disk is full, say.
    """

    fd: int
    streams: tuple[str, ...]
    interleaver: Interleaving
    is_broken: bool = False
    waiting: bytearray = field(default_factory=bytearray)
    why_broken: str = ""

    @property
    def is_terminal(self) -> bool:
        return self.interleaver.is_terminal

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= _FULL_BYTES

    @property
    def is_empty(self) -> bool:
        return not self.waiting

    def put(self, data: bytes) -> None:
        if not self.is_broken:
            self.waiting += data

    def write_some(self, most: int = _SAFE_WRITE_BYTES) -> None:
        """Write what can be written without blocking. A reader that has gone away is noted, not raised."""
        try:
            written = os.write(self.fd, self.waiting[:most])
        except BlockingIOError:
            return
        except OSError as error:
            self.is_broken = True
            self.why_broken = "" if error.errno in _READER_HAS_GONE else os.strerror(error.errno or 0)
            self.waiting.clear()
            return
        del self.waiting[:written]

    def window(self) -> tuple[int, int, int, int]:
        """Rows and columns that a rank's output has where it appears, and the same in pixels.

        Raises:
            OSError: that cannot be told.
        """
        size = fcntl.ioctl(self.fd, termios.TIOCGWINSZ, b"\0" * 8)
        rows, columns, *pixels = struct.unpack("HHHH", size)
        columns = max(columns - self.interleaver.mark_width, min(columns, 1))
        return rows, columns, pixels[0], pixels[1]


def open_outlets(speakers: Speakers, *, apart: bool) -> list[Outlet]:
    """Outlets for stdout and stderr; one for both where they are the same file, so that their order is kept.

    Args:
        apart: two in any case, as where files are to be told apart.
    """
    one, two = os.fstat(1), os.fstat(2)
    same = not apart and (one.st_dev, one.st_ino, one.st_rdev) == (two.st_dev, two.st_ino, two.st_rdev)
    parts = [(1, ("stdout", "stderr"))] if same else [(1, ("stdout",)), (2, ("stderr",))]
    return [Outlet(fd, streams, Interleaver(speakers, os.isatty(fd))) for fd, streams in parts]


def why_unwritable(outlets: Sequence[Outlet]) -> str:
    """As a sentence, why what ranks say can be written no more; empty where nobody would read it anyway."""
    why = next((outlet.why_broken for outlet in outlets if outlet.why_broken), "")
    return f"what the ranks say cannot be written any more: {why}; the ranks were stopped" if why else ""


def open_standard_streams() -> None:
    """Give descriptors 0 to 2 that the caller closed a meaning, before a pipe takes their numbers."""
    while True:
        fd = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if fd > 2:
            os.close(fd)
            return
        os.set_inheritable(fd, True)


def open_channel(outlet: Outlet | None) -> tuple[int, int]:
    """The reading and the writing end of a rank's stream: a terminal if the launcher has one there, else a pipe."""
    if outlet is None or not outlet.is_terminal:
        reader, writer = os.pipe()
    else:
        reader, writer = pty.openpty()
        tty.setraw(writer)  # the real terminal translates line ends, once
        copy_window_size(outlet, reader)
    os.set_blocking(reader, False)
    return reader, writer


def copy_window_size(outlet: Outlet, channel: int) -> None:
    """Make ``channel`` as wide as the terminal, less the mark that a line may get: a progress bar must not wrap."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(channel, termios.TIOCSWINSZ, struct.pack("HHHH", *outlet.window()))


def is_selectable(fd: int) -> bool:
    """Whether the kernel can tell when ``fd`` takes more; a file, or /dev/null, always does."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)
