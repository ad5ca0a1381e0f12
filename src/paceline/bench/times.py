"""Steps, in ranks: all ways of so many devices are built side by side and take turns.

The invariant: within each round every way has its turn, so that all see the same machine, and while a turn belongs to
one process the other ranks sleep.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from paceline.bench.joining import gather, joined
from paceline.bench.ranks import Tell
from paceline.bench.recipe import Recipe
from paceline.bench.results import Phases, Span
from paceline.bench.steps import Turn, take_turn
from paceline.bench.ways import Setting, Trainee, build, is_on_every_rank
from paceline.parallel.reducer.clock import Clock


@dataclass(frozen=True)
class Job:
    """What ranks are told: which ways take turns, in how many rounds after one more, with how many steps a turn."""

    recipe: Recipe
    setting: Setting
    ways: tuple[str, ...]
    num_rounds: int
    steps_a_turn: int


@dataclass(frozen=True)
class Began:
    """This way is being built, or has its turn: whatever happens now is its doing."""

    way: str


@dataclass(frozen=True)
class Took:
    """A way has had its turn.

    Attributes:
        step_s: each timed step's time, of its slowest rank.
        phases: of the watched step, by rank; empty where it cannot be looked into.
        spans: of the watched step of all ranks.
        bytes_sent: in the watched step, the mean over the ranks.
    """

    way: str
    step_s: tuple[float, ...]
    phases: tuple[Phases, ...]
    spans: tuple[Span, ...]
    bytes_sent: int | None


def take_turns(rank: int, job: Job, tell: Tell) -> None:
    """Tell ``Began`` and ``Took``, round by round."""
    with joined(job.setting) as control:
        trainees: dict[str, Trainee] = {}
        for way in job.ways:
            tell(Began(way))
            if rank == 0 or is_on_every_rank(way):
                trainees[way] = build(way, job.recipe, job.setting)
            dist.barrier(control)
        clock = Clock(job.setting.device)
        for number in range(1 + job.num_rounds):
            for way in job.ways:
                tell(Began(way))
                dist.barrier(control)
                turn = take_turn(trainees[way], job.steps_a_turn, clock, rank) if way in trainees else None
                turns = [turn for turn in gather(turn, control) if turn is not None]
                if turns and number > 0:  # in the first round wrappers rearrange their buckets, and allocators warm up
                    tell(_together(way, turns))


def _together(way: str, turns: Sequence[Turn]) -> Took:
    """What the ranks that took part have seen."""
    step_s = tuple(max(times) for times in zip(*(turn.step_s for turn in turns), strict=True))
    phases = [turn.phases for turn in turns if turn.phases is not None]
    spans = [span for turn in turns for span in turn.spans]
    began_s = min((span.begin_s for span in spans), default=0.0)
    spans = [replace(span, begin_s=span.begin_s - began_s, end_s=span.end_s - began_s) for span in spans]
    sent: list[Any] = [turn.bytes_sent for turn in turns]
    mean = None if None in sent else round(sum(sent) / len(sent))
    return Took(way, step_s, tuple(phases) if len(phases) == len(turns) else (), tuple(spans), mean)
