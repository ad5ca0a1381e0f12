"""Between hosts: bytes from rank to rank, over TCP connections that are made when they are first used.

A connection carries frames one way, from the rank that has opened it; what comes back over it is at most one notice,
the other one's last words. So two ranks that talk both ways have two, and never have to agree on who connects.

    hello (token, rank, channel) | frame | frame | ...        ->
                                                              <-  notice (why the other one takes part no more)

A frame is a head (key, bytes, extra) and as many bytes. Whoever is to have it says where they go; until he knows, the
connection is not read, and the kernel makes the sender wait.

[Note: why not gloo] Both fill a wire of 1 Gbit/s, and gloo takes twice the processor's time for that. But what it has
begun to receive can be waited for and not asked for; a wait for any source goes on for ever, even when all have died;
when one that has a timeout is over, so are the connections; and small messages go from thread to thread.

The invariant: nothing here blocks; and no two threads are in here at once, but in ``sleep`` and ``announce``.
"""

import contextlib
import errno
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor

from paceline.environment import read_placement
from paceline.errors import CommunicationError, EnvironmentVariableError

TOKEN_BYTES = 32
_HELLO = struct.Struct(f"!{TOKEN_BYTES}sii")
_HEAD = struct.Struct("!qqq")
_NOTICE = struct.Struct("!?i")
_WORDS_BYTES = 8192
_STAGED_BYTES = 1 << 14  # small frames come with one call, large ones go where they belong without a copy
_AT_ONCE_BYTES = 1 << 22  # read from one connection before others have their turn
_MOST_STRANGERS = 64  # connections that have not said who they are, beyond those that all ranks may just have made

# A host that has lost its power or its cable says nothing: its connections are found dead after half a minute. (Not by
# TCP_USER_TIMEOUT, which would also end those to a peer that is alive and does not read.)
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}

_all: "weakref.WeakSet[Post]" = weakref.WeakSet()

# Where the bytes of a frame go, from its source, key, number of bytes and extra; None: not known yet.
Place = Callable[[int, int, int, int], memoryview | None]


class Parcel:
    """A frame on its way: to be sent, or expected."""

    __slots__ = ("_head", "extra", "is_done", "memory", "peer")

    def __init__(self, peer: int, memory: memoryview | None, head: bytes = b"") -> None:
        self.peer = peer
        self.memory = memory
        self.extra = 0
        self.is_done = False
        self._head = head


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


@dataclass
class _Outgoing:
    peer: int
    connection: socket.socket
    queue: deque[Parcel] = field(default_factory=deque)
    num_sent: int = 0  # bytes of the first in the queue
    answer: bytes = b""
    is_connected: bool = False
    wants_room: bool = True  # whether it waits until it may write


@dataclass
class _Incoming:
    connection: socket.socket
    source: int = -1  # until it has said who it is
    channel: int = -1
    staged: memoryview = field(default_factory=lambda: memoryview(bytearray(_STAGED_BYTES)))
    start: int = 0  # of what is staged and not used yet
    end: int = 0
    head: tuple[int, int, int] | None = None
    memory: memoryview | None = None
    num_filled: int = 0
    is_paused: bool = False


