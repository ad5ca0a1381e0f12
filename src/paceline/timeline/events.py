"""What happens in a backward, as events.

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

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

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
