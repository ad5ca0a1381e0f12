"""When a schedule's actions would run, and what follows: makespan, bubble, activations that are kept.

The invariant: these are exact for the durations given; nothing is measured here, and hand-overs take no time.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from paceline.errors import PlanError
from paceline.pipeline.schedule import Action, Schedule


class Placed(NamedTuple):
    """An action with its time, in the unit of the durations."""

    lane: int
    action: Action
    begin: float
    end: float


def place(schedule: Schedule, duration: Callable[[Action], float] = lambda _action: 1.0) -> list[Placed]:
    """Run each action as soon as its lane is free and what it needs is there.

    Args:
        duration: of each action; by default 1.
    Raises:
        PlanError: the lanes would wait for one another for ever.
    """
    ends: dict[Action, float] = {}
    placed: list[Placed] = []
    free_at = [0.0] * len(schedule.lanes)
    position = [0] * len(schedule.lanes)
    has_moved = True
    while has_moved:
        has_moved = False
        for lane, actions in enumerate(schedule.lanes):
            while position[lane] < len(actions):
                action = actions[position[lane]]
                needed = needs_of(action, schedule.num_stages)
                if not all(need in ends for need in needed):
                    break
                begin = max([free_at[lane], *(ends[need] for need in needed)])
                ends[action] = free_at[lane] = begin + duration(action)
                placed.append(Placed(lane, action, begin, ends[action]))
                position[lane] += 1
                has_moved = True
    stuck = [f"lane {lane} at {lanes[at]}" for lane, (lanes, at) in _unfinished(schedule, position)]
    if stuck:
        raise PlanError(f"schedule {schedule.name!r}: lanes wait for one another for ever: {', '.join(stuck)}.")
    return placed


def needs_of(action: Action, num_stages: int) -> list[Action]:
    """What must have been done before."""
    kind, stage, number = action
    if kind == "F":
        return [Action("F", stage - 1, number)] if stage > 0 else []
    after = [Action("B", stage + 1, number)] if stage + 1 < num_stages else []
    return [Action("F", stage, number), *after]


def makespan(placed: list[Placed]) -> float:
    """From the first begin to the last end; 0 for nothing."""
    return max((item.end for item in placed), default=0.0) - min((item.begin for item in placed), default=0.0)


def bubble_fraction(placed: list[Placed], num_lanes: int) -> float:
    """The share of the lanes' time in which they wait; for gpipe on p equal stages (p - 1) / (m + p - 1)."""
    total = num_lanes * makespan(placed)
    return 1 - sum(item.end - item.begin for item in placed) / total if total else 0.0


def peak_in_flight(schedule: Schedule) -> list[int]:
    """For each lane, of how many forwards at most it keeps the activations at a time."""
    return [_peak(actions) for actions in schedule.lanes]


def peak_by_stage(schedule: Schedule) -> list[int]:
    """The same for each stage by itself."""
    lanes = [schedule.lanes[schedule.lane_of(stage)] for stage in range(schedule.num_stages)]
    return [_peak([action for action in lane if action.stage == stage]) for stage, lane in enumerate(lanes)]


def _peak(actions: Sequence[Action]) -> int:
    return max(accumulate(1 if action.kind == "F" else -1 for action in actions))


def _unfinished(schedule: Schedule, position: list[int]) -> list[tuple[int, tuple[tuple[Action, ...], int]]]:
    pairs = enumerate(zip(schedule.lanes, position, strict=True))
    return [(lane, (actions, at)) for lane, (actions, at) in pairs if at < len(actions)]
