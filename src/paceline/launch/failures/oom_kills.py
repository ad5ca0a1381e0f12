"""Whether the kernel has killed for want of memory: its counters of OOM kills, and the limits that lead to them.

The kernel counts an OOM kill before the victim dies, and twice: in the victim's own cgroup, whether its limit was
reached, that of one around it, or the end of the machine's memory; and for the whole machine.

The invariant: what cannot be read is not taken for nothing having happened.
"""

import os
from dataclasses import dataclass

_UNLIMITED = 1 << 62  # version 1 of cgroups says so with the largest number of pages


@dataclass(frozen=True)
class OomKills:
    """OOM kills that were counted since some moment.

    Attributes:
        in_cgroup: in the launcher's cgroup, where its ranks are; None where it has no counter.
        on_host: on the whole machine; None likewise.
        limit_bytes: of the cgroup whose limit was reached, the launcher's or one around it; None where none was that
            can be seen from here.
    """

    in_cgroup: int | None = None
    on_host: int | None = None
    limit_bytes: int | None = None

    @property
    def were_likely(self) -> bool:
        """Whether a process of the cgroup was killed, as far as anything counts that."""
        return bool(self.on_host if self.in_cgroup is None else self.in_cgroup)


class OomCounters:
    """The counters as they are now.

    Args:
        root: where /proc and /sys are found.
    """

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self._levels = _levels(root)
        self._own = next((level for level in self._levels if level.num_kills() is not None), None)
        self._before = self._read()

    def since(self) -> OomKills:
        """What was counted since this was made."""
        own, host, *shortages = (
            None if before is None or now is None else now - before
            for before, now in zip(self._before, self._read(), strict=True)
        )
        limits = (level.limit_bytes() for level, count in zip(self._levels, shortages, strict=True) if count)
        return OomKills(own, host, next((limit for limit in limits if limit is not None), None))

    def _read(self) -> list[int | None]:
        own = None if self._own is None else self._own.num_kills()
        host = _field(os.path.join(self._root, "proc/vmstat"), "oom_kill")
        return [own, host, *(level.num_shortages() for level in self._levels)]


@dataclass(frozen=True)
class _Level:
    """A folder of the memory controller's, of either version of cgroups."""

    folder: str
    is_first_version: bool

    def num_kills(self) -> int | None:
        """OOM kills in it; in version 2, also in those below it."""
        return _field(self._path("memory.oom_control", "memory.events"), "oom_kill")

    def num_shortages(self) -> int | None:
        """How often its own limit was reached; version 2 counts only if nothing could be freed."""
        if self.is_first_version:
            return _number(_read(os.path.join(self.folder, "memory.failcnt")))
        return _field(os.path.join(self.folder, "memory.events"), "oom")

    def limit_bytes(self) -> int | None:
        limit = _number(_read(self._path("memory.limit_in_bytes", "memory.max")))
        return None if limit is None or limit >= _UNLIMITED else limit

    def _path(self, first: str, second: str) -> str:
        return os.path.join(self.folder, first if self.is_first_version else second)


def _levels(root: str) -> list[_Level]:
    """This process's memory cgroup and those around it that can be seen, the innermost first."""
    path, is_first_version = "", False
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, of_line = line.split(":", 2)
        if "memory" in controllers.split(","):
            path, is_first_version = of_line, True
        elif not controllers and not is_first_version:
            path = of_line
    mount = _mount(root, is_first_version)
    if not path or mount is None:
        return []
    top, point = mount
    top = top.rstrip("/")
    if ".." in [*path.split("/"), *top.split("/")] or not f"{path}/".startswith(f"{top}/"):
        return []  # outside of what is mounted, or of this namespace
    parts = [part for part in path.removeprefix(top).split("/") if part]
    folder = os.path.join(root, point.lstrip("/"))
    return [_Level(os.path.join(folder, *parts[:depth]), is_first_version) for depth in range(len(parts), -1, -1)]


def _mount(root: str, is_first_version: bool) -> tuple[str, str] | None:
    """Which cgroup is mounted where."""
    for line in _read(os.path.join(root, "proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if (kind == "cgroup" and "memory" in options.split(",")) if is_first_version else kind == "cgroup2":
            top, point = before.split(" ")[3:5]
            return top, point
    return None


def _field(path: str, name: str) -> int | None:
    """The number after ``name``, in a file of such lines."""
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value)
    return None


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
