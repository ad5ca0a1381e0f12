"""One life of the ranks on this host: born, heard, ended.

The invariant: a rank's report is read before it counts as ended, and its output is followed to its end.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from paceline.launch.failures.ending import Ending, Report, is_early_stop
from paceline.launch.failures.oom_kills import OomCounters, OomKills
from paceline.launch.layout import Layout
from paceline.launch.loop import READ, Loop
from paceline.launch.output.forwarding import Channel, Forwarder
from paceline.launch.wire import Decoder
from paceline.waits import Page


class Life:
    """What is known of the ranks of ``layout``.

    Args:
        on_failure: called when a rank has failed; with every failure.

    Attributes:
        stop_at_s: when the launcher asked the ranks to stop; infinite before.
        explained_by_s: until when another host may tell what made ranks here fail.
        reports: what ranks have told, by local rank.
        pages: on which they tell what they wait for, by local rank.
        is_open: it has not been closed.
    """

    def __init__(self, layout: Layout, loop: Loop, forwarder: Forwarder, on_failure: Callable[[], None]) -> None:
        self.layout = layout
        self.stop_at_s = math.inf
        self.explained_by_s = -math.inf
        self.reports: dict[int, Report] = {}
        self.pages: dict[int, Page] = {}
        self.is_open = True
        self._loop = loop
        self._forwarder = forwarder
        self._on_failure = on_failure
        self._pids: dict[int, int] = {}
        self._report_fds: dict[int, int] = {}
        self._decoders = {local_rank: Decoder() for local_rank in range(layout.num_ranks)}
        self._ended: dict[int, tuple[int, float]] = {}  # by local rank: code, moment
        self._oom_counters = OomCounters()
        self._oom_kills: dict[int, OomKills] = {}  # by local rank, of those that have failed

    @property
    def has_begun(self) -> bool:
        """Whether any rank has been born."""
        return bool(self._pids)

    @property
    def has_ended(self) -> bool:
        """Whether no rank runs any more."""
        return len(self._ended) == self.layout.num_ranks

    @property
    def is_stopping(self) -> bool:
        return self.stop_at_s < math.inf

    def attach(self, local_rank: int, channels: list[Channel], report: int, page: Page) -> None:
        """Listen to a rank that is about to be born."""
        self.pages[local_rank] = page
        for channel in channels:
            self._forwarder.attach(channel)
        self._report_fds[local_rank] = report
        self._loop.watch(report, READ, partial(self._read_report, local_rank))

    def born(self, local_rank: int, pid: int) -> None:
        self._pids[local_rank] = pid

    def ended(self, local_rank: int, code: int, at_s: float) -> None:
        self._ended[local_rank] = (code, at_s)
        self._forwarder.rank_ended(self.layout.first_rank + local_rank)
        self._read_report(local_rank)  # it was written before the end, but may not have been looked at yet
        if code != 0 and local_rank not in self.reports:
            self._note_failure(local_rank, code)

    def lost(self, local_ranks: Iterable[int] | None = None) -> None:
        """These ranks are out of reach, or, with the fork server, all that had not ended: they count as killed."""
        now = time.monotonic()
        self.stop_at_s = min(self.stop_at_s, now)
        for local_rank in range(self.layout.num_ranks) if local_ranks is None else local_ranks:
            if local_rank not in self._ended:
                self._ended[local_rank] = (-signal.SIGKILL, now)
                self._forwarder.rank_ended(self.layout.first_rank + local_rank)

    def oom_kills(self) -> OomKills:
        """What the kernel has counted in this life."""
        return self._oom_counters.since()

    def living(self) -> Iterator[tuple[int, int]]:
        """Local rank and pid of each that runs."""
        return ((rank, pid) for rank, pid in self._pids.items() if rank not in self._ended)

    def signal_group(self, local_rank: int, signum: signal.Signals) -> bool:
        """Signal a rank and what it has started; false where it is another user's by now, and hears nothing."""
        if local_rank in self._pids and local_rank not in self._ended:
            try:
                os.killpg(self._pids[local_rank], signum)
            except ProcessLookupError:
                pass
            except PermissionError:
                return False
        return True

    def endings(self) -> list[Ending]:
        """How the ranks have ended, in order."""
        return [self._ending_of(local_rank) for local_rank in range(self.layout.num_ranks)]

    def endings_so_far(self) -> list[Ending]:
        """How those have ended that have, or have said that they will."""
        endings = []
        for local_rank in range(self.layout.num_ranks):
            report = self.reports.get(local_rank)
            if local_rank in self._ended:
                endings.append(self._ending_of(local_rank))
            elif report is not None:
                endings.append(self._ending(local_rank, report.code, report.at_s, was_stopped=False))
        return endings

    def close(self) -> None:
        self.is_open = False
        for page in self.pages.values():
            page.close()
        for fd in self._report_fds.values():
            self._loop.unwatch(fd)
            os.close(fd)
        self._report_fds.clear()

    def _read_report(self, local_rank: int) -> None:
        fd = self._report_fds[local_rank]
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.unwatch(fd)
        for message in self._decoders[local_rank].feed(data):
            report = self.reports[local_rank] = Report(**message)
            self._note_failure(local_rank, report.code)

    def _note_failure(self, local_rank: int, code: int) -> None:
        if not is_early_stop(code, self.reports.get(local_rank)):
            self._oom_kills[local_rank] = self.oom_kills()
            self._on_failure()

    def _ending_of(self, local_rank: int) -> Ending:
        code, at_s = self._ended[local_rank]
        report = self.reports.get(local_rank)
        if report is not None and code < 0 and at_s >= self.stop_at_s:
            code = report.code  # killed by the launcher while it was ending
        failed_at_s = report.at_s if report is not None else at_s
        return self._ending(local_rank, code, at_s, was_stopped=failed_at_s >= self.stop_at_s)

    def _ending(self, local_rank: int, code: int, at_s: float, *, was_stopped: bool) -> Ending:
        report = self.reports.get(local_rank)
        return Ending(
            self.layout.first_rank + local_rank,
            code,
            at_s,
            report,
            was_stopped,
            self._oom_kills.get(local_rank, OomKills()),
            stopped_early=is_early_stop(code, report),
        )
