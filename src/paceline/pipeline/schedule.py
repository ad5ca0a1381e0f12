"""Who computes what, and in which order: the schedules of a pipeline, as values that pure functions make.

A *stage* is a part of the model, a *microbatch* a part of the batch, a *lane* the device or rank that runs one stage or
several. ``F`` is a stage's forward for a microbatch, ``B`` its backward. With four stages and four microbatches::

    gpipe    F0 F1 F2 F3 .. .. .. .. .. .. B0 B1 B2 B3
             .. F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3 ..
             .. .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 .. ..
             .. .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. .. ..

    1f1b     F0 F1 F2 F3 .. .. .. B0 .. B1 .. B2 .. B3
             .. F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3 ..
             .. .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 .. ..
             .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. .. ..

Both wait equally long; 1f1b keeps the activations of at most as many microbatches as there are stages to come.
Interleaved, each lane runs several thin stages, so the pipeline is filled sooner, for more messages.

The invariant: each stage does each microbatch's F and B once, in the order of microbatches, and what any action needs
comes before it, so that lanes which wait for one another always come to an end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from typing import Literal, NamedTuple, TypeAlias

from paceline.errors import PlanError


class Action(NamedTuple):
    """A forward or backward of one stage for one microbatch."""

    kind: Literal["F", "B"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """What each lane does, in order.

    Attributes:
        name: of the rule that made it.
        num_stages: parts of the model; lane d of D runs the stages d, d + D, and so on.
        num_microbatches: parts of the batch.
        lanes: for each device or rank its actions.
    """

    name: str
    num_stages: int
    num_microbatches: int
    lanes: tuple[tuple[Action, ...], ...]

    def lane_of(self, stage: int) -> int:
        return stage % len(self.lanes)

    def forward_only(self) -> "Schedule":
        """The same without backwards: what evaluation runs."""
        lanes = tuple(tuple(action for action in lane if action.kind == "F") for lane in self.lanes)
        return Schedule(self.name, self.num_stages, self.num_microbatches, lanes)

    def __str__(self) -> str:
        from paceline.pipeline.picture import table

        return table(self)


Rule: TypeAlias = Callable[[int, int, int], Schedule]


def gpipe(num_lanes: int, num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards. Keeps the activations of all microbatches.

    Source: Huang et al. 2019, "GPipe".
    """
    _check_one_stage_a_lane("gpipe", num_lanes, num_stages)
    numbers = range(num_microbatches)
    lanes = tuple(
        (*(Action("F", stage, n) for n in numbers), *(Action("B", stage, n) for n in numbers))
        for stage in range(num_stages)
    )
    return Schedule("gpipe", num_stages, num_microbatches, lanes)


def one_f_one_b(num_lanes: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Warm up with as many forwards as there are stages to come, then one backward for each forward.

    Stage s of p keeps the activations of at most p - s microbatches.

    Source: Narayanan et al. 2019, "PipeDream", there with a flush after each batch.
    """
    _check_one_stage_a_lane("1f1b", num_lanes, num_stages)
    lanes = []
    for stage in range(num_stages):
        forwards = [Action("F", stage, n) for n in range(num_microbatches)]
        backwards = [Action("B", stage, n) for n in range(num_microbatches)]
        lanes.append(tuple(_alternate(forwards, backwards, num_stages - stage - 1)))
    return Schedule("1f1b", num_stages, num_microbatches, tuple(lanes))


def interleaved(num_lanes: int, num_stages: int, num_microbatches: int) -> Schedule:
    """1f1b with several stages a lane: microbatches pass in groups through all of a lane's stages.

    Any number of microbatches will do: groups differ by at most one.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.
    """
    if num_lanes < 1 or num_stages % num_lanes:
        raise PlanError(
            f"schedule 'interleaved': {num_stages} stages cannot be dealt evenly to {num_lanes} lanes. Give a multiple."
        )
    num_groups = max(1, num_microbatches // num_lanes)
    bounds = [num_microbatches * n // num_groups for n in range(num_groups + 1)]
    groups = [range(begin, end) for begin, end in pairwise(bounds)]
    lanes = []
    for lane in range(num_lanes):
        stages = range(lane, num_stages, num_lanes)
        forwards = [Action("F", stage, n) for group in groups for stage in stages for n in group]
        backwards = [Action("B", stage, n) for group in groups for stage in reversed(stages) for n in group]
        num_ahead = (len(stages) - 1) * max(map(len, groups)) + 2 * (num_lanes - 1 - lane)
        lanes.append(tuple(_alternate(forwards, backwards, num_ahead)))
    return Schedule("interleaved", num_stages, num_microbatches, tuple(lanes))


def _alternate(forwards: list[Action], backwards: list[Action], num_ahead: int) -> Iterator[Action]:
    """``num_ahead`` forwards, then forward and backward in turn as long as there are any."""
    num_ahead = min(num_ahead, len(forwards))
    pairs = zip_longest(forwards[num_ahead:], backwards)
    return chain(forwards[:num_ahead], (action for pair in pairs for action in pair if action is not None))


def _check_one_stage_a_lane(name: str, num_lanes: int, num_stages: int) -> None:
    if num_lanes != num_stages or num_lanes < 1:
        raise PlanError(
            f"schedule {name!r}: {num_stages} stages on {num_lanes} lanes; expected one for each. With a multiple, use "
            "'interleaved'."
        )
