"""The launcher's own process: forwards output and signals, stops the others when one rank fails, and says why.

One thread, one loop. It decides how a launch ends exactly once (``_cause``), and always ends it the same way: all
ranks ended, all output drained, the verdict printed last, the server gone.
"""

import contextlib
import math
import os
import signal
import time
from collections import deque
from functools import partial

from paceline.errors import LaunchError
from paceline.launch.dispositions import Dispositions, only_wake
from paceline.launch.failure import SETTLE_S, Ending, Report, describe, describe_interrupt, first_failure, in_red
from paceline.launch.forwarding import Forwarder
from paceline.launch.loop import READ, Loop
from paceline.launch.plumbing import open_outlets, open_standard_streams
from paceline.launch.server import ForkServer
from paceline.launch.spec import LaunchSpec
from paceline.launch.wire import Decoder, Message, write_all

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
_OF_TERMINAL = (signal.SIGTSTP, signal.SIGWINCH)


def launch(spec: LaunchSpec) -> int:
    """Run ``spec`` to its end, from the main thread.

    Returns:
        The exit code: 0, that of the rank that failed first, or 128 plus the signal that ended the launch.
    Raises:
        LaunchError: the ranks could not be started or held together.
    """
    open_standard_streams()
    dispositions = Dispositions.capture([*_ENDING, *_FORWARDED, *_OF_TERMINAL])
    wake_reader, wake_writer = os.pipe()
    for end in (wake_reader, wake_writer):
        os.set_blocking(end, False)
    previous_fd = signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    try:
        for signum, handler in dispositions.handlers.items():
            if handler is not signal.SIG_IGN:  # nohup, or a shell's background job
                signal.signal(signum, only_wake)
        return _Supervisor(spec, wake_reader).run()
    finally:
        dispositions.restore()
        signal.set_wakeup_fd(previous_fd)
        os.close(wake_reader)
        os.close(wake_writer)


