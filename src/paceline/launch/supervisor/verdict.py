"""How a launch has ended: what is said of it, last, and the exit code."""

import os
import signal
import socket

from paceline.errors import LaunchError
from paceline.launch.failures.ending import first_failure
from paceline.launch.failures.words import as_json, describe, describe_early_stop, describe_interrupt
from paceline.launch.lives.life import Life
from paceline.launch.spec.launch import LaunchSpec
from paceline.launch.supervisor.audience import Audience
from paceline.launch.supervisor.course import Course


class Verdict:
    """Of the launch that ``spec`` asks for.

    Args:
        logs: the folder in which the ranks' output is kept; empty where it is not.

    Attributes:
        exit_code: None until it is known.
    """

    def __init__(self, spec: LaunchSpec, audience: Audience, course: Course, logs: str) -> None:
        self._spec = spec
        self._audience = audience
        self._course = course
        self._logs = logs
        self.exit_code: int | None = None

    def conclude(self, life: Life | None, num_restarts: int) -> None:
        """Say how it ended.

        Args:
            life: the last one; None where there was none.

        Raises:
            LaunchError: no rank is to blame.
        """
        course = self._course
        if course.ending_signal is not None:
            self._tell_interrupt(course.ending_signal, life)
            code = 128 + course.ending_signal
        elif course.output_closed:
            code = 128 + signal.SIGPIPE
        elif course.broken is not None or life is None:
            raise LaunchError(course.broken or "no rank was started")
        else:
            code = self._judge(life)
        if self._spec.report_path and life is not None:
            self._write_report(life, code, num_restarts)
        self.exit_code = code

    def tell_failure(self, life: Life) -> None:
        """Of several launchers that are read together, the one whose rank has failed first tells: it knows most."""
        if not self._spec.nodes.shares_output:
            self._audience.sum_up(self._describe(life), in_color=True)
        elif self._course.peer_failure is None:
            self._audience.say(f"paceline: on {socket.gethostname()}:\n{self._describe(life)}", in_color=True)

    def _judge(self, life: Life) -> int:
        """The exit code to which the ranks' own come, once they are told."""
        endings, peer_failure = life.endings(), self._course.peer_failure
        first = first_failure(endings)
        if first is not None or peer_failure is not None:
            self.tell_failure(life)
            own = 0 if first is None else first.exit_status
            return own if peer_failure is None else int(peer_failure["exit_status"])
        early = [ending.rank for ending in endings if ending.stopped_early]
        if early:
            self._audience.say(describe_early_stop(early))
        return os.EX_TEMPFAIL if early else 0

    def _tell_interrupt(self, signum: signal.Signals, life: Life | None) -> None:
        reports = {} if life is None else life.reports
        first_rank = 0 if life is None else life.layout.first_rank
        self._audience.say(describe_interrupt({first_rank + rank: report for rank, report in reports.items()}))
        if self._course.had_failed and life is not None:
            self.tell_failure(life)
        how = f"; {self._course.broken}" if self._course.broken else ", all ranks have ended"
        self._audience.sum_up(f"paceline: interrupted by {signum.name}{how}\n")

    def _describe(self, life: Life) -> str:
        """How a life has failed; where another host failed first, that."""
        if self._course.peer_failure is not None:
            return f"paceline: on {self._course.peer_failure['host']}:\n{self._course.peer_failure['text']}"
        endings = life.endings()
        first = first_failure(endings)
        return "" if first is None else describe(endings, first, logs=self._logs)

    def _write_report(self, life: Life, code: int, num_restarts: int) -> None:
        host = socket.gethostname()
        text = as_json(life.endings(), code, host=host, logs=self._logs, num_restarts=num_restarts)
        try:
            with open(self._spec.report_path, "w") as file:
                file.write(text)
        except OSError as error:
            self._audience.say(f"paceline: the report {self._spec.report_path} cannot be written: {error.strerror}\n")
