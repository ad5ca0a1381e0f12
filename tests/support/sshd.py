"""Emulated hosts that ssh reaches: an sshd in each, with keys and settings of its own.

The client's settings name the hosts a, b, c and so on, and "closed", where nobody listens; PACELINE_SSH in
``SshHosts.env`` has it read them. It needs what support/hosts.py needs, and openssh-server.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from support.commands import PACELINE, wait_until
from support.hosts import Host, hosts

_PORT = 2222


@dataclass(frozen=True)
class SshHosts:
    """The hosts, in order.

    Args:
        folder: of keys and settings.
    """

    hosts: list[Host]
    folder: pathlib.Path

    @property
    def env(self) -> dict[str, str]:
        return {
            "PACELINE_SSH": f"ssh -F {self.folder}/client",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns that it finds no name server, as is right: there is none
        }

    def start(self, *arguments: str, env: Mapping[str, str | None] | None = None, **options: Any) -> Any:
        """``paceline run ARGUMENTS`` on the first host."""
        return self.hosts[0].start([*PACELINE, "run", *arguments], env={**self.env, **(env or {})}, **options)

    def run(self, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """The same, to its end."""
        env = {**self.env, **options.pop("env", {})}
        return self.hosts[0].run([*PACELINE, "run", *arguments], env=env, **options)


def why_no_sshd() -> str | None:
    """What this machine lacks; None if nothing is known to be missing."""
    missing = [tool for tool in ("sshd", "ssh", "ssh-keygen") if _find(tool) is None]
    return f"{' and '.join(missing)} not found: install openssh-server and openssh-client" if missing else None


@contextlib.contextmanager
def ssh_hosts(count: int, folder: pathlib.Path, *, ipv6: bool = False) -> Iterator[SshHosts]:
    """``count`` hosts with an sshd each; skips the test where that cannot be."""
    import pytest

    if reason := why_no_sshd():
        pytest.skip(reason)
    servers: list[Any] = []
    try:
        with hosts(count, ipv6=ipv6) as made:
            _write_settings(folder, made)
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # where sshd wants an empty folder
            servers += [_serve(host, folder) for host in made]
            yield SshHosts(made, folder)
    finally:
        for server in servers:
            server.wait(30)  # they have ended with their hosts


def _serve(host: Host, folder: pathlib.Path) -> Any:
    """The host's sshd, once it listens."""
    log = folder / f"sshd{host.number}.log"
    with open(log, "w") as said:
        process = host.start([str(_find("sshd")), "-D", "-e", "-f", f"{folder}/server"], stdout=said, stderr=said)
    wait_until(lambda: "Server listening" in log.read_text() or process.poll() is not None)
    assert process.poll() is None, log.read_text()
    return process


def _write_settings(folder: pathlib.Path, made: Sequence[Host]) -> None:
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/{key}"], check=True)
    shutil.copy(folder / "user_key.pub", folder / "authorized")
    server = {
        "Port": _PORT,
        "HostKey": f"{folder}/host_key",
        "AuthorizedKeysFile": f"{folder}/authorized",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "MaxStartups": 100,
    }
    client = {
        "Port": _PORT,
        "User": "root",
        "IdentityFile": f"{folder}/user_key",
        "IdentitiesOnly": "yes",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
    }
    (folder / "server").write_text("".join(f"{key} {value}\n" for key, value in server.items()))
    names = "".join(f"Host {chr(ord('a') + host.number)}\n  HostName {host.address}\n" for host in made)
    names += f"Host closed\n  HostName {made[0].address}\n  Port 1\n"
    (folder / "client").write_text(names + "Host *\n" + "".join(f"  {key} {value}\n" for key, value in client.items()))


def _find(tool: str) -> str | None:
    """sshd wants to be called by its whole path, which not every user's PATH leads to."""
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
