"""A timeline: an observer that keeps the events of the last rounds."""

import itertools
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.errors import TimelineError
from paceline.timeline.events import Event
from paceline.timeline.overlap import Measured, measure
from paceline.timeline.traces import chrome_trace, write_trace


class Timeline:
    """Keeps the events of the last rounds; an observer. The events of several ranks may be put into one.

        timeline = Timeline()
        model.observe(timeline)
        ...
        timeline.save("trace.json")  # for https://ui.perfetto.dev or chrome://tracing

    Args:
        max_rounds: of each rank, so many are kept.
    Raises:
        TimelineError: ``max_rounds`` is not positive.

    Attributes:
        wall_offset_s: what to add to an event's time for seconds since the epoch.
    """

    def __init__(self, max_rounds: int = 100) -> None:
        if max_rounds < 1:
            raise TimelineError(f"max_rounds={max_rounds}: expected how many rounds to keep, at least 1.")
        self.max_rounds = max_rounds
        self.wall_offset_s = time.time() - time.perf_counter()
        self._rounds: dict[int, dict[int, list[Event]]] = {}  # by rank and number

    def __call__(self, event: Event) -> None:
        """Keep ``event``, and forget its rank's oldest round if there are too many."""
        rounds = self._rounds.setdefault(event.rank, {})
        if event.round not in rounds:
            rounds[event.round] = []
            if len(rounds) > self.max_rounds:
                del rounds[next(iter(rounds))]
        rounds[event.round].append(event)

    def __len__(self) -> int:
        return sum(len(events) for events in self._all())

    def __iter__(self) -> Iterator[Event]:
        """All events, rank by rank, as they came."""
        return itertools.chain.from_iterable(self._all())

    def _all(self) -> Iterator[list[Event]]:
        for rank in sorted(self._rounds):
            yield from self._rounds[rank].values()

    def clear(self) -> None:
        self._rounds.clear()

    def measure(self, rank: int | None = None) -> Measured | None:
        """How well ``rank`` overlapped; None where no round of it has ended.

        Args:
            rank: by default the lowest there is.
        """
        if rank is None:
            rank = min(self._rounds, default=-1)
        told = self._rounds.get(rank, {}).values()
        return measure([backward for events in told for backward in _backwards(events)])

    def to_chrome_trace(self) -> dict[str, Any]:
        """The events in Chrome's trace format, with a process for each rank and a thread for each bucket.

        What lasts is a complete event (``"ph": "X"``), what does not an instant (``"i"``); times are in microseconds.
        """
        backwards = [backward for events in self._all() for backward in _backwards(events)]
        return chrome_trace(backwards, wall_offset_s=self.wall_offset_s)

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Write the trace as JSON, so that ``path`` never holds half of one."""
        write_trace(self.to_chrome_trace(), pathlib.Path(path))


def _backwards(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """Apart from one another, those that had the same number, of which all but the last have failed."""
    starts = [position for position, event in enumerate(events) if event.kind == "round began"]
    for start, end in itertools.pairwise([0, *starts[1:], len(events)]):
        yield events[start:end]
