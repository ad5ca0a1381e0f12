"""Traces in Chrome's format, for https://ui.perfetto.dev or chrome://tracing: one rank's, and those of several in one.

The invariant: a file never holds half a trace.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paceline.errors import TimelineError
from paceline.timeline.events import Event

_BACKWARD, _CONTROL, _FIRST_BUCKET = 0, 1, 2  # threads


def chrome_trace(backwards: Iterable[Sequence[Event]], *, wall_offset_s: float) -> dict[str, Any]:
    """The events of ``backwards``, with a process for each rank and a thread for each bucket."""
    entries: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], str] = {}
    for events in backwards:
        for entry, thread in _entries(events):
            entries.append(entry)
            threads[entry["pid"], entry["tid"]] = thread
    for rank in sorted({rank for rank, _ in threads}):
        entries.append(_label("process_name", rank, 0, name=f"rank {rank}"))
        entries.append(_label("process_sort_index", rank, 0, sort_index=rank))
    for (rank, number), name in sorted(threads.items()):
        entries.append(_label("thread_name", rank, number, name=name))
        entries.append(_label("thread_sort_index", rank, number, sort_index=number))
    clock = {"clock": "perf_counter", "host": _host(), "wall_offset_s": wall_offset_s}
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": clock}


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
    write_trace({**traces[0], "traceEvents": merged}, pathlib.Path(into))


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


def write_trace(trace: dict[str, Any], path: pathlib.Path) -> None:
    """All of it or nothing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(trace))
        draft.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
