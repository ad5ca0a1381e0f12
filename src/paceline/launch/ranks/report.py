"""What a rank tells the supervisor when its script fails.

The supervisor prints the traceback last, below everything that the other ranks say. If it can't be told, the rank
prints the traceback itself, as python would: it never gets lost.
"""

import inspect
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from paceline.launch.wire import Message, encode, write_all


class Reporter:
    """The writing end of a rank's report pipe."""

    def __init__(self, fd: int, rank: int) -> None:
        self._fd = fd
        self._rank = rank
        self._pid = os.getpid()
        self._file = _file_behind(fd)

    def exited(self, error: SystemExit) -> bool:
        """Report ``sys.exit`` with something other than success; whether the supervisor knows now."""
        if error.code is None or error.code == 0:
            return True
        if isinstance(error.code, int):
            return self._send("exit", error.code & 0xFF, f"SystemExit: {error.code}", "")
        return self._send("exit", 1, f"SystemExit: {error.code}", f"{error.code}\n")

    def raised(self, error: BaseException, frames: TracebackType | None) -> bool:
        """Report an exception that nobody caught; whether the supervisor knows now."""
        kind, code = ("interrupt", -signal.SIGINT) if isinstance(error, KeyboardInterrupt) else ("raised", 1)
        text = "".join(traceback.format_exception(type(error), error, frames))
        return self._send(kind, code, _summarize(error), text)

    def _send(self, kind: str, code: int, summary: str, text: str) -> bool:
        report: Message = {"kind": kind, "code": int(code), "at_s": time.monotonic(), "summary": summary, "text": text}
        # A script may have closed every descriptor, and opened others since; a child that it forked is not the rank.
        try:
            if os.getpid() != self._pid or _file_behind(self._fd) != self._file:
                return False
            write_all(self._fd, encode(report))
        except OSError:
            return False
        return True


def deliver_through(reporter: Reporter, error: BaseException, frames: TracebackType | None) -> None:
    """Have python end this process on ``error`` as ever, but with the report in place of the printed traceback.

    A hook that the script has set is called as python would call it, with the frames of the script alone.
    """
    reported = reporter.raised(error, frames)
    chosen_hook = _without_torchs_prefix(sys.excepthook)
    silent = reported and chosen_hook is sys.__excepthook__

    def hook(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        value.__traceback__ = frames
        if not silent:
            chosen_hook(kind, value, frames)

    sys.excepthook = hook


def _without_torchs_prefix(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook below those by which ``init_process_group`` marks each line with the rank; the launcher marks them."""
    while inspect.isfunction(hook) and hook.__module__ == "torch.distributed.distributed_c10d":
        wrapped = inspect.getclosurevars(hook).nonlocals.get("old_hook")
        if wrapped is None:
            break
        hook = wrapped
    return hook


def _file_behind(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _summarize(error: BaseException) -> str:
    """The last line that python would print, were the message one line; no colon leads to what is left out."""
    lines = traceback.format_exception_only(type(error), error)
    kind = type(error).__name__
    line = next((line for line in lines if line.partition(":")[0].endswith(kind)), kind).partition("\n")[0]
    return line.strip().removesuffix(":")
