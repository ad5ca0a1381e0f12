"""At which address the other hosts reach each host: which ones it has, and the choice among them.

Names mislead (Debian lets a host's name lead to 127.0.1.1), and so do addresses that lead nowhere from elsewhere (a
bridge of docker's has the same one on every host). So what counts is what the others have reached.
"""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import LaunchError

Addresses = Sequence["Address"]


@dataclass(frozen=True)
class Address:
    """A literal address, and the interface that has it."""

    text: str
    interface: str

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.text


def own_addresses(interfaces: Mapping[str, Sequence[str]], wanted: str = "") -> list[Address]:
    """Where others may reach this host, in the order in which that is to be tried.

    Args:
        interfaces: addresses of each, in the system's order.
        wanted: the value of GLOO_SOCKET_IFNAME: names between commas, or empty for all of them.
    Returns:
        Those of IPv4 first. Addresses of the loopback, and those that a host gives itself where nobody gives it one,
        only where there are no others.
    Raises:
        LaunchError: no interface that is wanted has an address.
    """
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    found = [
        Address(text, name)
        for name, texts in interfaces.items()
        if not names or name in names
        for text in texts
        if "%" not in text  # of one cable
    ]
    if not found:
        has = ", ".join(sorted(name for name, texts in interfaces.items() if texts)) or "none"
        what = f"GLOO_SOCKET_IFNAME={wanted!r}: no such interface has an address" if names else "there is no address"
        raise LaunchError(f"{what}; interfaces with addresses: {has}")
    best = min(_remoteness(address) for address in found)
    return sorted((each for each in found if _remoteness(each) == best), key=lambda address: address.is_ipv6)


def system_interfaces() -> dict[str, list[str]]:
    """Addresses of this host's interfaces."""
    import psutil  # when it is needed: the command line is to start at once

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [each.address for each in addresses if each.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }


def candidates_of(addresses: Addresses, attempt: int) -> list[Address]:
    """What is tried of a host's ``addresses`` in this attempt, from 0: the next one of each family."""
    families = ([each for each in addresses if each.is_ipv6 == is_ipv6] for is_ipv6 in (False, True))
    return [family[attempt] for family in families if attempt < len(family)]


def choose_addresses(
    addresses: Sequence[Addresses], reached: Mapping[tuple[int, int], Sequence[str]]
) -> list[Address] | None:
    """For each host the first address that all others reach, all of one family, IPv4 rather than IPv6.

    Args:
        addresses: of each host, in the order of preference.
        reached: by (host that tried, host that it tried): the addresses that answered.
    Returns:
        None where some host has none.
    """
    num_hosts = len(addresses)
    for is_ipv6 in (False, True):
        chosen = [
            next(
                (
                    each
                    for each in addresses[goal]
                    if each.is_ipv6 == is_ipv6
                    and all(each.text in reached.get((by, goal), ()) for by in range(num_hosts) if by != goal)
                ),
                None,
            )
            for goal in range(num_hosts)
        ]
        if None not in chosen:
            return [address for address in chosen if address is not None]
    return None


def interface_variables(interface: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What has libraries talk through ``interface``, unless the user has set it otherwise."""
    told = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}", "TP_SOCKET_IFNAME": interface}
    return {name: value for name, value in told.items() if not environ.get(name)}


def _remoteness(address: Address) -> int:
    """0 for what others may reach; 1 where nobody has given this host an address; 2 for the loopback."""
    ip = ipaddress.ip_address(address.text)
    return 2 if ip.is_loopback else 1 if ip.is_link_local else 0
