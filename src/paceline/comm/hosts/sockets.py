"""Sockets between hosts: at which address a rank can be reached, and how its sockets are set.

The invariant: none of them blocks.
"""

import contextlib
import os
import socket

import psutil

from paceline.environment import read_placement
from paceline.errors import CommunicationError, EnvironmentVariableError

# A host that has lost its power or its cable says nothing: its connections are found dead after half a minute. (Not by
# TCP_USER_TIMEOUT, which would also end those to a peer that is alive and does not read.)
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def prepare(connection: socket.socket) -> None:
    """Set what every connection between hosts needs."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen(host: str) -> socket.socket:
    """Where others may connect to, at ``host`` and a free port."""
    listener = socket.create_server((host, 0), family=family_of(host), backlog=1024)
    listener.setblocking(False)
    return listener


def own_address() -> str:
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
        listen(host).close()
    except OSError:
        return False
    return True
