"""The rendezvous port. It is taken by binding it here and handed down as an open socket, so nobody can take it between
the choice and the use.
"""

import errno
import socket

from paceline.errors import LaunchError
from paceline.launch.layout import LOOPBACK
from paceline.ports import describe_port_holder


def claim_port(port: int, *, backlog: int, address: str = LOOPBACK) -> socket.socket:
    """A listening socket.

    Args:
        port: 0 takes any free one.
        backlog: how many ranks may knock before the store answers; 0 does not listen, but keeps the port for a rank
            that will, which asks for SO_REUSEADDR as torch does.
        address: a literal one of this host.
    Raises:
        LaunchError: the port is taken (the message names the holder where it can be seen) or not allowed.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        if backlog:
            listener.listen(backlog)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {port} is taken by {describe_port_holder(port)}; end that process, choose another "
                "--master-port, or leave it out to take a free one"
            ) from None
        raise LaunchError(
            f"port {port} cannot be bound on {address}: {error.strerror}; choose another --master-port, "
            "or leave it out to take a free one"
        ) from None
    return listener
