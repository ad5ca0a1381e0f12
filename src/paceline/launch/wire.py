"""Messages between the launcher's processes: one JSON object a line, so that a torn one is never taken for a whole."""

import json
import os
from typing import Any

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """One line. Only ASCII: undecodable bytes of a command line travel as escaped surrogates."""
    return json.dumps(message).encode("ascii") + b"\n"


def write_all(fd: int, data: bytes) -> None:
    """Write every byte of ``data``; ``os.write`` may take only a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Decoder:
    """Puts lines together again from whatever pieces a pipe delivers."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes, in order."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]
