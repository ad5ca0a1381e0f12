"""Cuts are the best there are."""

import itertools
import random

import pytest

from paceline.errors import PlanError
from paceline.pipeline.balance import partition, partition_by


def costs_of(costs, stages):
    return [sum(costs[i] for i in stage) for stage in stages]


def test_equal_units_make_equal_stages():
    assert partition([1] * 6, 3) == [range(2), range(2, 4), range(4, 6)]


def test_a_dear_unit_has_a_stage_to_itself():
    assert partition([1, 1, 9, 1, 1], 3) == [range(2), range(2, 3), range(3, 5)]


def test_units_that_cost_nothing_are_dealt_all_the_same():
    assert partition([0, 0, 0], 3) == [range(1), range(1, 2), range(2, 3)]


def test_no_cut_has_a_smaller_maximum():
    randoms = random.Random(0)
    for _ in range(50):
        costs = [randoms.randint(0, 9) for _ in range(randoms.randint(3, 8))]
        for num_stages in (1, 2, 3):
            best = min(
                max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs)]))
                for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1)
            )
            stages = partition(costs, num_stages)
            assert [unit for stage in stages for unit in stage] == list(range(len(costs)))
            assert max(costs_of(costs, stages)) == best


def test_a_cost_may_depend_on_the_stage():
    """What the first stage holds counts thrice."""
    assert partition_by(lambda stage, begin, end: (end - begin) * (3 - stage), 6, 3) == [
        range(1),
        range(1, 2),
        range(2, 6),
    ]


def test_too_few_units_are_refused():
    with pytest.raises(PlanError, match=r"^2 units cannot make 3 stages: each needs at least one\."):
        partition([1, 1], 3)


def test_costs_below_nothing_are_refused():
    with pytest.raises(PlanError, match=r"^costs of units must not be negative, but one is -1\.$"):
        partition([1, -1], 2)
