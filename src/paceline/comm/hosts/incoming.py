"""A connection on which frames come from one rank.

Whoever is to have a frame says where it goes; until he knows, the connection is not read, and the kernel makes the
sender wait.

The invariant: only a rank that knows this group's token is listened to.
"""

import select
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.comm.hosts.frames import HEAD, HELLO

_STAGED_BYTES = 1 << 14  # small frames come with one call, large ones go where they belong without a copy
_AT_ONCE_BYTES = 1 << 22  # read from one connection before others have their turn

# Where the bytes of a frame go, from its source, key, number of bytes and extra; None: not known yet.
Place = Callable[[int, int, int, int], memoryview | None]


@dataclass(frozen=True)
class Channel:
    """Who takes the frames of one kind; ``arrived(source, key)`` is called when one is complete."""

    place: Place
    arrived: Callable[[int, int], None]


class Incoming:
    """The connection.

    Args:
        token: what the other end must know.
        greeted: called once it has said who it is.
        ended: called with a sign of that when the connection is over, or leads to a stranger.

    Attributes:
        source, channel: from which rank come frames for whom; -1 until it has said that.
        is_paused: whether it is not read, since nobody knows where its next frame goes.
    """

    def __init__(
        self,
        connection: socket.socket,
        epoll: select.epoll,
        channels: Mapping[int, Channel],
        token: bytes,
        *,
        greeted: "Callable[[Incoming], None]",
        ended: "Callable[[Incoming, str], None]",
    ) -> None:
        self.connection = connection
        self.source = self.channel = -1
        self.is_paused = False
        self._epoll = epoll
        self._channels = channels
        self._token = token
        self._greeted = greeted
        self._ended = ended
        self._staged = memoryview(bytearray(_STAGED_BYTES))
        self._start = self._end = 0  # of what is staged and not used yet
        self._head: tuple[int, int, int] | None = None
        self._memory: memoryview | None = None
        self._num_filled = 0
        epoll.register(connection, select.EPOLLIN)

    def resume(self) -> None:
        """After a pause: there may be a place now."""
        self.is_paused = False
        self._epoll.register(self.connection, select.EPOLLIN)
        self.read()

    def read(self) -> bool:
        """Take what has come; whether there was anything."""
        total = 0
        try:
            while self._unpack() and total < _AT_ONCE_BYTES:
                if self._memory is not None:
                    room = self._memory[self._num_filled :]
                    came = self.connection.recv_into(room)
                    self._num_filled += came
                else:
                    rest = self._staged[self._start : self._end]
                    self._staged[: len(rest)] = rest
                    self._start, self._end = 0, len(rest)
                    room = self._staged[self._end :]
                    came = self.connection.recv_into(room)
                    self._end += came
                if not came:
                    self._ended(self, "its connection was closed")
                    break
                total += came
                if came < len(room):  # that was all
                    self._unpack()
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            self._ended(self, error.strerror or str(error))
        return total > 0

    def _unpack(self) -> bool:
        """Bring what is staged where it belongs; false where no more may be read now."""
        while True:
            if self.source < 0:
                if self._end - self._start < HELLO.size:
                    return True
                if not self._greet():
                    return False
            if self._memory is None:
                if self._head is None:
                    if self._end - self._start < HEAD.size:
                        return True
                    self._head = HEAD.unpack_from(self._staged, self._start)
                    self._start += HEAD.size
                self._memory = self._channels[self.channel].place(self.source, *self._head)
                if self._memory is None:
                    self.is_paused = True
                    self._epoll.unregister(self.connection)
                    return False
                self._num_filled = 0
            missing = len(self._memory) - self._num_filled
            num = min(missing, self._end - self._start)
            if num:
                self._memory[self._num_filled : self._num_filled + num] = self._staged[self._start : self._start + num]
                self._start += num
                self._num_filled += num
            if num < missing:
                return True
            assert self._head is not None
            key, self._head, self._memory = self._head[0], None, None
            self._channels[self.channel].arrived(self.source, key)

    def _greet(self) -> bool:
        """Whether the other end is a rank of this group."""
        token, source, channel = HELLO.unpack_from(self._staged, self._start)
        if token != self._token or channel not in self._channels:
            self._ended(self, "it is a stranger")
            return False
        self._start += HELLO.size
        self.source, self.channel = source, channel
        self._greeted(self)
        return True

    def close(self) -> None:
        if not self.is_paused:
            self._epoll.unregister(self.connection)
        self.connection.close()
