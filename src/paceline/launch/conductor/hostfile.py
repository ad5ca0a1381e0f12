"""Which hosts a job runs on, and how many ranks each has: ``--hosts``, and the hostfiles of DeepSpeed and of MPI.

    worker-1 slots=4                DeepSpeed, and Open MPI, which also writes max_slots=8
    worker-2:4                      MPICH, Intel MPI, and --hosts
    ada@worker-3                    as another user; one rank, or as many as -n says
    [fd00::4]:2                     an address of IPv6

A host that is named again adds its ranks to those that it has, as in Open MPI. Its number, from 0, is its place among
those named.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import LaunchError

_EXPECTED = "expected HOST, HOST:RANKS, USER@HOST:RANKS or [IPV6]:RANKS"
_SLOTS = {"slots": True, "max_slots": False, "max-slots": False}  # whether it says how many ranks there are


@dataclass(frozen=True)
class HostSpec:
    """One host.

    Args:
        name: as ssh takes it: an alias of the user's own ssh config, a name or an address.
        user: on that host; None for the one that ssh takes.
        num_ranks: None where that is left to ``-n``.
    """

    name: str
    user: str | None = None
    num_ranks: int | None = None

    @property
    def target(self) -> str:
        """What ssh is told."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def parse_hosts(text: str) -> tuple[HostSpec, ...]:
    """``a:4,ada@b,[fd00::1]:4``.

    Raises:
        LaunchError: it reads otherwise.
    """
    return _added_up(_parse_host(part.strip(), f"--hosts {text}") for part in text.split(","))


def read_hostfile(path: str) -> tuple[HostSpec, ...]:
    """The hosts in a file, one a line; what stands after ``#`` is a comment.

    Raises:
        LaunchError: it cannot be read, names no host, or reads otherwise; the message has the line.
    """
    try:
        with open(path) as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LaunchError(f"the hostfile {path} cannot be read: {why}") from None
    said = ((number, line.partition("#")[0].split()) for number, line in enumerate(lines, 1))
    hosts = _added_up(_parse_line(words, f"{path}, line {number}") for number, words in said if words)
    if not hosts:
        raise LaunchError(f"the hostfile {path} names no host; expected a line for each, such as 'worker-1 slots=4'")
    return hosts


def _parse_line(words: list[str], where: str) -> HostSpec:
    host = _parse_host(words[0], where)
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key not in _SLOTS or not value:
            raise LaunchError(f"{where}: expected slots=N or max_slots=N after the host, but got {word!r}")
        count = _count_of(value, where)
        if _SLOTS[key]:
            if host.num_ranks not in (None, count):
                raise LaunchError(f"{where}: {words[0]!r} and {word!r} name different numbers of ranks")
            host = HostSpec(host.name, host.user, count)
    return host


def _parse_host(text: str, where: str) -> HostSpec:
    user, at, place = text.rpartition("@")
    parts = re.fullmatch(r"\[([^\[\]]+)\](?::(.*))?|([^:\[\]]+)(?::(.*))?", place)
    if _is_ipv6(place):  # alone it needs no brackets
        name, count = place, None
    elif parts is None or (parts[1] and not _is_ipv6(parts[1])):
        raise LaunchError(f"{where}: {_EXPECTED}, but got {text!r}")
    else:
        name, count = parts[1] or parts[3], parts[2] if parts[1] else parts[4]
    if name.startswith("-") or (at and (not user or user.startswith("-"))):  # ssh would take it for an option
        raise LaunchError(f"{where}: {_EXPECTED}, but got {text!r}")
    return HostSpec(name, user or None, None if count is None else _count_of(count, where))


def _count_of(text: str, where: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise LaunchError(f"{where}: expected a number of ranks from 1, but got {text!r}")
    return int(text)


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _added_up(named: Iterable[HostSpec]) -> tuple[HostSpec, ...]:
    """Each host once, with the ranks of all places where it was named; nothing said counts as one beside a number."""
    hosts: dict[tuple[str, str | None], HostSpec] = {}
    for host in named:
        before = hosts.get((host.name, host.user))
        if before is not None:
            host = HostSpec(host.name, host.user, (before.num_ranks or 1) + (host.num_ranks or 1))
        hosts[host.name, host.user] = host
    return tuple(hosts.values())
