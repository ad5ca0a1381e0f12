"""Cutting a row of units into contiguous stages, so that the dearest stage is as cheap as can be.

The invariant: pure and exact: every stage gets at least one unit, and no other cut has a smaller maximum.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from paceline.errors import PlanError


def partition(costs: Sequence[float], num_stages: int) -> list[range]:
    """The stages' units, where a stage costs the sum of its units.

    Args:
        costs: of U units, in order; not negative.
        num_stages: at most U.
    Raises:
        PlanError: fewer units than stages, or a cost below 0.
    """
    if any(cost < 0 for cost in costs):
        raise PlanError(f"costs of units must not be negative, but one is {min(costs)}.")
    sums = [0.0, *accumulate(costs)]
    return partition_by(lambda _stage, begin, end: sums[end] - sums[begin], len(costs), num_stages)


def partition_by(cost: Callable[[int, int, int], float], num_units: int, num_stages: int) -> list[range]:
    """As ``partition``, where ``cost(stage, begin, end)`` may depend on which stage it is.

    Among cuts with the same maximum, the one with the least total of squares, so that the rest is even too.

    Raises:
        PlanError: fewer units than stages.
    """
    if not 1 <= num_stages <= num_units:
        raise PlanError(
            f"{num_units} units cannot make {num_stages} stages: each needs at least one. Use fewer stages, or a model "
            "of more blocks."
        )
    # best[end] of a stage: the least (maximum, squares) with which the stages up to it hold the units before end.
    best: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
    cuts: list[dict[int, int]] = []
    for stage in range(num_stages):
        reached: dict[int, tuple[float, float]] = {}
        begins: dict[int, int] = {}
        last_end = num_units - (num_stages - stage - 1)
        for begin, (worst, squares) in best.items():
            for end in range(begin + 1, last_end + 1):
                own = cost(stage, begin, end)
                candidate = (max(worst, own), squares + own * own)
                if end not in reached or candidate < reached[end]:
                    reached[end], begins[end] = candidate, begin
        best = reached
        cuts.append(begins)
    end, ranges = num_units, []
    for begins in reversed(cuts):
        ranges.append(range(begins[end], end))
        end = begins[end]
    return ranges[::-1]
