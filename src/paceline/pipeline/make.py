"""The schedule of a name, checked.

The invariant: what leaves here can be run: nothing is missing or done twice, and no lane waits for ever.
"""

import functools

from paceline.errors import PlanError
from paceline.pipeline.clock import place
from paceline.pipeline.schedule import Rule, Schedule, gpipe, interleaved, one_f_one_b

SCHEDULES: dict[str, Rule] = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}


@functools.lru_cache(maxsize=256)
def make_schedule(rule: str | Rule, num_lanes: int, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule of that name.

    Args:
        rule: "gpipe", "1f1b", "interleaved", or a function of the three numbers that makes a schedule.
        num_lanes: devices or ranks.
        num_stages: as many, or for "interleaved" a multiple.
        num_microbatches: parts of the batch.
    Raises:
        PlanError: there is no such rule, a number does not fit it, or what it made is no schedule.
    """
    if isinstance(rule, str):
        if rule not in SCHEDULES:
            raise PlanError(f"schedule={rule!r}: expected one of {', '.join(SCHEDULES)}, or a function.")
        rule = SCHEDULES[rule]
    if num_microbatches < 1:
        raise PlanError(f"microbatches={num_microbatches}: expected a positive number.")
    schedule = rule(num_lanes, num_stages, num_microbatches)
    check(schedule, num_lanes, num_stages, num_microbatches)
    return schedule


def check(schedule: Schedule, num_lanes: int, num_stages: int, num_microbatches: int) -> None:
    """Refuse what is no schedule for these numbers: something missing, twice, in the wrong lane, or never possible."""
    expected = (num_lanes, num_stages, num_microbatches)
    if (len(schedule.lanes), schedule.num_stages, schedule.num_microbatches) != expected:
        raise PlanError(
            f"schedule {schedule.name!r} is for {len(schedule.lanes)} lanes, {schedule.num_stages} stages and "
            f"{schedule.num_microbatches} microbatches; expected {num_lanes}, {num_stages} and {num_microbatches}."
        )
    for lane, actions in enumerate(schedule.lanes):
        stages = range(lane, num_stages, num_lanes)
        for stage in stages:
            for kind in "FB":
                order = [action.microbatch for action in actions if action.stage == stage and action.kind == kind]
                if order != list(range(num_microbatches)):
                    raise PlanError(
                        f"schedule {schedule.name!r}: lane {lane} does {kind} of stage {stage} for the microbatches "
                        f"{order}; expected each of {num_microbatches} once, in order."
                    )
        if strangers := [str(action) for action in actions if action.stage not in stages]:
            raise PlanError(
                f"schedule {schedule.name!r}: lane {lane} does {strangers[0]}, but its stages are {list(stages)}."
            )
    place(schedule)
