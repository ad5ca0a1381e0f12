"""How much memory processes use, on this host and on its devices."""

import pathlib
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

_ASK_DEVICES = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
_ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Usage:
    """What some processes use together.

    Args:
        pss_bytes: memory, a page that n processes share counted as 1/n of it in each; None where that cannot be read.
        device_bytes: of all devices; None where no driver tells.
    """

    pss_bytes: int | None = None
    device_bytes: int | None = None

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(_sum(self.pss_bytes, other.pss_bytes), _sum(self.device_bytes, other.device_bytes))


def measure(pids: Iterable[int]) -> dict[int, Usage]:
    """What each process uses now."""
    pids = list(pids)
    on_devices = parse_devices(_ask_devices()) if pids else {}
    return {pid: Usage(_pss_bytes(pid), on_devices.get(pid)) for pid in pids}


def parse_devices(answer: str) -> dict[int, int]:
    """Bytes by pid from lines of ``pid, MiB``, one a process and device; the driver does not know all of them."""
    used: dict[int, int] = {}
    for pid, mib in re.findall(r"^(\d+), (\d+)$", answer, re.MULTILINE):
        used[int(pid)] = used.get(int(pid), 0) + (int(mib) << 20)
    return used


def _pss_bytes(pid: int) -> int | None:
    try:
        rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    found = re.search(r"^Pss: +(\d+) kB$", rollup, re.MULTILINE)
    return int(found[1]) << 10 if found else None


def _ask_devices() -> str:
    try:
        asked = subprocess.run(
            _ASK_DEVICES, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):  # no such program, or a driver that hangs
        return ""
    return asked.stdout


def _sum(one: int | None, other: int | None) -> int | None:
    known = [number for number in (one, other) if number is not None]
    return sum(known) if known else None
