"""Whether this machine has IPv6, for tests that need it."""

import socket

import pytest


def why_no_ipv6() -> str | None:
    """What is wrong with this machine's IPv6; None if its loopback can be used."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        return f"no IPv6 here: {error.strerror}"
    return None


needs_ipv6 = pytest.mark.skipif(why_no_ipv6() is not None, reason=why_no_ipv6() or "")
