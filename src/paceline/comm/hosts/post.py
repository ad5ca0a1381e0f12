"""Between hosts: bytes from rank to rank, over TCP connections that are made when they are first used.

A connection carries frames one way, from the rank that has opened it; what comes back over it is at most one notice,
the other one's last words. So two ranks that talk both ways have two, and never have to agree on who connects.

[Note: why not gloo] Both fill a wire of 1 Gbit/s, and gloo takes twice the processor's time for that. But what it has
begun to receive can be waited for and not asked for; a wait for any source goes on for ever, even when all have died;
when one that has a timeout is over, so are the connections; and small messages go from thread to thread.

The invariant: nothing here blocks; and no two threads are in here at once, but in ``sleep`` and ``announce``.
"""

import contextlib
import os
import select
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.comm.hosts.frames import HEAD, HELLO, TOKEN_BYTES, Parcel, pack_notice
from paceline.comm.hosts.incoming import Channel, Incoming, Place
from paceline.comm.hosts.outgoing import Outgoing
from paceline.comm.hosts.sockets import listen, own_address, prepare

_MOST_STRANGERS = 64  # connections that have not said who they are, beyond those that all ranks may just have made

_all: "weakref.WeakSet[Post]" = weakref.WeakSet()


@dataclass(frozen=True)
class Gone:
    """A rank that takes part no more.

    Attributes:
        since: when this rank has seen the first sign of it.
        words: its last ones.
        has_spoken: whether it has left by itself; else it has ended without a word, in the way that ``sign`` tells.
    """

    rank: int
    since: float
    sign: str
    has_spoken: bool = False
    has_failed: bool = False
    words: str = ""


