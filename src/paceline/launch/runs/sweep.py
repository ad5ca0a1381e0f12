"""Ending orphans, and nothing else.

Its invariant: a signal goes to a process that carried the mark of a dead launcher when the signal's handle on it was
already taken, so no pid can change hands in between.
"""

import contextlib
import ctypes
import errno
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import LaunchError
from paceline.launch.runs.look import Process, read_process

GRACE_S = 2.0
# How many are ended at a time: each takes a descriptor.
_AT_ONCE = 200
# The same on every architecture that torch runs on. os.pidfd_open() is missing from Pythons that were built against
# old headers, as conda's are.
_PIDFD_SEND_SIGNAL = 424
_PIDFD_OPEN = 434
_GONE = (errno.ESRCH, errno.EINVAL, errno.ENOENT)  # the latter two: its number is now that of somebody's thread
_REFUSED = (errno.ENOSYS, errno.EPERM)  # an old kernel; or a container's filter, which may say either


@dataclass(frozen=True)
class Swept:
    """What became of orphans. Those in neither list had gone by themselves, or had become something else."""

    ended: tuple[Process, ...]
    surviving: tuple[Process, ...]


def sweep(orphans: Sequence[Process], *, grace_s: float = GRACE_S) -> Swept:
    """Ask orphans to end, and kill those that have not after ``grace_s``.

    Raises:
        LaunchError: this kernel has no handles on processes.
    """
    ended: list[Process] = []
    surviving: list[Process] = []
    for first in range(0, len(orphans), _AT_ONCE):
        held = {fd: orphan for orphan in orphans[first : first + _AT_ONCE] if (fd := _grasp(orphan)) is not None}
        try:
            left = set(held)
            for signum in (signal.SIGTERM, signal.SIGKILL):
                for fd in left:
                    _send(fd, signum)
                left = _await_ends(left, grace_s)
            ended += [orphan for fd, orphan in held.items() if fd not in left]
            surviving += [read_process(held[fd].pid) or held[fd] for fd in held if fd in left]
        finally:
            for fd in held:
                os.close(fd)
    return Swept(tuple(ended), tuple(surviving))


def describe_survivor(process: Process) -> str:
    """Why ``process`` could not be ended, as far as its state tells."""
    why = "it waits in the kernel (state D), and ends as soon as that returns"
    if process.state != "D":
        why = f"it is in state {process.state}; look at it with `ps -p {process.pid}`"
    return f"pid {process.pid} ({process.command}) could not be ended: {why}"


def _grasp(orphan: Process) -> int | None:
    """A handle on the process; None if it has ended, or is no longer that orphan."""
    try:
        fd = _system_call(_PIDFD_OPEN, orphan.pid, 0)
    except OSError as error:
        if error.errno in _REFUSED:
            raise LaunchError(
                f"ending orphans wants pidfd_open(2), which this kernel or container refuses ({error.strerror}); it is "
                "there since Linux 5.3. End what `paceline ps` shows with `kill PID`"
            ) from None
        if error.errno in _GONE:
            return None
        raise
    # Looked at with the handle in hand: were the pid another's by now, its start or its mark would tell.
    now = read_process(orphan.pid)
    is_same = now is not None and (now.started, now.launcher) == (orphan.started, orphan.launcher)
    if is_same and orphan.launcher is not None and not orphan.launcher.is_alive():
        return fd
    os.close(fd)
    return None


def _send(fd: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; or changed its user, and survives
        _system_call(_PIDFD_SEND_SIGNAL, fd, signum, None, 0)


def _await_ends(fds: set[int], timeout_s: float) -> set[int]:
    """Those of ``fds`` whose processes still run after ``timeout_s``, or none as soon as all have ended."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    left = set(fds)
    deadline = time.monotonic() + timeout_s
    while left and (remaining_s := deadline - time.monotonic()) > 0:
        for fd, _ in poller.poll(remaining_s * 1000):
            poller.unregister(fd)
            left.discard(fd)
    return left


def _system_call(number: int, *arguments: int | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
