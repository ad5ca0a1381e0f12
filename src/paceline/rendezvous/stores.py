"""The TCP store of a job: served by rank 0, reached by the others.

The invariant: a port is taken by binding it, so that nobody can come between the choice and the use; and a forked child
neither holds its parent's port nor touches its parent's store.

[Note: the port stays] A store that rank 0 serves lives on until its process ends, so that ``init`` after ``shutdown``
meets at the same place without a race between the old server's end and the new one's start.
"""

import contextlib
import errno
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from paceline.errors import RendezvousError, WorldError
from paceline.ports import describe_port_holder, spell_endpoint
from paceline.rendezvous.forks import make_immortal

_PROBE_S = 5.0

# The stores that this process serves, by port, with the descriptor that each listens on. [Note: the port stays]
_served: dict[int, tuple[dist.TCPStore, int]] = {}


def connect(address: tuple[str, int], rank: int, deadline: float) -> dist.TCPStore:
    """A client of the store at ``address``, once something listens there.

    Raises:
        RendezvousError: nothing did before the deadline, or no store.
    """
    # A plain socket asks first: TCPStore's own attempts are a second apart, and it prints each failure.
    reason, pause_s = "no time was left", 0.002
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection(address, timeout=min(_PROBE_S, left_s)).close()
            return dist.TCPStore(*address, None, False, timeout=timedelta(seconds=left_s))
        except (OSError, dist.DistError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or "it is not a rank's store"
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, 0.2)
    raise RendezvousError(
        f"rank {rank}: nobody answered at {spell_endpoint(*address)} before the deadline ({reason}). Is rank 0 "
        "running, and is MASTER_ADDR an address of its host that this host reaches?"
    )


def serve(address: tuple[str, int] | None, deadline: float) -> dist.TCPStore:
    """The store that rank 0 serves at ``address``; None stands for any port.

    Raises:
        WorldError: the port is taken (the message names the holder) or not allowed.
    """
    host, port = address or ("", 0)
    for served_port, (store, _) in _served.items():
        if port in (0, served_port):
            return store
    listener = _listen(host, port)
    bound_host, port = listener.getsockname()[:2]
    # The server's own client takes the shortest way: MASTER_ADDR need not lead back to where it is served.
    own_host = "127.0.0.1" if bound_host in ("::", "0.0.0.0") else bound_host
    fd = listener.detach()
    store = dist.TCPStore(
        own_host,
        port,
        None,
        True,
        timeout=_until(deadline),
        wait_for_workers=False,
        multi_tenant=address is not None,  # shared with torch's own rendezvous in this process, [Note: the port stays]
        master_listen_fd=fd,
    )
    _served[port] = store, fd
    return store


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket: on the loopback if ``host`` is, else on all interfaces."""
    family, where = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")
    with contextlib.suppress(socket.gaierror):  # a name that other hosts may know
        for known, _, _, _, found in socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM) if host else ():
            if str(found[0]).startswith("127.") or found[0] == "::1":
                family, where = known, str(found[0])
                break
    try:
        return socket.create_server((where, port), family=family, backlog=1024, dualstack_ipv6=where == "::")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise WorldError(
                f"rank 0: port {port} is in use by {describe_port_holder(port)}. End that process if it is left over, "
                "or choose another MASTER_PORT; `paceline run` takes a free one by itself."
            ) from None
        reason = os.strerror(error.errno or 0)
        raise WorldError(
            f"rank 0: cannot listen at {spell_endpoint(where, port)} ({reason}). Choose another MASTER_PORT."
        ) from None


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


def _leave_stores_to_parent() -> None:
    """In a forked child: the ports are the parent's."""
    make_immortal(dict(_served))
    for _, fd in _served.values():
        os.close(fd)
    _served.clear()


os.register_at_fork(after_in_child=_leave_stores_to_parent)
