"""What a reducer tells its observers, and when.

The invariant: observers hear of a round in its order, in the thread that runs it, and cannot spoil it. What they raise
is kept until the round has ended. No event makes the host wait for a device. [Note: whose time]
"""

import time
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch

from paceline.errors import ObserverError
from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.buckets.sparse import SparseBucket
from paceline.parallel.reducer.clock import Clock, Moment
from paceline.timeline import Event, Kind, Observer


@dataclass
class Counts:
    """What has happened so far: rounds, new plans, buckets reduced again, rounds with gradients that no plan had."""

    rounds: int = 0
    replans: int = 0
    late: int = 0
    unplanned: int = 0


class _Facts(NamedTuple):
    """What does not change about a bucket while it is planned."""

    names: tuple[str, ...]
    size_bytes: int


class _Told(NamedTuple):
    """An event whose times may not be known yet."""

    event: Event
    begin: Moment
    end: Moment


class _Flight:
    """A reduction under way. It knows no bucket, since a work that never ends would keep that alive."""

    def __init__(self, clock: Clock) -> None:
        self.end: Moment | None = None
        self._clock = clock

    def land(self, _: object = None) -> None:
        """Its reduction has ended; called once or more, in any thread."""
        if self.end is None:
            self.end = self._clock.now()