class _Supervisor:
    def __init__(self, spec: LaunchSpec, wake_fd: int) -> None:
        self._spec = spec
        self._loop = Loop()
        self._outlets = open_outlets(spec.num_ranks)
        self._forwarder = Forwarder(self._loop, self._outlets, self._on_output_closed)
        self._server = ForkServer(spec, self._outlets)
        self._pids: dict[int, int] = {}
        self._decoders = [Decoder() for _ in range(spec.num_ranks)]
        self._reports: dict[int, Report] = {}
        self._ended: dict[int, tuple[int, float]] = {}  # by rank: code, moment
        self._ending_signal: signal.Signals | None = None
        self._is_hurried = False  # output that nobody reads is given up
        self._output_closed = False
        self._broken: str | None = None  # why the launcher itself cannot go on
        self._stop_at_s = math.inf
        self._last_signal = signal.SIGTERM
        self._escalation: deque[signal.Signals] = deque()
        self._loop.watch(wake_fd, READ, lambda: self._on_signals(os.read(wake_fd, 4096)))
        self._loop.watch(self._server.control.fileno(), READ, self._on_server)
        for ends in self._server.ends:
            self._forwarder.attach(ends)
            self._loop.watch(ends.report, READ, partial(self._read_report, ends.rank))

    def run(self) -> int:
        try:
            while not self._is_over():
                self._loop.turn()
            return self._conclude()
        except BaseException:
            self._server.kill()
            raise
        finally:
            self._server.end()
            self._loop.close()

    def _is_over(self) -> bool:
        if len(self._ended) < self._spec.num_ranks:
            return False
        return self._is_hurried or (self._forwarder.is_drained and self._forwarder.is_flushed)

    def _on_server(self) -> None:
        messages = self._server.receive()
        if messages is None:
            self._loop.unwatch(self._server.control.fileno())
            self._on_server_gone()
        for message in messages or ():
            if message["event"] == "born":
                self._on_born(message["rank"], message["pid"])
            elif message["event"] == "ended":
                self._on_ended(message)
            else:
                self._broken = self._broken or message["text"]
                self._stop(signal.SIGTERM, signal.SIGKILL)

    def _on_born(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid
        if self._is_stopping:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, self._last_signal)

    def _on_ended(self, message: Message) -> None:
        rank, code = message["rank"], message["code"]
        self._ended[rank] = (code, message["at_s"])
        self._forwarder.rank_ended(rank)
        self._read_report(rank)  # it was written before the end, but may not have been looked at yet
        if code != 0 and rank not in self._reports:
            self._stop_soon()

    def _read_report(self, rank: int) -> None:
        ends = self._server.ends[rank]
        try:
            data = os.read(ends.report, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.unwatch(ends.report)
        for message in self._decoders[rank].feed(data):
            self._reports[rank] = Report(**message)
            self._stop_soon()

    def _stop_soon(self) -> None:
        """Stop the ranks, but not at once: what this failure caused, or was caused by, is seen in a moment."""
        self._loop.call_later(SETTLE_S, lambda: self._stop(signal.SIGTERM, signal.SIGKILL))

    def _on_server_gone(self) -> None:
        missing = [rank for rank in range(self._spec.num_ranks) if rank not in self._ended]
        if not missing:
            return
        code = self._server.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        which = "its ranks were stopped" if self._pids else "no rank was started; what it said stands above"
        self._broken = self._broken or f"the fork server {how}; {which}"
        self._signal_groups(signal.SIGKILL)
        now = time.monotonic()
        self._stop_at_s = min(self._stop_at_s, now)
        for rank in missing:
            self._ended[rank] = (-signal.SIGKILL, now)
            self._forwarder.rank_ended(rank)

    def _on_output_closed(self) -> None:
        self._output_closed = True
        self._stop(signal.SIGTERM, signal.SIGKILL)

    def _on_signals(self, signums: bytes) -> None:
        for signum in map(signal.Signals, signums):
            if signum in _ENDING:
                self._on_ending_signal(signum)
            elif signum in _FORWARDED:
                for _, pid in self._living():
                    os.kill(pid, signum)
            elif signum == signal.SIGTSTP:
                self._pause()
            elif signum == signal.SIGWINCH:
                self._forwarder.follow_window()
                self._signal_groups(signum)

    def _on_ending_signal(self, signum: signal.Signals) -> None:
        if self._is_stopping and signum == signal.SIGINT:  # the second Ctrl-C: no more patience
            self._is_hurried = True
            self._escalation = deque([signal.SIGKILL])
            self._escalate()
        elif not self._is_stopping:
            self._ending_signal = signum
            first = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
            self._stop(*dict.fromkeys((first, signal.SIGTERM, signal.SIGKILL)))

    def _pause(self) -> None:
        """Ctrl-Z: the ranks are not in the terminal's foreground, so they are told; both go on together."""
        self._signal_groups(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_groups(signal.SIGCONT)

    @property
    def _is_stopping(self) -> bool:
        return self._stop_at_s < math.inf

    def _stop(self, *signals: signal.Signals) -> None:
        """Stop all ranks: each signal in turn, a grace apart. The first call decides."""
        if self._is_stopping:
            return
        self._stop_at_s = time.monotonic()
        self._escalation = deque(signals)
        if self._pids:
            self._escalate()
        else:
            self._server.kill()  # seen on the control socket

    def _escalate(self) -> None:
        if self._escalation:
            self._last_signal = self._escalation.popleft()
            self._signal_groups(self._last_signal)
            self._loop.call_later(self._spec.grace_s, self._escalate)

    def _living(self) -> list[tuple[int, int]]:
        return [(rank, pid) for rank, pid in self._pids.items() if rank not in self._ended]

    def _signal_groups(self, signum: signal.Signals) -> None:
        for rank, pid in self._living():
            # A rank that has reported its failure is on its way out, and its exit code is wanted.
            if signum == signal.SIGTERM and rank in self._reports and self._ending_signal is None:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signum)

    def _conclude(self) -> int:
        """Say how it ended; the exit code."""
        if self._ending_signal is not None:
            self._say(describe_interrupt(self._reports))
            self._say(f"paceline: interrupted by {self._ending_signal.name}, all ranks have ended\n")
            return 128 + self._ending_signal
        if self._output_closed:
            return 128 + signal.SIGPIPE
        if self._broken is not None:
            raise LaunchError(self._broken)
        endings = [self._ending_of(rank) for rank in range(self._spec.num_ranks)]
        first = first_failure(endings)
        if first is None:
            return 0
        self._say(describe(endings, first), in_color=True)
        return first.exit_status

    def _ending_of(self, rank: int) -> Ending:
        code, at_s = self._ended[rank]
        report = self._reports.get(rank)
        if report is not None and code < 0 and at_s >= self._stop_at_s:
            code = report.code  # killed by the launcher while it was ending
        failed_at_s = report.at_s if report is not None else at_s
        return Ending(rank, code, at_s, report, was_stopped=failed_at_s >= self._stop_at_s)

    def _say(self, text: str, *, in_color: bool = False) -> None:
        outlet = next(outlet for outlet in self._outlets if "stderr" in outlet.streams)
        if in_color and outlet.is_terminal and not os.environ.get("NO_COLOR"):
            text = in_red(text)
        with contextlib.suppress(OSError):  # nobody reads it
            write_all(outlet.fd, outlet.interleaver.close_line() + text.encode(errors="backslashreplace"))
