"""Trying addresses: a door that each host opens, and knocking at those of the others.

Whoever opens says a secret of its own, so that the same address on another machine is not taken for it.
"""

import contextlib
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

# For an answer. A firewall that says nothing costs as much for each address that is tried behind it.
_ANSWER_S = 5.0
_MOST_AT_ONCE = 64


class Door:
    """A listening socket on all interfaces, at which ``secret`` is said.

    Attributes:
        port: where.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, name="paceline probes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who waits for a knock
        self._thread.join()
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(self._secret)


def knock(doors: Sequence[tuple[str, int, str]]) -> list[bool]:
    """Whether each of ``doors`` (address, port, secret) answers, all tried at once."""
    with ThreadPoolExecutor(max(1, min(len(doors), _MOST_AT_ONCE))) as pool:
        return list(pool.map(lambda door: _answers(*door), doors))


def _answers(address: str, port: int, secret: str) -> bool:
    try:
        with socket.create_connection((address, port), timeout=_ANSWER_S) as connection:
            heard = b""
            while piece := connection.recv(len(secret) + 1 - len(heard)):
                heard += piece
            return heard == secret.encode()
    except OSError:
        return False