@dataclass(frozen=True)
class _Channel:
    place: Place
    arrived: Callable[[int, int], None]


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
        self._channels: dict[int, _Channel] = {}
        self._outgoing: dict[tuple[int, int], _Outgoing] = {}  # by peer and channel
        self._incoming: dict[int, _Incoming] = {}  # by descriptor
        self._by_fd: dict[int, _Outgoing] = {}
        self._num_unsent = 0
        self._token = os.urandom(TOKEN_BYTES // 2).hex()
        self.address = _own_address()
        self._listener = _listen(self.address)
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
        self._channels[channel] = _Channel(place, arrived)

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, channel: int, to: int, key: int, memory: memoryview | None, extra: int = 0) -> Parcel:
        """Begin to send a frame, whose memory must stay as it is until it is done."""
        head = _HEAD.pack(key, len(memory) if memory is not None else 0, extra)
        parcel = Parcel(to, memory, head)
        outgoing = self.connect(channel, to)
        if outgoing is not None:
            outgoing.queue.append(parcel)
            self._num_unsent += 1
            self._write(outgoing)
        return parcel

    def withdraw(self, channel: int, parcel: Parcel) -> None:
        """Do not send it, if that has not begun."""
        outgoing = self._outgoing.get((parcel.peer, channel))
        if outgoing is None or parcel not in outgoing.queue:
            return
        if parcel is not outgoing.queue[0] or not outgoing.num_sent:
            outgoing.queue.remove(parcel)
            self._num_unsent -= 1

    def connect(self, channel: int, to: int) -> _Outgoing | None:
        """The connection through which frames go; None where the rank is gone."""
        if to in self.gone or self._is_closed:
            return None
        outgoing = self._outgoing.get((to, channel))
        if outgoing is not None:
            return outgoing
        host, port = self._addresses[to]
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        _prepare(connection)
        outgoing = _Outgoing(to, connection)
        self._outgoing[to, channel] = outgoing
        self._by_fd[connection.fileno()] = outgoing
        outgoing.queue.append(Parcel(to, None, _HELLO.pack(self._tokens[to], self._rank, channel)))
        self._num_unsent += 1
        self._epoll.register(connection, select.EPOLLIN | select.EPOLLOUT)
        number = connection.connect_ex((host, port))
        if number not in (0, errno.EINPROGRESS):
            self._drop(outgoing, self._spell_failure(to, number))
            return None
        return outgoing  # how it went is known when it may be written to

    def _write(self, outgoing: _Outgoing) -> bool:
        """Send as much as the kernel takes; whether that was anything."""
        if not outgoing.is_connected:
            return False
        queue, total = outgoing.queue, 0
        try:
            while queue:
                parcel, done = queue[0], outgoing.num_sent
                head, memory = parcel._head, parcel.memory
                if memory is None:
                    sent = outgoing.connection.send(head[done:])
                elif done < len(head):
                    sent = outgoing.connection.sendmsg([head[done:], memory])
                else:
                    sent = outgoing.connection.send(memory[done - len(head) :])
                total += sent
                outgoing.num_sent += sent
                if outgoing.num_sent < len(head) + (0 if memory is None else len(memory)):
                    break  # as full as it gets
                queue.popleft()
                outgoing.num_sent = 0
                parcel.is_done = True
                self._num_unsent -= 1
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(outgoing, error.strerror or str(error))
            return True
        if outgoing.wants_room != bool(queue):
            outgoing.wants_room = bool(queue)
            events = select.EPOLLIN | select.EPOLLOUT if queue else select.EPOLLIN
            self._epoll.modify(outgoing.connection, events)
        return total > 0

    def _answer(self, outgoing: _Outgoing, events: int) -> None:
        """What the kernel or the peer has to say of a connection."""
        if not outgoing.is_connected and events & (select.EPOLLOUT | select.EPOLLERR | select.EPOLLHUP):
            number = outgoing.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                self._drop(outgoing, self._spell_failure(outgoing.peer, number))
                return
            outgoing.is_connected = True
        if events & ~select.EPOLLOUT and outgoing.is_connected:
            try:
                text = outgoing.connection.recv(_WORDS_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._drop(outgoing, error.strerror or str(error))
                return
            outgoing.answer += text
            self._read_notice(outgoing)
            if not text:
                self._drop(outgoing, "its connection was closed")

    def _read_notice(self, outgoing: _Outgoing) -> None:
        if len(outgoing.answer) < _NOTICE.size:
            return
        has_failed, length = _NOTICE.unpack_from(outgoing.answer)
        if len(outgoing.answer) < _NOTICE.size + length:
            return
        words = outgoing.answer[_NOTICE.size : _NOTICE.size + length].decode(errors="replace").strip()
        self._note(outgoing.peer, "it has left", has_spoken=True, has_failed=has_failed, words=words)

    def _drop(self, outgoing: _Outgoing, sign: str) -> None:
        self._note(outgoing.peer, sign)
        self._num_unsent -= len(outgoing.queue)
        outgoing.queue.clear()
        outgoing.is_connected = False
        if self._by_fd.pop(outgoing.connection.fileno(), None) is not None:
            self._epoll.unregister(outgoing.connection)
            outgoing.connection.close()

    # -- receiving -----------------------------------------------------------------------------------------------

    def resume(self, channel: int, source: int | None = None) -> None:
        """Some of the frames that had no place have one now."""
        for incoming in list(self._incoming.values()):
            if incoming.is_paused and incoming.channel == channel and source in (None, incoming.source):
                incoming.is_paused = False
                self._epoll.register(incoming.connection, select.EPOLLIN)
                self._read(incoming)

    def may_come(self, source: int) -> bool:
        """Whether anything of ``source`` may still be on its way."""
        return any(each.source == source and not each.is_paused for each in list(self._incoming.values()))

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                _prepare(connection)
                num_mute = sum(incoming.source < 0 for incoming in self._incoming.values())
                if num_mute >= _MOST_STRANGERS + len(self._channels) * len(self._addresses):
                    connection.close()
                    continue
                self._incoming[connection.fileno()] = _Incoming(connection)
                self._epoll.register(connection, select.EPOLLIN)

    def _read(self, incoming: _Incoming) -> bool:
        """Take what has come; whether there was anything."""
        total = 0
        try:
            while self._unpack(incoming) and total < _AT_ONCE_BYTES:
                if incoming.memory is not None:
                    room = incoming.memory[incoming.num_filled :]
                    came = incoming.connection.recv_into(room)
                    incoming.num_filled += came
                else:
                    rest = incoming.staged[incoming.start : incoming.end]
                    incoming.staged[: len(rest)] = rest
                    incoming.start, incoming.end = 0, len(rest)
                    room = incoming.staged[incoming.end :]
                    came = incoming.connection.recv_into(room)
                    incoming.end += came
                if not came:
                    self._hang_up(incoming, "its connection was closed")
                    break
                total += came
                if came < len(room):  # that was all
                    self._unpack(incoming)
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            self._hang_up(incoming, error.strerror or str(error))
        return total > 0

    def _unpack(self, incoming: _Incoming) -> bool:
        """Bring what is staged where it belongs; false where no more may be read now."""
        while True:
            if incoming.source < 0:
                if incoming.end - incoming.start < _HELLO.size:
                    return True
                if not self._greet(incoming):
                    return False
            if incoming.memory is None:
                if incoming.head is None:
                    if incoming.end - incoming.start < _HEAD.size:
                        return True
                    incoming.head = _HEAD.unpack_from(incoming.staged, incoming.start)
                    incoming.start += _HEAD.size
                incoming.memory = self._channels[incoming.channel].place(incoming.source, *incoming.head)
                if incoming.memory is None:
                    incoming.is_paused = True
                    self._epoll.unregister(incoming.connection)
                    return False
                incoming.num_filled = 0
            missing = len(incoming.memory) - incoming.num_filled
            num = min(missing, incoming.end - incoming.start)
            if num:
                incoming.memory[incoming.num_filled : incoming.num_filled + num] = incoming.staged[
                    incoming.start : incoming.start + num
                ]
                incoming.start += num
                incoming.num_filled += num
            if num < missing:
                return True
            assert incoming.head is not None
            key, incoming.head, incoming.memory = incoming.head[0], None, None
            self._channels[incoming.channel].arrived(incoming.source, key)

    def _greet(self, incoming: _Incoming) -> bool:
        """Whether the other end is a rank of this group."""
        token, source, channel = _HELLO.unpack_from(incoming.staged, incoming.start)
        if token != self._token.encode() or channel not in self._channels:
            self._close(incoming)
            return False
        incoming.start += _HELLO.size
        incoming.source, incoming.channel = source, channel
        self.connect(channel, source)  # a way for its last words
        return True

    def _hang_up(self, incoming: _Incoming, sign: str) -> None:
        if incoming.source >= 0:
            self._note(incoming.source, sign)
        self._close(incoming)

    def _close(self, incoming: _Incoming) -> None:
        if self._incoming.pop(incoming.connection.fileno(), None) is not None:
            if not incoming.is_paused:
                self._epoll.unregister(incoming.connection)
            incoming.connection.close()

    # -- all of it -----------------------------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Whether there is nothing to send, and nothing that has come waits to be read."""
        return not self._num_unsent and not self._epoll.poll(0)

    @property
    def num_unsent(self) -> int:
        """Frames, and hellos, that the kernel has not taken yet."""
        return self._num_unsent

    def poll(self) -> bool:
        """Send and take what can be without waiting; whether there was anything."""
        if self._is_closed:
            return False
        has_any = False
        for fd, events in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif (incoming := self._incoming.get(fd)) is not None:
                has_any = self._read(incoming) or has_any
            elif (outgoing := self._by_fd.get(fd)) is not None:
                self._answer(outgoing, events)
                has_any = self._write(outgoing) or has_any
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
        text = words.encode()[-_WORDS_BYTES:]
        notice = _NOTICE.pack(has_failed, len(text)) + text
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

    def _spell_failure(self, peer: int, number: int) -> str:
        host, port = self._addresses[peer]
        return f"no connection to {f'[{host}]' if ':' in host else host}:{port}: {os.strerror(number)}"


def memory_of(tensor: Tensor) -> memoryview | None:
    """The bytes of a flat tensor; None where it is empty."""
    return memoryview(tensor.view(torch.uint8).numpy()) if tensor.numel() else None  # type: ignore[arg-type]


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    listener.setblocking(False)
    return listener


def _own_address() -> str:
    """The address at which other hosts reach this one, found as gloo finds it, or better where gloo would not.

    Raises:
        CommunicationError: GLOO_SOCKET_IFNAME names what is not there.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if interface:
        return _address_of(interface)
    with contextlib.suppress(OSError):
        for _, _, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            host = str(address[0])
            if not host.startswith("127.") and host != "::1" and _may_bind(host):
                return host
    with contextlib.suppress(OSError, EnvironmentVariableError):
        # The name leads nowhere, or (Debian's habit) back to the loopback: take the way to where the ranks have met.
        goal = read_placement(os.environ).address or "127.0.0.1"
        family, _, _, _, address = socket.getaddrinfo(goal, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _address_of(interface: str) -> str:
    found = {
        name: [a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6) and "%" not in a.address]
        for name, addresses in psutil.net_if_addrs().items()
    }
    if not found.get(interface):
        others = ", ".join(sorted(name for name, addresses in found.items() if addresses))
        raise CommunicationError(
            f"GLOO_SOCKET_IFNAME={interface!r}: this host has no such interface, or it has no address; it has {others}."
            " Name the one that leads to the other hosts."
        )
    return min(found[interface], key=lambda address: ":" in address)


def _may_bind(host: str) -> bool:
    try:
        _listen(host).close()
    except OSError:
        return False
    return True


def _leave_to_parent() -> None:
    for post in list(_all):
        if not post._is_closed:
            post.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