class Witness:
    """Tells observers of a reducer's rounds. Without any, as at first, it does nothing, at next to no cost.

    Args:
        device: on which the gradients are.
        rank: of this process, in the whole job.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._observers: Sequence[Observer] = ()
        self._clock = Clock(device)
        self._rank = rank
        self._round = 0
        self._is_in_round = False
        self._plan: Sequence[Bucket] = ()
        self._facts: dict[int, _Facts] = {}  # by a bucket's number in the plan
        self._awaited: list[Bucket] = []  # for whose gradients this rank waits
        self._flights: dict[int, _Flight] = {}
        self._control_sent_s = 0.0
        self._last: Moment = 0.0  # when the wait for the next bucket begins
        self._backward_ended: Moment = 0.0
        self._late: tuple[tuple[str, ...], Moment] = (), 0.0
        self._untold: deque[_Told] = deque()
        self._error: tuple[str, Event, Exception] | None = None

    def observe(self, observers: Sequence[Observer]) -> None:
        """Tell these of the rounds that begin from now on, and no others any more. Waits for the device.

        Raises:
            ObserverError: one of those before has raised something.
        """
        if self._observers or observers:
            self._clock.synchronize()
        self._tell_what_is_known()
        self._untold.clear()
        self._observers, self._is_in_round = observers, False
        self._plan, self._awaited = (), []
        self._flights.clear()
        self.raise_error()

    def begin(self, number: int, plan: Sequence[Bucket], names: Sequence[str]) -> None:
        """A round, whose buckets have been prepared."""
        if not self._observers:
            return
        self._round, self._is_in_round = number, True
        if plan is not self._plan:
            self._plan, self._facts = plan, {bucket.number: _facts_of([bucket], names) for bucket in plan}
        self._awaited = [bucket for bucket in plan if bucket.expected]
        self._flights.clear()
        self._tell(
            "round began", time.perf_counter(), size_bytes=sum(facts.size_bytes for facts in self._facts.values())
        )

    def look(self, arrived: Set[int]) -> None:
        """Notice what has happened: buckets that are complete, reductions that have ended."""
        if not self._is_in_round:
            return
        now_s = time.perf_counter()
        for bucket in [bucket for bucket in self._awaited if bucket.is_complete(arrived)]:
            self._awaited.remove(bucket)
            self._tell_of(bucket, "bucket ready", now_s)
        for number, flight in self._flights.items():
            if flight.end is None and self._plan[number].has_ended():
                flight.land()

    def now(self) -> Moment:
        """For those who begin something that is told when it is over."""
        return self._clock.now() if self._is_in_round else 0.0

    def sent(self, bucket: Bucket, moment: Moment) -> None:
        """Its reduction has begun, at ``moment``."""
        if not self._is_in_round:
            return
        flight = self._flights[bucket.number] = _Flight(self._clock)
        if not isinstance(bucket, SparseBucket):
            self._tell_of(bucket, "launched", moment)
            bucket.when_ended(flight.land)

    def sent_control(self) -> None:
        if not self._is_in_round:
            return
        self._control_sent_s, self._last = time.perf_counter(), self._clock.now()

    def begin_wait(self) -> None:
        """Backward has computed all gradients."""
        self._backward_ended = self.now()

    def waited_for(self, bucket: Bucket) -> None:
        """Its average is there."""
        if not self._is_in_round:
            return
        now = self._clock.now()
        if isinstance(bucket, SparseBucket):
            self._tell_of(bucket, "launched", self._last)
        flight = self._flights.pop(bucket.number, None)
        self._tell_of(bucket, "done", now if flight is None or flight.end is None else flight.end)
        self._last = now

    def heard(self, size_bytes: int) -> None:
        """A control message."""
        sent_s, now_s = self._control_sent_s, time.perf_counter()
        self._tell("control", sent_s, now_s, size_bytes=size_bytes)

    def end_wait(self) -> None:
        self._tell("waited", self._backward_ended, self.now())

    def begin_late(self, bucket: Bucket, names: Sequence[str]) -> None:
        """A bucket is to be reduced once more."""
        if not self._is_in_round:
            return
        late = tuple(names[member.index] for member in bucket.members if member.param.grad is not None)
        self._late = late, self._clock.now()

    def end_late(self, bucket: Bucket) -> None:
        if self._is_in_round:
            (names, begin), size_bytes = self._late, self._facts[bucket.number].size_bytes
            self._tell("late", begin, self._clock.now(), bucket=bucket.number, size_bytes=size_bytes, params=names)

    def unplanned(self, buckets: Sequence[Bucket], names: Sequence[str], begin: Moment) -> None:
        """What the plan did not have has been averaged."""
        if not self._is_in_round:
            return
        facts = _facts_of(buckets, names)
        self._tell("unplanned", begin, self._clock.now(), size_bytes=facts.size_bytes, params=facts.names)

    def replanned(self, number: int, plan: Sequence[Bucket], names: Sequence[str]) -> None:
        """``plan`` will be that of the next round; ``number`` is that of this one, or else of the next."""
        if not self._observers:
            return
        self._round = number
        facts = _facts_of(plan, names)
        self._tell("replanned", time.perf_counter(), size_bytes=facts.size_bytes, params=facts.names)

    def end(self) -> None:
        self._tell("round ended", time.perf_counter())
        self._is_in_round = False

    def raise_error(self) -> None:
        """Raise what an observer has raised, if one has.

        Raises:
            ObserverError: naming the observer, from its own error.
        """
        if self._error is not None:
            (name, event, error), self._error = self._error, None
            _raise(self._rank, name, event, error)

    def _tell_of(self, bucket: Bucket, kind: Kind, begin: Moment) -> None:
        if self._is_in_round:
            facts = self._facts[bucket.number]
            self._tell(kind, begin, bucket=bucket.number, size_bytes=facts.size_bytes, params=facts.names)

    def _tell(
        self,
        kind: Kind,
        begin: Moment,
        end: Moment | None = None,
        *,
        bucket: int | None = None,
        size_bytes: int = 0,
        params: tuple[str, ...] = (),
    ) -> None:
        if not self._is_in_round and kind != "replanned":
            return
        event = Event(kind, 0.0, self._rank, self._round, bucket, size_bytes, params)
        self._untold.append(_Told(event, begin, begin if end is None else end))
        self._tell_what_is_known()

    def _tell_what_is_known(self) -> None:
        while self._untold:
            event, begin, end = self._untold[0]
            begin_s = self._clock.seconds(begin)
            end_s = begin_s if end is begin else self._clock.seconds(end)
            if begin_s is None or end_s is None:
                return
            self._untold.popleft()
            self._call(event._replace(time_s=begin_s, duration_s=end_s - begin_s))

    def _call(self, event: Event) -> None:
        for observer in self._observers:
            if self._error is not None:
                return
            try:
                observer(event)
            except Exception as error:
                self._error = _name_of(observer), event, error


def _facts_of(buckets: Sequence[Bucket], names: Sequence[str]) -> _Facts:
    members = [member for bucket in buckets for member in bucket.members]
    size_bytes = sum(member.param.numel() * member.param.element_size() for member in members)
    return _Facts(tuple(names[member.index] for member in members), size_bytes)


def _name_of(observer: Observer) -> str:
    return str(getattr(observer, "__qualname__", None) or type(observer).__name__)


def _raise(rank: int, name: str, event: Event, error: Exception) -> NoReturn:
    about = "" if event.bucket is None else f" of bucket {event.bucket}"
    raise ObserverError(
        f"rank {rank}: the observer {name!r} raised {type(error).__name__} at {event.kind!r}{about} in round "
        f"{event.round}: {error}. The gradients are averages all the same; after that event no observer was told "
        "anything more of the round. Mend it, or take it away with observe(None)."
    ) from error
