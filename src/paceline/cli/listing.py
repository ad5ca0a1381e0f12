"""Processes as columns that people read."""

import shutil
import sys
from collections.abc import Mapping, Sequence

from paceline.launch.runs.look import Process
from paceline.launch.runs.usage import Usage


def list_orphans(orphans: Sequence[Process], usage: Mapping[int, Usage]) -> str:
    """A line an orphan, under headings."""
    rows = [
        [
            str(o.pid),
            str(o.launcher.pid if o.launcher else ""),
            spell_age(o.age_s),
            *spell_usage(usage[o.pid]),
            o.command,
        ]
        for o in orphans
    ]
    return align(["pid", "launcher", "age", "memory", "on devices", "command"], rows)


def align(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; the last one is cut where the terminal ends. Columns without an entry are left
    out.
    """
    kept = [n for n in range(len(headings)) if any(row[n] for row in rows)]
    lines = [[line[n] for n in kept] for line in (headings, *rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(kept) - 1)]
    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    padded = ("  ".join([*map(str.ljust, line, widths), line[-1]]) for line in lines)
    return "\n".join(line[:most] for line in padded)


def spell_usage(usage: Usage) -> list[str]:
    """Memory, and memory on devices."""
    return [spell_bytes(usage.pss_bytes), spell_bytes(usage.device_bytes)]


def spell_bytes(number: int | None) -> str:
    if number is None:
        return ""
    mib = number / (1 << 20)
    return f"{mib:.1f} MiB" if mib < 10 else f"{mib:.0f} MiB"


def spell_age(age_s: float) -> str:
    """In the two largest units that say something."""
    minutes, seconds = divmod(int(age_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next((n for n, (number, _) in enumerate(parts) if number), 3)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2])
