"""At which addresses hosts reach each other, and what is said where they do not."""

import socket

import pytest

from paceline.errors import LaunchError
from paceline.launch.agent.probing import Door, knock
from paceline.launch.conductor.preflight import describe_absent, describe_unreached, why_lost, why_no_agent, why_unlike
from paceline.launch.hosts.addresses import (
    Address,
    candidates_of,
    choose_addresses,
    interface_variables,
    own_addresses,
)

ETH, DOCKER, V6 = Address("10.0.0.1", "eth0"), Address("172.17.0.1", "docker0"), Address("fd00::1", "eth0")
OTHER, OTHER_V6 = Address("10.0.0.2", "ens3"), Address("fd00::2", "ens3")


def test_a_hosts_own_addresses_are_those_that_others_may_reach_ipv4_first():
    interfaces = {
        "lo": ["127.0.0.1", "::1"],
        "docker0": ["172.17.0.1"],
        "eth0": ["fd00::1", "fe80::1%eth0", "10.0.0.1"],
        "eth1": ["169.254.3.4"],
        "down": [],
    }
    assert own_addresses(interfaces) == [DOCKER, ETH, V6]
    assert own_addresses(interfaces, "eth0") == [ETH, V6]
    assert own_addresses({"lo": ["127.0.0.1"], "eth1": ["169.254.3.4"]}) == [Address("169.254.3.4", "eth1")]
    assert own_addresses({"lo": ["127.0.0.1", "::1"]}) == [Address("127.0.0.1", "lo"), Address("::1", "lo")]


def test_an_interface_without_an_address_is_an_error_that_names_the_others():
    with pytest.raises(LaunchError, match=r"GLOO_SOCKET_IFNAME='ib0'.*; interfaces with addresses: eth0, lo"):
        own_addresses({"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "ib0": []}, "ib0")
    with pytest.raises(LaunchError, match="there is no address; interfaces with addresses: none"):
        own_addresses({"lo": []})


def test_an_attempt_tries_the_next_address_of_each_family():
    assert [candidates_of([DOCKER, ETH, V6], attempt) for attempt in range(3)] == [[DOCKER, V6], [ETH], []]


@pytest.mark.parametrize(
    ("reached", "chosen"),
    [
        ({(1, 0): ["10.0.0.1"], (0, 1): ["10.0.0.2"]}, [ETH, OTHER]),
        ({(1, 0): ["172.17.0.1", "10.0.0.1"], (0, 1): ["10.0.0.2"]}, [DOCKER, OTHER]),
        ({(1, 0): ["10.0.0.1", "fd00::1"], (0, 1): ["fd00::2"]}, [V6, OTHER_V6]),  # one family for all
        ({(1, 0): ["10.0.0.1"], (0, 1): ["fd00::2"]}, None),
        ({(1, 0): ["10.0.0.1"]}, None),
        ({}, None),
    ],
)
def test_the_first_address_that_the_others_reach_is_chosen(reached, chosen):
    assert choose_addresses([[DOCKER, ETH, V6], [OTHER, OTHER_V6]], reached) == chosen


def test_an_address_must_be_reached_by_all_the_others():
    third = Address("10.0.0.3", "eth0")
    reached = {(by, goal): [f"10.0.0.{goal + 1}"] for by in range(3) for goal in range(3) if by != goal}
    assert choose_addresses([[ETH], [OTHER], [third]], reached) == [ETH, OTHER, third]
    del reached[2, 0]
    assert choose_addresses([[ETH], [OTHER], [third]], reached) is None


def test_libraries_are_told_the_interface_unless_the_user_has():
    told = interface_variables("eth0", {"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": ""})
    assert told == {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
    assert interface_variables("eth0", {})["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_a_door_answers_with_its_secret_and_nothing_else_counts():
    door, other = Door("one"), Door("other")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    try:
        doors = [("127.0.0.1", door.port, "one"), ("127.0.0.1", other.port, "one"), ("127.0.0.1", port, "one")]
        assert knock(doors) == [True, False, False]
        assert knock([("127.0.0.1", other.port, "othe"), ("127.0.0.1", door.port, "ones")]) == [False, False]
        assert knock([]) == []
    finally:
        door.close()
        other.close()
    assert knock([("127.0.0.1", door.port, "one")]) == [False]


def test_hosts_that_do_not_reach_each_other_are_an_error_that_lists_what_was_tried():
    told = describe_unreached(["a", "b", "c"], [[ETH], [OTHER], []], {(1, 0): ["10.0.0.1"], (0, 1): ["10.0.0.2"]})
    assert "  a: 10.0.0.1 (eth0) is not reached from c\n" in told
    assert "  b: 10.0.0.2 (ens3) is not reached from c\n" in told
    assert told.endswith("name an interface that leads there: GLOO_SOCKET_IFNAME=eth0")
    both = describe_unreached(["a", "b"], [[ETH], [OTHER]], {(1, 0): ["10.0.0.1"]})
    assert "  a: 10.0.0.1 (eth0) is reached from all others\n" in both


@pytest.mark.parametrize(
    ("exit_code", "said", "ssh", "why"),
    [
        (91, "sh: cd", "ssh b", "there is no folder /w; make it, or name another with --workdir"),
        (92, "", "ssh b", "there is no interpreter /p; install it, or name another with --python"),
        (
            255,
            "banner\nssh: no route\n",
            "ssh b",
            "ssh: no route; see whether `ssh b true` works; PACELINE_SSH may hold options of ssh",
        ),
        (1, "x\nNo module", "ssh b", "/p could not start paceline (exit code 1: No module); install paceline "),
        (255, "odd", "", "/p could not start paceline (exit code 255: odd); install paceline "),
        (-9, "", "", "/p could not start paceline (exit code -9: nothing was said); install paceline "),
    ],
)
def test_why_a_host_has_no_agent(exit_code, said, ssh, why):
    told = why_no_agent(exit_code, said, ssh=ssh, python="/p", folder="/w")
    assert told.startswith(why)


def test_all_that_is_wrong_is_told_at_once_and_what_is_alike_on_one_line():
    assert describe_absent({"a": "x", "b": "y", "c": "x"}, 4) == (
        "3 of 4 hosts cannot take part, so nothing was started:\n  a, c: x\n  b: y"
    )
    assert why_unlike("0.0.1").startswith("it has paceline 0.0.1, but here is ")
    assert why_lost("a\nb\n") == "the connection was lost (b)"
    assert why_lost("") == "the connection was lost"
