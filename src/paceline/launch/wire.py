"""Messages between the launcher's processes: one JSON object a line, so that a torn one is never taken for a whole.

Open files travel beside a message where it says how many: the kernel hands them over with its first byte.
"""

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_MOST_FDS = 64  # that one read takes over; a message has a few, and the rest waits
_READ_BYTES = 1 << 16


def encode(message: Message) -> bytes:
    """One line. Only ASCII: undecodable bytes of a command line travel as escaped surrogates."""
    return json.dumps(message).encode("ascii") + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line.

    Raises:
        ValueError: it is none.
    """
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, but got {line[:80]!r}")
    return message


def write_all(fd: int, data: bytes) -> None:
    """Write every byte of ``data``; ``os.write`` may take only a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def send(connection: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send ``message``, and ``fds``, which the receiver gets copies of.

    Raises:
        OSError: nobody is there to receive it.
    """
    data = encode({**message, "num_fds": len(fds)} if fds else message)
    sent = socket.send_fds(connection, [data], list(fds)) if fds else 0
    connection.sendall(data[sent:])


class Decoder:
    """Puts lines together again from whatever pieces a pipe delivers."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes, in order."""
        return [decode(line) for line in self.split(data)]

    def split(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, whatever is in them."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


class Receiver:
    """The receiving side of ``send``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = Decoder()
        self._fds: list[int] = []

    def receive(self) -> list[tuple[Message, list[int]]] | None:
        """Messages that have come, each with its files; waits for some. None once the sender is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self._connection, _READ_BYTES, _MOST_FDS)
        except ConnectionResetError:
            return None
        self._fds += fds
        if not data:
            return None
        received = []
        for message in self._decoder.feed(data):
            num_fds = message.pop("num_fds", 0)
            received.append((message, self._fds[:num_fds]))
            del self._fds[:num_fds]
        return received

    def drop(self) -> None:
        """Close the files of messages that are not whole yet: in a fork, they are the parent's."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
