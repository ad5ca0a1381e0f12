"""What happens in a backward, as events, and a timeline that keeps them.

An *observer* is anything that can be called with an `Event`. A reducer calls it, a `Timeline` is one:

    round began    a backward has come to the model
    bucket ready   the last gradient that was expected in a bucket is there; not told where one never came
    launched       a bucket's reduction begins
    done           it has ended on this rank, with the average
    control        the small message beside the gradients, from when it is sent until it has been heard
    waited         from the end of backward's own work until averages and control message are there: the exposed wait
    late           a bucket is reduced once more, since on some rank gradients came after the launch
    unplanned      gradients are averaged that the round's plan did not have
    replanned      from the next round on, the buckets are others
    round ended    the averages are the parameters' gradients

[Note: whose time] Times are seconds of ``time.perf_counter``, which on Linux all processes of a host share. To place an
event in wall time, add ``time.time() - time.perf_counter()``; a timeline keeps that difference as
``wall_offset_s``. When a reduction has ended is told by its future where the backend has one (Gloo, mpi, hooks): then
``done`` is when that was called. In shared memory it is when the reducer looked and found it ended, at a later launch
or at the end of backward: no later than told, and maybe earlier. A sparse bucket's messages are all sent in the wait,
so it counts as launched only there.

On CUDA ``launched``, ``done``, ``waited``, ``late`` and ``unplanned`` are when the *device* got there. That is measured
by CUDA events, which the host reads when they have passed and never waits for; so an event may reach its observer a
round later, though always in order. All other kinds are when the host got there.

The invariant: an event is a plain value, so it can be pickled, sent to another rank, and kept by a timeline there.
"""

import contextlib
import itertools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from paceline.errors import TimelineError

Kind: TypeAlias = Literal[
    "round began",
    "bucket ready",
    "launched",
    "done",
    "control",
    "waited",
    "late",
    "unplanned",
    "replanned",
    "round ended",
]


class Event(NamedTuple):
    """Something that happened in a round.

    Attributes:
        time_s: when, or when it began. [Note: whose time]
        rank: of the process, in the whole job.
        round: its number, from 0. A backward that failed, or brought no gradient, lends its number to the next.
        bucket: its number in the round's plan; None where it is about none, or about all.
        size_bytes: of the gradients, or of the control message; of a sparse gradient as if it were dense.
        params: names of the parameters it is about, in the order in which they lie in the bucket. Of ``late``, those
            whose gradients came late on this rank.
        duration_s: 0.0 for what has none.
    """

    kind: Kind
    time_s: float
    rank: int
    round: int
    bucket: int | None = None
    size_bytes: int = 0
    params: tuple[str, ...] = ()
    duration_s: float = 0.0

    @property
    def end_s(self) -> float:
        return self.time_s + self.duration_s


