"""Processes of this host: told apart for good, and whose launcher they descend from.

Its invariant: what cannot be told counts as alive and as somebody else's, so that nothing is taken for left over that
is not.
"""

import os
import pathlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# In the environment of a launcher's fork server, and so of all that descends from it: see launch/server/client.py.
_MARK = "PACELINE_LAUNCHER"
# On the command line of a fork server, and so of what it has forked: what stands before the number of its socket.
_BOOTS = "from paceline.launch.server.forkserver import main"
# On that of an agent: see launch/conductor/ssh.py.
_BOOTS_AGENT = "from paceline.cli import main; main(['agent'])"


class Stat(NamedTuple):
    """What the kernel says of a process; ``started`` is in clock ticks since the machine was."""

    state: str
    parent: int
    group: int
    started: int


def read_stat(pid: int) -> Stat | None:
    """What the kernel says of ``pid``; None where there is no such process any more. Unreaped remains are no process.

    Raises:
        OSError: that cannot be told.
    """
    # Not psutil's create_time(): it adds the time of boot, which moves when the clock is set.
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name, in brackets, may hold anything
    return None if fields[0] in "ZX" else Stat(fields[0], int(fields[1]), int(fields[2]), int(fields[19]))


def started_at(pid: int) -> int | None:
    """When ``pid`` was started, in clock ticks since the machine was; None where there is no such process any more.

    With the pid it names a process for good. Unreaped remains are no process.

    Raises:
        OSError: that cannot be told.
    """
    stat = read_stat(pid)
    return None if stat is None else stat.started


@dataclass(frozen=True)
class Launcher:
    """A launcher, as the mark of those that it has started names it.

    Args:
        started: in clock ticks since the machine was started; with the pid, it names a process for good.
    """

    pid: int
    started: int

    @classmethod
    def from_mark(cls, mark: str) -> "Launcher | None":
        """None where the mark is none of ours, or of another machine, as a batch job may inherit it."""
        parts = re.fullmatch(r"([1-9][0-9]{0,8}):([0-9]{1,18})(?::([0-9a-f-]+))?", mark)
        if parts is None or (parts[3] is not None and parts[3] != _boot()):
            return None
        return cls(int(parts[1]), int(parts[2]))

    def is_alive(self) -> bool:
        """Whether it runs; true where that cannot be told."""
        try:
            return started_at(self.pid) == self.started or _is_hidden(self.pid)
        except OSError:
            return True


def own_mark() -> dict[str, str]:
    """What a launcher puts into the environment of those that it starts."""
    pid = os.getpid()
    return {_MARK: f"{pid}:{started_at(pid)}" + (f":{boot}" if (boot := _boot()) else "")}


def _boot() -> str:
    """This machine, since it was started."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def launcher_of(pid: int) -> Launcher | None:
    """The launcher that ``pid`` descends from; None for a stranger to all launchers, or to this user.

    A process of another namespace counts as a stranger: a container's pid is another process here.
    """
    try:
        if not is_own(pid) or _namespaces(pid) != _namespaces(os.getpid()):
            return None
        environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    marks = [entry.partition(b"=")[2] for entry in environment if entry.startswith(_MARK.encode() + b"=")]
    return Launcher.from_mark(os.fsdecode(marks[0])) if marks else None


def is_left_over(pid: int) -> bool:
    """Whether ``pid`` is this user's, and descends from a launcher that runs no more."""
    launcher = launcher_of(pid)
    return launcher is not None and not launcher.is_alive()


def is_own(pid: int) -> bool:
    """Whether ``pid`` acts as this user and as nobody else.

    Raises:
        OSError: there is no such process, or that cannot be told.
    """
    # The owner of the folder in /proc would not do: it is root's where a process may not be looked into.
    for line in pathlib.Path(f"/proc/{pid}/status").read_bytes().splitlines():
        if line.startswith(b"Uid:"):
            return {int(uid) for uid in line.split()[1:]} == {os.getuid()}
    return False


def spell_command(argv: Sequence[str]) -> str:
    """A command line as its user typed it, as far as the process's own ``argv`` tells; one line, fit for a terminal."""
    words = list(argv)
    if [os.path.basename(word) for word in words[1:2]] == ["paceline"]:
        words[:2] = ["paceline"]
    elif "-c" in words:
        boot = words.index("-c")
        code = "".join(words[boot + 1 :][:1])
        if _BOOTS in code:
            words[boot : boot + 3] = []  # a fork of the fork server: what is left is the script and what it was given
        elif _BOOTS_AGENT in code:
            words[: boot + 2] = ["paceline", "agent"]
    text = words[0] if len(words) == 1 else shlex.join(words)  # one word with blanks in it is a title, set later
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def _is_hidden(pid: int) -> bool:
    """Whether another user's process has this pid, and /proc is mounted so that it does not show those."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return not os.path.exists(f"/proc/{pid}")
    return False


def _namespaces(pid: int) -> list[str]:
    """Those in which pids and starting times are told."""
    names = [name for name in ("pid", "time") if os.path.lexists(f"/proc/self/ns/{name}")]
    return [os.readlink(f"/proc/{pid}/ns/{name}") for name in names]
