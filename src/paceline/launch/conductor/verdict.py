"""How a job on several hosts has ended: what is said of it, once for all of them, and the exit code."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import LaunchError
from paceline.launch.conductor.lines import Lines
from paceline.launch.conductor.tally import Tally
from paceline.launch.output.plumbing import Outlet, why_unwritable
from paceline.launch.wire import Message


@dataclass(frozen=True)
class Cause:
    """Why a life cannot go on.

    Args:
        host: where it began.
        failure: what its launcher tells of its ranks.
        why: where the host itself has failed.
    """

    host: str
    failure: Message | None = None
    why: str = ""


@dataclass
class Course:
    """What has befallen the job so far.

    Attributes:
        cause: why this life cannot go on, if it cannot.
        num_restarts: how often all ranks have started again.
        ending_signal: by which the user has ended it.
        had_failed: ranks were being stopped already when that came.
        is_hurried: the user has no more patience.
        has_given_up: agents that have not answered are not waited for.
        output_closed: nobody reads what ranks say.
    """

    cause: Cause | None = None
    num_restarts: int = 0
    ending_signal: signal.Signals | None = None
    had_failed: bool = False
    is_hurried: bool = False
    has_given_up: bool = False
    output_closed: bool = False

    @property
    def is_wanted(self) -> bool:
        return self.ending_signal is None and not self.output_closed


class Verdict:
    """Of one job.

    Args:
        say: prints a text, in red where that is wanted and the output is a terminal.
        report_path: where it is written as JSON; empty for nowhere.
    """

    def __init__(self, course: Course, lines: Lines, tally: Tally, say: Callable[..., None], report_path: str) -> None:
        self._course = course
        self._lines = lines
        self._tally = tally
        self._say = say
        self._report_path = report_path

    def conclude(self, outlets: Sequence[Outlet]) -> int:
        """Say how it ended, and with what exit code.

        Raises:
            LaunchError: no rank is to blame.
        """
        course, cause = self._course, self._course.cause
        if course.ending_signal is not None:
            self._tell_interrupt(course.ending_signal)
            status = 128 + course.ending_signal
        elif course.output_closed:
            if why := why_unwritable(outlets):
                raise LaunchError(why)
            status = 128 + signal.SIGPIPE
        elif cause is None:
            status = max(int(over["exit_status"]) for over in self._lines.over.values())
        elif cause.failure is None:
            raise LaunchError(f"host {cause.host}: {cause.why}; the ranks of the other hosts were stopped")
        else:
            first = self._tally.first()
            status = cause.failure["exit_status"] if first is None else first.exit_status
            self._say(self.describe_failure(), in_color=True)
        if self._report_path and not self._tally.is_empty:
            self._write_report(status)
        return status

    def conclude_early(self) -> int:
        """The same, where the user wants no more before anything was started."""
        if self._course.ending_signal is None:
            return 128 + signal.SIGPIPE
        self._say(f"paceline: interrupted by {self._course.ending_signal.name}, nothing was started\n")
        return 128 + self._course.ending_signal

    def describe_failure(self) -> str:
        """How this life has failed, all hosts together; if no rank has failed by itself, what its host told."""
        told, cause = self._tally.describe(), self._course.cause
        if told is None and cause is not None and cause.failure is not None:
            told = f"paceline: on {cause.host}:\n{cause.failure['text']}"
        return told or ""

    def _tell_interrupt(self, signum: signal.Signals) -> None:
        gone = [line.host.name for line in self._lines.unheard()]
        if gone:
            self._say(f"paceline: {', '.join(gone)} could not be heard any more; what runs there ends by itself\n")
        if self._course.had_failed:
            self._say(self.describe_failure(), in_color=True)
        self._say(f"paceline: interrupted by {signum.name}, all ranks have ended\n")

    def _write_report(self, status: int) -> None:
        try:
            with open(self._report_path, "w") as file:
                file.write(self._tally.as_json(status, self._course.num_restarts))
        except OSError as error:
            self._say(f"paceline: the report {self._report_path} cannot be written: {error.strerror}\n")
