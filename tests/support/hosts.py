"""Hosts, emulated on one machine: network namespaces around a switch, joined to it by cables of limited rate.

    host 0                    host 1
    eth0 10.77.0.1            eth0 10.77.0.2
       |  rate, each way         |
    port0 ----- switch ----- port1         (a bridge in a namespace of its own)

Each host has its own addresses, ports and loopback. Everything else is shared, as it is between processes of one
machine: the host's name, pids, files and /dev/shm. It needs Linux, root and iproute2.

The invariant: when the block is over, however it ended, the processes in the hosts are dead and the namespaces, with
all that was in them, are gone. Nothing is made outside of the namespaces, so that runs beside each other can't meet.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from support.commands import start

INTERFACE = "eth0"  # of every host; for GLOO_SOCKET_IFNAME and its like

# A burst holds several of the 64 kB packets that TCP hands down at once, and lasts 4 ms at 1 Gbit/s; what would wait
# longer than 100 ms is dropped.
_SHAPE = ("burst", "512kb", "latency", "100ms")
# The machine's own may be another, with another pace; this one is allowed in every namespace.
_CONGESTION_CONTROL = "reno"


@dataclass(frozen=True)
class Host:
    """One of the hosts: its number from 0, its namespace, and the address at which the others reach it."""

    number: int
    namespace: str
    address: str

    def start(self, arguments: Sequence[str], *, env: Mapping[str, str | None] | None = None, **options: Any) -> Any:
        """Start a command here, in a process group of its own; its pid is the command's, and its pipes hold text."""
        command = ["ip", "netns", "exec", self.namespace, *arguments]
        return start(command, env=env, start_new_session=True, **options)

    def run(
        self, arguments: Sequence[str], *, timeout_s: float = 60.0, **options: Any
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command here to its end; after ``timeout_s`` its whole group is killed, and the test fails."""
        process = self.start(arguments, **options)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"not done after {timeout_s} s; it said {out!r} and {err!r}") from None
        return subprocess.CompletedProcess(list(arguments), process.returncode, out, err)


def start_ranks(all_hosts: Sequence[Host], ranks_per_host: int, arguments: Sequence[str], **options: Any) -> list[Any]:
    """Start a command as every rank of a world over the hosts, told what a launcher would tell it; by rank.

    Ports are each host's own, so a fixed one for the rendezvous is free.
    """
    env = {
        "MASTER_ADDR": all_hosts[0].address,
        "MASTER_PORT": "29400",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns that it finds no name server, as is right: there is none
    }
    ranks = []
    for host in all_hosts:
        for local_rank in range(ranks_per_host):
            numbers = {
                "RANK": len(ranks),
                "WORLD_SIZE": len(all_hosts) * ranks_per_host,
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": ranks_per_host,
                "GROUP_RANK": host.number,
                "GROUP_WORLD_SIZE": len(all_hosts),
            }
            texts = {name: str(number) for name, number in numbers.items()}
            ranks.append(host.start(arguments, env=env | texts, **options))
    return ranks


def why_no_hosts() -> str | None:
    """What this machine lacks to emulate hosts; None if nothing is known to be missing."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found: install iproute2" if missing else None


@contextlib.contextmanager
def hosts(count: int, rate: str = "1gbit", *, ipv6: bool = False) -> Iterator[list[Host]]:
    """``count`` hosts that reach each other at ``rate`` (in tc's spelling), each way; skips the test without root.

    Args:
        ipv6: their addresses are of IPv6 alone.

    Raises:
        RuntimeError: a command of iproute2 failed; the message holds it and what it said.
    """
    if reason := why_no_hosts():
        import pytest  # here: benchmarks ask why_no_hosts first, and need no test runner

        pytest.skip(reason)
    name = f"paceline-{secrets.token_hex(4)}"
    switch = f"{name}-switch"
    prefix = "fd77::" if ipv6 else "10.77.0."
    made = [Host(number, f"{name}-{number}", f"{prefix}{number + 1}") for number in range(count)]
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, switch)
        _make_switch(switch)
        for host in made:
            stack.callback(_remove, host.namespace)
            _plug_in(host, switch, rate)
        yield made


def _make_switch(switch: str) -> None:
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "switch", "up")


def _plug_in(host: Host, switch: str, rate: str) -> None:
    port = f"port{host.number}"
    _run("ip", "netns", "add", host.namespace)
    _run(*f"ip -n {host.namespace} link add {INTERFACE} type veth peer name {port} netns {switch}".split())
    mask = ("64", "nodad") if ":" in host.address else ("24",)
    _run(*f"ip -n {host.namespace} address add {host.address}/{mask[0]} dev {INTERFACE}".split(), *mask[1:])
    _run("ip", "-n", switch, "link", "set", port, "master", "switch")
    for namespace, interface in ((host.namespace, INTERFACE), (switch, port)):  # what leaves the host, what reaches it
        _run(*f"tc -n {namespace} qdisc add dev {interface} root tbf rate {rate}".split(), *_SHAPE)
        _run("ip", "-n", namespace, "link", "set", interface, "up")
    _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
    setting = f"echo {_CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"
    _run("ip", "netns", "exec", host.namespace, "sh", "-c", setting)


def _remove(namespace: str) -> None:
    """A namespace lives on while a process is in it, so those go first."""
    if not pathlib.Path("/run/netns", namespace).exists():
        return
    deadline = time.monotonic() + 5.0
    while (pids := _run("ip", "netns", "pids", namespace).split()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)
    _run("ip", "netns", "delete", namespace)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
