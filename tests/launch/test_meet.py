"""Where a host is reached, and whether the endpoint is here: pure, but for what the kernel knows of this machine."""

import contextlib
import socket

import pytest

from paceline.launch.hosts.meet import _address_of, _is_here, _listen
from support.ipv6 import needs_ipv6


def nodes(endpoint, *, backend="static", local_address=""):
    return {"endpoint": endpoint, "backend": backend, "local_address": local_address}


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [("[fd00::7]:29500", "fd00::7"), ("fd00::7:29500", "fd00::7"), ("[::1]", "::1"), ("host:1", "host"), ("h", "h")],
)
def test_node_0_of_a_static_rendezvous_is_reached_where_all_meet(endpoint, address):
    assert _address_of(nodes(endpoint), 0) == address


def test_another_node_is_reached_by_the_interface_that_leads_there():
    assert _address_of(nodes("127.0.0.1:29500"), 1) == "127.0.0.1"
    assert _address_of(nodes("127.0.0.1", backend="c10d"), 0) == "127.0.0.1"
    assert _address_of(nodes("no-such-host.invalid:1"), 1) == socket.gethostname()


@needs_ipv6
def test_by_ipv6_where_it_leads_there():
    assert _address_of(nodes("[::1]:29500"), 1) == "::1"
    assert _address_of(nodes("[::1]", backend="c10d"), 0) == "::1"


def test_what_was_given_as_this_hosts_address_is_it():
    assert _address_of(nodes("127.0.0.1:29500", local_address="fd00::1"), 1) == "fd00::1"


@pytest.mark.parametrize(
    ("endpoint", "is_here"),
    [("localhost:1", True), ("127.0.0.1", True), ("192.0.2.1:29400", False), ("no-such-host.invalid:1", False)],
)
def test_an_endpoint_is_here_if_its_address_is_one_of_this_hosts(endpoint, is_here):
    assert _is_here(endpoint) is is_here


@needs_ipv6
@pytest.mark.parametrize(("endpoint", "is_here"), [("[::1]:29400", True), ("[2001:db8::1]:29400", False)])
def test_so_it_is_with_ipv6(endpoint, is_here):
    assert _is_here(endpoint) is is_here


def test_a_port_is_only_kept_for_a_single_rank_which_listens_itself():
    with contextlib.closing(_listen(1)) as kept:
        port = kept.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=30)
        socket.create_server(("127.0.0.1", port)).close()


@needs_ipv6
def test_the_ranks_store_can_be_reached_by_both_families():
    with contextlib.closing(_listen(2)) as listener:
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), timeout=30).close()
