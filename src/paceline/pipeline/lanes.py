"""Running a lane: its actions in order, each when what it needs has come.

The invariant: what is computed follows from the schedule and the batch alone, whatever carries values between lanes.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from paceline.pipeline.clock import Placed
from paceline.pipeline.schedule import Action, Schedule
from paceline.pipeline.stage import Call, Grads, Parcel, Stage, retold


class Carrier(Protocol):
    """Brings what one lane has made to the lane that needs it."""

    def give(self, made_by: Action, value: Parcel | Grads) -> None:
        """Pass on what ``made_by`` returned, without waiting."""

    def take(self, made_by: Action) -> Any:
        """Wait for what ``made_by`` returned."""


@dataclass
class Batch:
    """What a lane needs to know of a batch.

    Attributes:
        calls: the model's arguments for each microbatch, where the first stage is.
        loss: takes the model's output and what is in ``targets``.
        targets: for each microbatch, where the last stage is, in training.
        weights: of each microbatch's loss in that of the batch, there too.
        scale: of the gradients.
    """

    calls: Sequence[Call] = ()
    loss: Callable[..., Tensor] | None = None
    targets: Sequence[tuple[Any, ...]] = ()
    weights: Sequence[float] = ()
    scale: float = 1.0


@dataclass
class Results:
    """What a lane has to show.

    Attributes:
        losses: of each microbatch; where the last stage is, in training.
        outputs: of each microbatch; where the last stage is, in evaluation.
        times: of each action, in seconds of ``perf_counter``, with handing over what it made; waits are not in it.
    """

    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    times: list[Placed] = field(default_factory=list)


Around: TypeAlias = Callable[[Action], contextlib.AbstractContextManager[Any]]


def _as_it_is(_action: Action) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def run_lane(
    schedule: Schedule,
    lane: int,
    stages: Mapping[int, Stage],
    batch: Batch,
    carrier: Carrier,
    *,
    keeps: bool,
    around: Around = _as_it_is,
) -> Results:
    """Do what the schedule tells this lane.

    Args:
        stages: this lane's, by number.
        keeps: whether forwards keep what backwards will need.
        around: gives a context for each action, such as the averaging over replicas.
    Raises:
        Exception: of the first action that failed, of its own type, with its place in the message.
    """
    for stage in stages.values():
        stage.begin()
    results = Results()
    last = schedule.num_stages - 1
    for action in schedule.lanes[lane]:
        kind, number, microbatch = action
        stage = stages[number]
        needed: Any
        if kind == "F":
            needed = carrier.take(Action("F", number - 1, microbatch)) if number else batch.calls[microbatch]
        else:
            is_end = number == last
            needed = (
                _weight_of(results, batch, microbatch) if is_end else carrier.take(Action("B", number + 1, microbatch))
            )
        begin = time.perf_counter()
        try:
            with around(action):
                if kind == "B":
                    made: Any = stage.backward(microbatch, needed)
                else:
                    made = _forward(stage, microbatch, needed, batch, keeps=keeps, is_last=number == last)
        except Exception as error:
            raise retold(error, f"stage {number}, microbatch {microbatch}, {_WORDS[kind]}") from error
        if kind == "F" and number == last:
            (results.losses if keeps else results.outputs).append(made)
        elif kind == "F" or number > 0:
            carrier.give(action, made)
        results.times.append(Placed(lane, action, begin, time.perf_counter()))
    return results


_WORDS = {"F": "forward", "B": "backward"}


def _forward(stage: Stage, microbatch: int, needed: Any, batch: Batch, *, keeps: bool, is_last: bool) -> Any:
    if not keeps:
        parcel = stage.evaluate(needed)
        return parcel.opened() if is_last else parcel
    if is_last:
        loss, target = batch.loss, batch.targets[microbatch]
        assert loss is not None
        counts = batch.weights[microbatch] != 0
        return stage.last(microbatch, needed, (lambda output: loss(output, *target)) if counts else None)
    return stage.first(microbatch, needed) if stage.number == 0 else stage.forward(microbatch, needed)


def _weight_of(results: Results, batch: Batch, microbatch: int) -> Grads:
    """The gradient with which a microbatch's backward begins."""
    return [torch.full_like(results.losses[microbatch], batch.weights[microbatch] * batch.scale)]
