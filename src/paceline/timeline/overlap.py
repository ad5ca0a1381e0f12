"""How much of the communication lay beside the computation.

The invariant: time in which several reductions are under way counts once.
"""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from paceline.timeline.events import Event, Kind

_Span: TypeAlias = tuple[float, float]


class Measured(NamedTuple):
    """How well one rank's rounds hid their communication; times are medians over the rounds.

    Attributes:
        num_rounds: how many have ended.
        in_flight_s: for how long any reduction was under way in a round.
        exposed_s: how much longer a backward took for it, after its own work.
        overlap: the share of ``in_flight_s`` that lay beside the computation; None where nothing was under way.
    """

    num_rounds: int
    in_flight_s: float
    exposed_s: float
    overlap: float | None


def measure(rounds: Sequence[Sequence[Event]]) -> Measured | None:
    """Of one rank's events, round by round; None where no round has ended."""
    rounds = [events for events in rounds if any(event.kind == "round ended" for event in events)]
    if not rounds:
        return None
    flights = [_merged([*_flights(events), *_spans(events, "late", "unplanned")]) for events in rounds]
    waits = [_merged(_spans(events, "waited", "late", "unplanned")) for events in rounds]
    overlaps = [
        1 - _length(_common(flight, wait)) / _length(flight)
        for flight, wait in zip(flights, waits, strict=True)
        if _length(flight) > 0
    ]
    return Measured(
        len(rounds),
        statistics.median(map(_length, flights)),
        statistics.median(map(_length, waits)),
        statistics.median(overlaps) if overlaps else None,
    )


def _flights(events: Sequence[Event]) -> Iterator[_Span]:
    launched = {event.bucket: event.time_s for event in events if event.kind == "launched"}
    for event in events:
        if event.kind == "done" and event.bucket in launched:
            yield launched[event.bucket], event.time_s


def _spans(events: Sequence[Event], *kinds: Kind) -> Iterator[_Span]:
    return ((event.time_s, event.end_s) for event in events if event.kind in kinds)


def _merged(spans: Iterable[_Span]) -> list[_Span]:
    """Their union, in order, in pieces that do not touch."""
    pieces: list[_Span] = []
    for begin, end in sorted(spans):
        if pieces and begin <= pieces[-1][1]:
            pieces[-1] = pieces[-1][0], max(end, pieces[-1][1])
        elif end > begin:
            pieces.append((begin, end))
    return pieces


def _common(ones: Sequence[_Span], others: Sequence[_Span]) -> list[_Span]:
    pieces = ((max(a, c), min(b, d)) for (a, b), (c, d) in itertools.product(ones, others))
    return [(begin, end) for begin, end in pieces if end > begin]


def _length(pieces: Iterable[_Span]) -> float:
    return sum(end - begin for begin, end in pieces)
