"""Processes of this host, told apart for good."""

import pathlib


def started_at(pid: int) -> int | None:
    """When ``pid`` was started, in clock ticks since the machine was; None where there is no such process any more.

    With the pid it names a process for good. Unreaped remains are no process.

    Raises:
        OSError: that cannot be told.
    """
    # Not psutil's create_time(): it adds the time of boot, which moves when the clock is set.
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name, in brackets, may hold anything
    return None if fields[0] in "ZX" else int(fields[19])