class Post:
    """What one rank sends to ranks of other hosts, and gets from them.

    Args:
        rank: in the group.
    """

    def __init__(self, rank: int) -> None:
        self.gone: dict[int, Gone] = {}  # by rank
        self.last_news = 0.0  # when something has come or gone
        self._rank = rank
        self._addresses: list[tuple[str, int]] = []
        self._tokens: list[bytes] = []
        self._channels: dict[int, Channel] = {}
        self._outgoing: dict[tuple[int, int], Outgoing] = {}  # by peer and channel
        self._incoming: dict[int, Incoming] = {}  # by descriptor
        self._by_fd: dict[int, Outgoing] = {}
        self._token = os.urandom(TOKEN_BYTES // 2).hex()
        self.address = own_address()
        self._listener = listen(self.address)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._is_announced = False
        self._is_closed = False
        _all.add(self)

    # -- before all else -----------------------------------------------------------------------------------------

    def whereabouts(self) -> dict[str, Any]:
        """What the other ranks must know of this one."""
        return {"host": self.address, "port": self._listener.getsockname()[1], "token": self._token}

    def learn(self, whereabouts: list[dict[str, Any]]) -> None:
        """What they have told, by rank."""
        self._addresses = [(told["host"], int(told["port"])) for told in whereabouts]
        self._tokens = [told["token"].encode() for told in whereabouts]

    def open(self, channel: int, place: Place, arrived: Callable[[int, int], None]) -> None:
        """Begin to take the frames of ``channel``; ``arrived(source, key)`` is called when one is complete."""
        self._channels[channel] = Channel(place, arrived)

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, channel: int, to: int, key: int, memory: memoryview | None, extra: int = 0) -> Parcel:
        """Begin to send a frame, whose memory must stay as it is until it is done."""
        head = HEAD.pack(key, len(memory) if memory is not None else 0, extra)
        parcel = Parcel(to, memory, head)
        outgoing = self.connect(channel, to)
        if outgoing is not None:
            outgoing.queue.append(parcel)
            outgoing.write()
        return parcel

    def withdraw(self, channel: int, parcel: Parcel) -> None:
        """Do not send it, if that has not begun."""
        outgoing = self._outgoing.get((parcel.peer, channel))
        if outgoing is not None:
            outgoing.withdraw(parcel)

    def connect(self, channel: int, to: int) -> Outgoing | None:
        """The connection through which frames go; None where the rank is gone."""
        if to in self.gone or self._is_closed:
            return None
        outgoing = self._outgoing.get((to, channel))
        if outgoing is not None:
            return outgoing
        hello = HELLO.pack(self._tokens[to], self._rank, channel)
        outgoing = Outgoing(to, self._addresses[to], hello, self._epoll, told=self._read_notice, ended=self._drop)
        self._outgoing[to, channel] = outgoing
        self._by_fd[outgoing.connection.fileno()] = outgoing
        return outgoing if outgoing.connect() else None

    def _read_notice(self, outgoing: Outgoing, has_failed: bool, words: str) -> None:
        self._note(outgoing.peer, "it has left", has_spoken=True, has_failed=has_failed, words=words)

    def _drop(self, outgoing: Outgoing, sign: str) -> None:
        self._note(outgoing.peer, sign)
        if self._by_fd.pop(outgoing.connection.fileno(), None) is not None:
            outgoing.close()

    # -- receiving -----------------------------------------------------------------------------------------------

    def resume(self, channel: int, source: int | None = None) -> None:
        """Some of the frames that had no place have one now."""
        for incoming in list(self._incoming.values()):
            if incoming.is_paused and incoming.channel == channel and source in (None, incoming.source):
                incoming.resume()

    def may_come(self, source: int) -> bool:
        """Whether anything of ``source`` may still be on its way."""
        return any(each.source == source and not each.is_paused for each in list(self._incoming.values()))

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                prepare(connection)
                num_mute = sum(incoming.source < 0 for incoming in self._incoming.values())
                if num_mute >= _MOST_STRANGERS + len(self._channels) * len(self._addresses):
                    connection.close()
                    continue
                self._incoming[connection.fileno()] = Incoming(
                    connection,
                    self._epoll,
                    self._channels,
                    self._token.encode(),
                    greeted=self._greet,
                    ended=self._hang_up,
                )

    def _greet(self, incoming: Incoming) -> None:
        self.connect(incoming.channel, incoming.source)  # a way for its last words

    def _hang_up(self, incoming: Incoming, sign: str) -> None:
        if incoming.source >= 0:
            self._note(incoming.source, sign)
        self._close(incoming)

    def _close(self, incoming: Incoming) -> None:
        if self._incoming.pop(incoming.connection.fileno(), None) is not None:
            incoming.close()

    # -- all of it -----------------------------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Whether there is nothing to send, and nothing that has come waits to be read."""
        return self._is_closed or (not self.num_unsent and not self._epoll.poll(0))

    @property
    def num_unsent(self) -> int:
        """Frames, and hellos, that the kernel has not taken yet."""
        return sum(len(outgoing.queue) for outgoing in list(self._by_fd.values()))

    def poll(self) -> bool:
        """Send and take what can be without waiting; whether there was anything."""
        if self._is_closed:
            return False
        has_any = False
        for fd, events in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif (incoming := self._incoming.get(fd)) is not None:
                has_any = incoming.read() or has_any
            elif (outgoing := self._by_fd.get(fd)) is not None:
                outgoing.answer(events)
                has_any = outgoing.write() or has_any
        if has_any:
            self.last_news = time.monotonic()
        return has_any

    def sleep(self, timeout_s: float) -> None:
        """Until there may be something to do."""
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            self._epoll.poll(timeout_s)

    def announce(self, *, has_failed: bool, words: str) -> None:
        """Tell all that this rank takes part no more."""
        if self._is_announced or self._is_closed:
            return
        self._is_announced = True
        notice = pack_notice(has_failed, words)
        for incoming in list(self._incoming.values()):  # others may read meanwhile
            with contextlib.suppress(OSError):  # it is gone itself
                incoming.connection.send(notice)
        for outgoing in list(self._by_fd.values()):  # those to whom nothing could be said see that nothing more comes
            if has_failed or not outgoing.queue:
                with contextlib.suppress(OSError):
                    outgoing.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Twice does no harm."""
        if self._is_closed:
            return
        self._is_closed = True
        for incoming in list(self._incoming.values()):
            self._close(incoming)
        for outgoing in list(self._by_fd.values()):
            outgoing.connection.close()
        self._by_fd.clear()
        self._listener.close()
        self._epoll.close()

    def leave_to_parent(self) -> None:
        """In a forked child, which must not keep connections open when its parent has died."""
        self._is_closed = True
        sockets = [self._listener]
        sockets += [incoming.connection for incoming in self._incoming.values()]
        sockets += [outgoing.connection for outgoing in self._by_fd.values()]
        for connection in sockets:
            os.close(connection.detach())
        self._epoll.close()

    def _note(
        self, peer: int, sign: str, *, has_spoken: bool = False, has_failed: bool = False, words: str = ""
    ) -> None:
        """Remember that a rank is gone; what it said itself counts for more than how it looks."""
        known = self.gone.get(peer)
        if known is None or (has_spoken and not known.has_spoken):
            since = time.monotonic() if known is None else known.since
            self.gone[peer] = Gone(peer, since, sign, has_spoken, has_failed, words)


def _leave_to_parent() -> None:
    for post in list(_all):
        if not post._is_closed:
            post.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
