"""A process that dies with its parent (prctl(2), PR_SET_PDEATHSIG)."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when ``parent_pid``, its parent, ends.

    The parent's *thread* that forked is what counts, so fork from a main thread.
    """
    _set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo :func:`die_with_parent`."""
    _set_parent_death_signal(0)


def _set_parent_death_signal(signum: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum), 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
