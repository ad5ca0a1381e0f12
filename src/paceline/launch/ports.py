"""The rendezvous port. It is taken by binding it here and handed down as an open socket, so nobody can take it between
the choice and the use.
"""

import errno
import socket
import time

from paceline.errors import LaunchError
from paceline.launch.environment import MASTER_ADDR


def claim_port(port: int, *, backlog: int) -> socket.socket:
    """A listening socket on the loopback.

    Args:
        port: 0 takes any free one.
        backlog: how many ranks may knock before the store answers.
    Raises:
        LaunchError: the port is taken (the message names the holder where it can be seen) or not allowed.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((MASTER_ADDR, port))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {port} is taken by {_holder(port)}; end that process, choose another --master-port, "
                "or leave it out to take a free one"
            ) from None
        raise LaunchError(
            f"port {port} cannot be bound on {MASTER_ADDR}: {error.strerror}; choose another --master-port, "
            "or leave it out to take a free one"
        ) from None
    return listener


def _holder(port: int) -> str:
    """Who listens on ``port``, as far as this user may see."""
    import psutil

    unseen = "a process that this user may not see"
    try:
        pids = [
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.laddr and connection.laddr.port == port and connection.pid
        ]
        if not pids:
            return unseen
        process = psutil.Process(pids[0])
        command = " ".join(process.cmdline()) or process.name()
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(process.create_time()))
    except psutil.Error:
        return unseen
    return f"pid {pids[0]} ({command!r}, started {started})"
