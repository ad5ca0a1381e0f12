"""How a life has ended on all hosts together: which rank failed first, and the words for it.

Each host's moments are by a clock of its own. What a message took on its way is never less than nothing, so the least
difference that was ever seen between sending and hearing tells best what to add to them.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from paceline.launch.failures.ending import Ending, Report, first_failure
from paceline.launch.failures.oom_kills import OomKills
from paceline.launch.failures.words import as_json, describe
from paceline.launch.wire import Message


class Tally:
    """What the hosts have told of one life after another.

    Args:
        names: of the hosts, by number.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._clocks = [math.inf for _ in names]  # what to add to a host's moments
        self._endings: dict[int, list[Ending]] = {}
        self._logs: dict[int, str] = {}

    def note_clock(self, node: int, now_s: float) -> None:
        """A message of that host has just come, which it has sent at ``now_s``."""
        self._clocks[node] = min(self._clocks[node], time.monotonic() - now_s)

    def add(self, node: int, endings: Sequence[Message], logs: str) -> None:
        """A host's ranks have ended; their output was kept in its folder ``logs``, if that is not empty."""
        self._endings[node] = [_ending_from(told) for told in endings]
        self._logs[node] = logs

    def clear(self) -> None:
        """The next life begins."""
        self._endings.clear()
        self._logs.clear()

    @property
    def is_empty(self) -> bool:
        return not self._endings

    def first(self) -> Ending | None:
        """The failure to blame."""
        return first_failure(self._by_rank())

    def describe(self) -> str | None:
        """What has failed, the first last; None if no rank has failed by itself."""
        endings = self._by_rank()
        first = first_failure(endings)
        return None if first is None else describe(endings, first, logs=self._spell_logs(first.host))

    def as_json(self, exit_status: int, num_restarts: int) -> str:
        """The verdict for programs."""
        first = self.first()
        logs = self._spell_logs(first.host if first is not None else self._names[0])
        return as_json(self._by_rank(), exit_status, host="", logs=logs, num_restarts=num_restarts)

    def _by_rank(self) -> list[Ending]:
        return [
            _moved(ending, self._clocks[node], self._names[node])
            for node in sorted(self._endings)
            for ending in self._endings[node]
        ]

    def _spell_logs(self, host: str) -> str:
        logs = self._logs.get(self._names.index(host), "")
        return f"{logs} on {host}" if logs else ""


def _ending_from(told: Message) -> Ending:
    report = told["report"] and Report(**told["report"])
    return Ending(**{**told, "report": report, "oom_kills": OomKills(**told["oom_kills"])})


def _moved(ending: Ending, shift_s: float, host: str) -> Ending:
    """With moments of this host's clock."""
    report = ending.report and replace(ending.report, at_s=ending.report.at_s + shift_s)
    return replace(ending, at_s=ending.at_s + shift_s, report=report, host=host)
