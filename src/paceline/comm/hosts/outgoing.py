"""A connection through which frames go to one rank, and through which at most its last words come back.

The invariant: frames go out in the order in which they were queued, each of them whole or, when the connection ends,
not at all.
"""

import errno
import os
import select
import socket
from collections import deque
from collections.abc import Callable

from paceline.comm.hosts.frames import WORDS_BYTES, Parcel, unpack_notice
from paceline.comm.hosts.sockets import family_of, prepare


class Outgoing:
    """The connection, which is made at once, or found to be impossible later.

    Args:
        hello: the bytes that go first.
        told: called with whether the other end has failed, and its last words.
        ended: called with a sign of that when the connection is over.

    Attributes:
        queue: what is to be sent, the hello among it.
    """

    def __init__(
        self,
        peer: int,
        address: tuple[str, int],
        hello: bytes,
        epoll: select.epoll,
        *,
        told: "Callable[[Outgoing, bool, str], None]",
        ended: "Callable[[Outgoing, str], None]",
    ) -> None:
        self.peer = peer
        self.queue: deque[Parcel] = deque([Parcel(peer, None, hello)])
        self.connection = socket.socket(family_of(address[0]), socket.SOCK_STREAM)
        self._address = address
        self._epoll = epoll
        self._told = told
        self._ended = ended
        self._num_sent = 0  # bytes of the first in the queue
        self._answer = b""
        self._is_connected = False
        self._wants_room = True  # whether it waits until it may write
        prepare(self.connection)
        epoll.register(self.connection, select.EPOLLIN | select.EPOLLOUT)

    def connect(self) -> bool:
        """Begin to; false where that is impossible. How it went else is known when it may be written to."""
        number = self.connection.connect_ex(self._address)
        if number in (0, errno.EINPROGRESS):
            return True
        self._ended(self, self._spell_failure(number))
        return False

    def write(self) -> bool:
        """Send as much as the kernel takes; whether that was anything."""
        if not self._is_connected:
            return False
        queue, total = self.queue, 0
        try:
            while queue:
                parcel, done = queue[0], self._num_sent
                head, memory = parcel.head, parcel.memory
                if memory is None:
                    sent = self.connection.send(head[done:])
                elif done < len(head):
                    sent = self.connection.sendmsg([head[done:], memory])
                else:
                    sent = self.connection.send(memory[done - len(head) :])
                total += sent
                self._num_sent += sent
                if self._num_sent < len(head) + (0 if memory is None else len(memory)):
                    break  # as full as it gets
                queue.popleft()
                self._num_sent = 0
                parcel.is_done = True
        except BlockingIOError:
            pass
        except OSError as error:
            self._ended(self, error.strerror or str(error))
            return True
        if self._wants_room != bool(queue):
            self._wants_room = bool(queue)
            events = select.EPOLLIN | select.EPOLLOUT if queue else select.EPOLLIN
            self._epoll.modify(self.connection, events)
        return total > 0

    def answer(self, events: int) -> None:
        """What the kernel or the peer has to say of a connection."""
        if not self._is_connected and events & (select.EPOLLOUT | select.EPOLLERR | select.EPOLLHUP):
            number = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                self._ended(self, self._spell_failure(number))
                return
            self._is_connected = True
        if events & ~select.EPOLLOUT and self._is_connected:
            try:
                text = self.connection.recv(WORDS_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._ended(self, error.strerror or str(error))
                return
            self._answer += text
            if (notice := unpack_notice(self._answer)) is not None:
                self._told(self, *notice)
            if not text:
                self._ended(self, "its connection was closed")

    def withdraw(self, parcel: Parcel) -> None:
        """Do not send it, if that has not begun."""
        if parcel in self.queue and (parcel is not self.queue[0] or not self._num_sent):
            self.queue.remove(parcel)

    def close(self) -> None:
        """Nothing more is sent."""
        self.queue.clear()
        self._is_connected = False
        self._epoll.unregister(self.connection)
        self.connection.close()

    def _spell_failure(self, number: int) -> str:
        host, port = self._address
        return f"no connection to {f'[{host}]' if ':' in host else host}:{port}: {os.strerror(number)}"
