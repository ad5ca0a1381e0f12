"""The processes that ``spawn`` has started, seen from their parent: torch's context.

The invariant: when ``join`` has raised, none of them is left; and who drops the context ends nothing.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.multiprocessing import ProcessContext, ProcessExitedException, ProcessRaisedException

from paceline.launch.failures.ending import SETTLE_S, Ending, Report, first_failure
from paceline.launch.spawning import spawned
from paceline.launch.wire import Decoder

_TERMINATE_S = 30.0  # torch's: what a rank may take to end on SIGTERM where join's grace_period does not say
# After Ctrl-C: for ranks that have heard it too to end by themselves, and then on SIGTERM.
INTERRUPTED_S = (1.0, 2.0)

# The writing ends of [Note: lifeline]. They last as long as the processes' objects, which multiprocessing keeps until
# the processes have ended: who drops the context ends nothing.
_lifelines: "weakref.WeakKeyDictionary[BaseProcess, Connection]" = weakref.WeakKeyDictionary()


class Ranks(ProcessContext):
    """What ``spawn(join=False)`` returns: torch's context, which tells the first failure from those that it caused."""

    def __init__(self) -> None:
        super().__init__([], [])  # type: ignore[no-untyped-call]
        self._reports: list[Connection] = []
        self._endings: list[Ending] = []
        self._failure: Exception | None = None

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until a process ends; once one has failed, end the others. To be called until it returns true.

        Args:
            timeout: how long to wait, in seconds.
            grace_period: how long the others may take to end by themselves, and then on SIGTERM, before they are
                killed; by default nothing, and half a minute.
        Returns:
            Whether all have ended, and well.
        Raises:
            ProcessRaisedException, ProcessExitedException: the first failure; again, if it is called again.
        """
        if self._failure is None and self.sentinels:
            try:
                self._note_ends(timeout)
                if any(ending.failed for ending in self._endings):
                    self._stop(grace_period)
            except KeyboardInterrupt:
                self.end(*INTERRUPTED_S)
                raise
        if self._failure is not None:
            raise self._failure
        return not self.sentinels

    def _stop(self, grace_s: float | None) -> None:
        """Look for a moment at what this failure caused, or was caused by, and end the others."""
        settled_at = time.monotonic() + SETTLE_S
        while self.sentinels and (left_s := settled_at - time.monotonic()) > 0:
            self._note_ends(left_s)
        first = first_failure(self._endings)
        assert first is not None
        self._failure = _exception_of(first, self.processes[first.rank].pid)
        self.end(grace_s or 0.0, _TERMINATE_S if grace_s is None else grace_s)

    def start(
        self,
        method: str,
        call: spawned.Call,
        index: int,
        variables: dict[str, str],
        port: socket.socket,
        *,
        daemon: bool,
    ) -> None:
        """Start the process of rank ``index``."""
        reader, writer = multiprocessing.Pipe(duplex=False)
        report = Connection(os.memfd_create("paceline report"), readable=False)
        environment = dict(os.environ) if method == "forkserver" else {}
        birth = spawned.Birth(index, method, variables, environment, reader, report, port)
        context: Any = multiprocessing.get_context(method)
        process = context.Process(target=spawned.run, args=(birth, call), daemon=daemon)
        _lifelines[process] = writer
        with reader:
            try:
                with _interrupts_held_back(method):
                    process.start()
                    self.processes.append(process)  # from now on ``end`` waits for it
                    self.sentinels[process.sentinel] = index
                    self._reports.append(report)
                spawned.kill_at_hangup(reader, process.pid)
            except BaseException:
                _let_go(process)
                raise

    def _note_ends(self, timeout_s: float | None) -> None:
        for sentinel in wait(list(self.sentinels), timeout_s):
            index = self.sentinels.pop(sentinel)
            self.processes[index].join()
            code = self.processes[index].exitcode
            with self._reports[index] as report:
                self._endings.append(Ending(index, code, time.monotonic(), _read_report(report)))
            _let_go(self.processes[index])

    def end(self, patience_s: float, terminate_s: float) -> None:
        """Leave nothing running: wait, SIGTERM, wait, SIGKILL. What interrupts this hurries it."""
        try:
            self._await_all(patience_s)
            for process in self.processes:
                if process.is_alive():
                    process.terminate()
            self._await_all(terminate_s)
        finally:
            for process in self.processes:
                if process.is_alive():
                    process.kill()
                process.join()
                _let_go(process)
            for report in self._reports:
                report.close()
            self.sentinels.clear()

    def _await_all(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def _interrupts_held_back(method: str) -> Iterator[None]:
    """A KeyboardInterrupt that comes while a process starts comes when it is known that there is one.

    A fork takes the signal's mask along, and undoes it; Python would lose what comes while it runs what is registered
    for a fork. A fresh process would keep the mask, so for those it is the handler that waits.
    """
    if method == "fork":
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda signum, _: came.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _read_report(report: Connection) -> Report | None:
    data = os.pread(report.fileno(), os.fstat(report.fileno()).st_size, 0)
    return next((Report(**message) for message in Decoder().feed(data)), None)


def _exception_of(first: Ending, pid: int) -> Exception:
    """In torch's words, which scripts may look for."""
    report, code = first.report, first.code
    if report is not None and report.kind == "raised":
        text = f"\n\n-- Process {first.rank} terminated with the following error:\n{report.text}"
        return ProcessRaisedException(text, first.rank, pid)
    if report is not None:
        code = report.code
    if code >= 0:
        text = f"process {first.rank} terminated with exit code {code}"
        return ProcessExitedException(text, first.rank, pid, code)
    name = f"<Unknown signal {-code}>"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
    return ProcessExitedException(f"process {first.rank} terminated with signal {name}", first.rank, pid, code, name)


def _let_go(process: BaseProcess) -> None:
    """Of a process that has ended, or is to end now."""
    writer = _lifelines.pop(process, None)
    if writer is not None:
        writer.close()


def _leave_lifelines_to_parent() -> None:
    """In a forked child, which must not keep its parent's children alive."""
    for writer in _lifelines.values():
        writer.close()
    _lifelines.clear()


os.register_at_fork(after_in_child=_leave_lifelines_to_parent)
