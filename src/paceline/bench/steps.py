"""A turn: some steps of one way on end, by the clock of their device.

A turn is one step that is not counted, in which caches and allocators find their shape again after another way's turn;
then steps that are timed; then one that is *watched*: its phases are told apart, and observers are called. So what
watching costs is in no step's time.

The invariant: within a turn the host waits for the device at its ends alone.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paceline.bench.results import DATA_PARALLEL, OURS, TORCHS, Phases, Span
from paceline.bench.traffic import bytes_sent
from paceline.bench.ways import Trainee
from paceline.parallel.reducer.clock import Clock, Moment
from paceline.timeline import Timeline

_SELDOM = 1 << 30  # steps: never, to torch's DDP


@dataclass(frozen=True)
class Turn:
    """What one rank has seen of a turn.

    Attributes:
        step_s: how long each timed step took.
        phases: of the watched step; None where it cannot be looked into.
        spans: of the watched step, by the clock that all ranks of a host share.
        bytes_sent: by this rank in the watched step; None where there are no ranks.
    """

    step_s: tuple[float, ...]
    phases: Phases | None
    spans: tuple[Span, ...]
    bytes_sent: int | None


class _Step(NamedTuple):
    """When its parts began, and when it was over."""

    forward: Any
    backward: Any
    optimizer: Any
    end: Any


def take_turn(trainee: Trainee, num_steps: int, clock: Clock, rank: int) -> Turn:
    """Run the steps of a turn, of which ``num_steps`` are timed.

    Raises:
        BenchError: the loss is no number.
        Exception: whatever the model raises.
    """
    torch.set_num_threads(trainee.threads)
    clock.synchronize()
    run_step(trainee, clock.now)
    timed = [run_step(trainee, clock.now) for _ in range(num_steps)]
    with _watching(trainee) as watch:
        watched = run_step(trainee, clock.now)
        clock.synchronize()
    step_s = [_seconds(clock, step.end) - _seconds(clock, step.forward) for step in timed]
    step = _Step(*(_seconds(clock, moment) for moment in watched))
    phases = None
    if watch.exposed_s is not None:
        backward_s = step.optimizer - step.backward - watch.exposed_s
        phases = Phases(step.backward - step.forward, backward_s, watch.exposed_s, step.end - step.optimizer)
    spans = tuple(_spans(step, watch.timeline, rank)) if trainee.way == OURS else ()
    return Turn(tuple(step_s), phases, spans, bytes_sent(trainee, watch.timeline))


def run_step(trainee: Trainee, now: Any) -> _Step:
    """Forward and loss, backward, optimizer; ``now`` tells the moments between."""
    training = trainee.training
    began = now()
    loss = training.loss_of(training.call(trainee.model))
    has_loss = now()
    loss.backward()  # type: ignore[no-untyped-call]
    has_gradients = now()
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    return _Step(began, has_loss, has_gradients, now())


class _Watch:
    """What is to be learned of a step besides its moments.

    Attributes:
        exposed_s: how long it waited for other ranks; None where that is not known.
    """

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.exposed_s: float | None = None


@contextlib.contextmanager
def _watching(trainee: Trainee) -> Iterator[_Watch]:
    watch, model = _Watch(), trainee.model
    if trainee.way == OURS:
        model.observe(watch.timeline)  # type: ignore[operator]
        yield watch
        model.observe(None)  # type: ignore[operator]
        measured = watch.timeline.measure()
        watch.exposed_s = 0.0 if measured is None else measured.exposed_s
    elif trainee.way == TORCHS:
        model._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[operator]
        yield watch
        watch.exposed_s = _exposed_by_torch(model)
        model._set_ddp_runtime_logging_sample_rate(_SELDOM)  # type: ignore[operator]
    else:
        yield watch
        watch.exposed_s = None if trainee.way == DATA_PARALLEL else 0.0


def _exposed_by_torch(model: Any) -> float | None:
    """Of the last step, by torch's own log of it; None where that does not say."""
    model.logger.set_runtime_stats_and_log()  # else the next forward would
    log = model._get_ddp_logging_data()
    in_flight_ns, hidden_ns = log.get("backward_comm_time"), log.get("backward_compute_comm_overlap_time")
    return None if in_flight_ns is None or hidden_ns is None else max(0, in_flight_ns - hidden_ns) / 1e9


def _spans(step: _Step, timeline: Timeline, rank: int) -> Iterator[Span]:
    """The phases, with each wait cut out of backward, and the buckets."""
    yield Span(rank, "forward", step.forward, step.backward)
    begin_s = step.backward
    launched: dict[int | None, float] = {}
    for event in timeline:
        if event.kind == "launched":
            launched[event.bucket] = event.time_s
        elif event.kind == "done" and event.bucket in launched:
            yield Span(rank, "bucket", launched[event.bucket], event.time_s, event.bucket, event.size_bytes)
        elif event.kind in ("waited", "late", "unplanned"):
            yield Span(rank, "backward", begin_s, event.time_s)
            yield Span(rank, "exposed", event.time_s, event.end_s)
            begin_s = event.end_s
    yield Span(rank, "backward", begin_s, step.optimizer)
    yield Span(rank, "optimizer", step.optimizer, step.end)


def _seconds(clock: Clock, moment: Moment) -> float:
    seconds = clock.seconds(moment)
    assert seconds is not None  # the device has been waited for
    return seconds