Observer: TypeAlias = Callable[[Event], object]


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
        told = itertools.chain.from_iterable(map(_backwards, self._rounds.get(rank, {}).values()))
        rounds = [events for events in told if any(event.kind == "round ended" for event in events)]
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

    def to_chrome_trace(self) -> dict[str, Any]:
        """The events in Chrome's trace format, with a process for each rank and a thread for each bucket.

        What lasts is a complete event (``"ph": "X"``), what does not an instant (``"i"``); times are in microseconds.
        """
        entries: list[dict[str, Any]] = []
        threads: dict[tuple[int, int], str] = {}
        for events in itertools.chain.from_iterable(map(_backwards, self._all())):
            for entry, thread in _entries(events):
                entries.append(entry)
                threads[entry["pid"], entry["tid"]] = thread
        for rank in sorted({rank for rank, _ in threads}):
            entries.append(_label("process_name", rank, 0, name=f"rank {rank}"))
            entries.append(_label("process_sort_index", rank, 0, sort_index=rank))
        for (rank, number), name in sorted(threads.items()):
            entries.append(_label("thread_name", rank, number, name=name))
            entries.append(_label("thread_sort_index", rank, number, sort_index=number))
        clock = {"clock": "perf_counter", "host": _host(), "wall_offset_s": self.wall_offset_s}
        return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": clock}

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Write the trace as JSON, so that ``path`` never holds half of one."""
        _write(self.to_chrome_trace(), pathlib.Path(path))


def merge_traces(paths: "Iterable[str | os.PathLike[str]]", into: "str | os.PathLike[str]") -> None:
    """Make one trace of those that several ranks have saved.

    Ranks of one host share a clock. Those of another host are placed by wall time, as well as the hosts' clocks agree.

    Raises:
        TimelineError: a file is no trace that ``Timeline.save`` has written, or there is none.
    """
    traces = [_read(pathlib.Path(path)) for path in paths]
    if not traces:
        raise TimelineError("merge_traces got no files; expected those that the ranks have saved.")
    first = traces[0]["otherData"]
    merged: list[dict[str, Any]] = []
    for trace in traces:
        clock = trace["otherData"]
        ahead_s = 0.0 if clock["host"] == first["host"] else clock["wall_offset_s"] - first["wall_offset_s"]
        merged += [
            entry | ({"ts": entry["ts"] + ahead_s * 1e6} if "ts" in entry else {}) for entry in trace["traceEvents"]
        ]
    _write({**traces[0], "traceEvents": merged}, pathlib.Path(into))


# -- traces --------------------------------------------------------------------------------------------------------

_BACKWARD, _CONTROL, _FIRST_BUCKET = 0, 1, 2  # threads


def _entries(events: Sequence[Event]) -> Iterator[tuple[dict[str, Any], str]]:
    """One backward's entries in the trace, and the name of each one's thread."""
    began, ends = None, {event.bucket: event for event in events if event.kind == "done"}
    ready = {event.bucket: event for event in events if event.kind == "bucket ready"}
    for event in events:
        thread, name = _BACKWARD, "backward"
        if event.bucket is not None:
            thread, name = _FIRST_BUCKET + event.bucket, f"bucket {event.bucket}"
        match event.kind:
            case "round began":
                began = event
            case "round ended":
                if began is not None:
                    yield _entry(began, thread, f"round {event.round}", began.time_s, event.time_s), name
            case "launched":
                before = ready.get(event.bucket)
                if before is not None:
                    yield _entry(before, thread, "packed", before.time_s, event.time_s), name
                if event.bucket in ends:
                    yield _entry(event, thread, "in flight", event.time_s, ends[event.bucket].time_s), name
                else:
                    yield _entry(event, thread, "launched, and never done", event.time_s), name
            case "done":
                pass
            case "control":
                yield _entry(event, _CONTROL, "control", event.time_s, event.end_s), "control message"
            case "waited" | "late" | "unplanned":
                yield _entry(event, thread, event.kind, event.time_s, event.end_s), name
            case _:
                yield _entry(event, thread, event.kind, event.time_s), name


def _entry(event: Event, thread: int, name: str, begin_s: float, end_s: float | None = None) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "cat": "paceline", "pid": event.rank, "tid": thread, "ts": begin_s * 1e6}
    entry |= {"ph": "i", "s": "t"} if end_s is None else {"ph": "X", "dur": max(0.0, end_s - begin_s) * 1e6}
    args: dict[str, Any] = {"round": event.round, "bytes": event.size_bytes}
    if event.params:
        args |= {"parameters": len(event.params), "first": event.params[0], "last": event.params[-1]}
    return {**entry, "args": args}


def _label(kind: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": args}


def _host() -> str:
    """Of which clock the times are: that of one run of one machine."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        trace: dict[str, Any] = json.loads(path.read_text())
        _ = trace["traceEvents"], trace["otherData"]["host"], trace["otherData"]["wall_offset_s"]
    except (ValueError, LookupError, TypeError) as error:
        raise TimelineError(f"{path}: expected a trace as Timeline.save writes it, but it is none.") from error
    return trace


def _write(trace: dict[str, Any], path: pathlib.Path) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(trace))
        draft.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


# -- intervals -----------------------------------------------------------------------------------------------------

_Span: TypeAlias = tuple[float, float]


def _backwards(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """Apart from one another, those that had the same number, of which all but the last have failed."""
    starts = [position for position, event in enumerate(events) if event.kind == "round began"]
    for start, end in itertools.pairwise([0, *starts[1:], len(events)]):
        yield events[start:end]


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
