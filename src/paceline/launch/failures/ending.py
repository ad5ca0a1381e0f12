"""How ranks have ended, and which of them failed first. Pure functions of what was seen.

The first failure is the one that explains the others, so a rank that died without a word comes before peers that
merely raised at about the same time: they raised because the connection to it broke.
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.launch.failures.oom_kills import OomKills

# How far apart a death and the exceptions that it causes in other ranks are seen.
SETTLE_S = 0.2


@dataclass(frozen=True)
class Report:
    """What a rank told before it ended.

    Args:
        kind: "raised", "exit" (``sys.exit`` with other than success) or "interrupt" (KeyboardInterrupt).
        code: the exit code that follows from it, or minus the signal.
        at_s: when, on the clock that all processes of a host share.
        summary: one line.
        text: the traceback as python prints it, or the message given to ``sys.exit``.
    """

    kind: str
    code: int
    at_s: float
    summary: str
    text: str


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Args:
        code: its exit code, or minus the signal that killed it.
        at_s: when it was seen to have ended.
        report: what it told before, if anything.
        was_stopped: the launcher had asked it to stop before its failure was known.
        oom_kills: what the kernel had counted by then of its life.
        host: where it ran, if that is to be told.
        stopped_early: it has ended with EX_TEMPFAIL, as a script does that makes room and is to go on another time.
            To the launcher that is no failure.
    """

    rank: int
    code: int
    at_s: float
    report: Report | None = None
    was_stopped: bool = False
    oom_kills: OomKills = field(default_factory=OomKills)
    host: str = ""
    stopped_early: bool = False

    @property
    def failed(self) -> bool:
        return (self.code != 0 or self.report is not None) and not self.stopped_early

    @property
    def failed_at_s(self) -> float:
        return self.at_s if self.report is None else self.report.at_s

    @property
    def exit_status(self) -> int:
        """As a shell gives it: 128 plus the number of the signal."""
        return 128 - self.code if self.code < 0 else self.code or 1

    @property
    def is_mere_stop(self) -> bool:
        """Whether it did nothing but what the launcher had asked for."""
        return self.was_stopped and (self.report is None or self.report.kind != "raised")

    @property
    def cause(self) -> str | None:
        """In a word: "stopped" by the launcher, its report's kind, "oom", "signal" or "exit"; None: no failure."""
        if not self.failed or self.is_mere_stop:
            return "stopped" if self.failed else None
        if self.report is not None:
            return self.report.kind
        if self.code >= 0:
            return "exit"
        return "oom" if self.code == -signal.SIGKILL and self.oom_kills.were_likely else "signal"


def is_early_stop(code: int, report: Report | None) -> bool:
    """Whether a rank that has ended so has made room."""
    return code == os.EX_TEMPFAIL and (report is None or report.kind == "exit")


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The failure to blame; None if no rank failed by itself."""
    own = sorted((e for e in endings if e.failed and not e.was_stopped), key=lambda e: e.failed_at_s)
    if not own:
        return None
    wordless = [e for e in own if e.report is None and e.failed_at_s - own[0].failed_at_s <= SETTLE_S]
    return (wordless or own)[0]
