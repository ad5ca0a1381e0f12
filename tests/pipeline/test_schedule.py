"""Schedules are torch's where torch has them, and can always be run."""

import itertools
import re
from unittest.mock import Mock

import pytest
from torch.distributed.pipelining import schedules as torchs

from paceline.errors import PlanError
from paceline.pipeline import Action, Schedule, draw, make_schedule
from paceline.pipeline.clock import bubble_fraction, makespan, peak_in_flight, place


def spelled(actions):
    """Forwards and backwards; torch's orders hold waits and reductions too."""
    return [str(action) for action in actions if action is not None and "REDUCE" not in str(action)]


def kinds(actions):
    """Such as 1F for 1F0."""
    return [re.match(r"\d+[FB]", action)[0] for action in actions]


def torchs_order(kind, num_lanes, num_stages, num_microbatches, lane):
    """The order in which torch's schedule of that name runs a rank's actions."""
    stages = [
        Mock(stage_index=index, num_stages=num_stages, group_size=num_lanes, group_rank=lane, is_last=False)
        for index in range(lane, num_stages, num_lanes)
    ]
    if kind is torchs.ScheduleInterleaved1F1B:
        return spelled(kind(stages, num_microbatches).pipeline_order[lane])
    return spelled(kind(stages[0], num_microbatches)._get_pipeline_order()[lane])


@pytest.mark.parametrize(("name", "kind"), [("gpipe", torchs.ScheduleGPipe), ("1f1b", torchs.Schedule1F1B)])
@pytest.mark.parametrize(("num_lanes", "num_microbatches"), [(2, 2), (2, 3), (2, 5), (3, 8), (5, 8)])
def test_the_order_is_that_of_torchs_schedule(name, kind, num_lanes, num_microbatches):
    ours = make_schedule(name, num_lanes, num_lanes, num_microbatches)
    for lane, actions in enumerate(ours.lanes):
        theirs = torchs_order(kind, num_lanes, num_lanes, num_microbatches, lane)
        # Without the microbatches: torch's runtime counts the last stage's from 0, but its description of 1f1b from 1.
        assert kinds(spelled(actions)) == kinds(theirs)


@pytest.mark.parametrize(("num_lanes", "num_chunks", "num_microbatches"), [(2, 2, 4), (2, 3, 2), (3, 2, 9), (4, 2, 8)])
def test_interleaved_is_that_of_torchs_schedule(num_lanes, num_chunks, num_microbatches):
    num_stages = num_lanes * num_chunks
    ours = make_schedule("interleaved", num_lanes, num_stages, num_microbatches)
    for lane, actions in enumerate(ours.lanes):
        theirs = torchs_order(torchs.ScheduleInterleaved1F1B, num_lanes, num_stages, num_microbatches, lane)
        assert spelled(actions) == theirs


def test_every_number_of_lanes_stages_and_microbatches_gives_a_schedule_that_ends():
    for num_lanes, num_chunks, num_microbatches in itertools.product(range(1, 6), range(1, 4), range(1, 14)):
        make_schedule("interleaved", num_lanes, num_lanes * num_chunks, num_microbatches)
        make_schedule("1f1b", num_lanes, num_lanes, num_microbatches)
        make_schedule("gpipe", num_lanes, num_lanes, num_microbatches)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 4), (4, 16)])
def test_the_bubble_is_the_theorys(name, p, m):
    placed = place(make_schedule(name, p, p, m), lambda action: 1.0 if action.kind == "F" else 2.0)
    assert makespan(placed) == 3 * (m + p - 1)
    assert bubble_fraction(placed, p) == pytest.approx((p - 1) / (m + p - 1))


def test_interleaving_divides_the_bubble_by_the_stages_of_a_lane():
    """Narayanan et al. 2021: (p - 1) / v units of waiting beside m units of work."""
    p, v, m = 4, 2, 8
    placed = place(make_schedule("interleaved", p, p * v, m), lambda action: (1.0 if action.kind == "F" else 2.0) / v)
    assert makespan(placed) == pytest.approx(3 * (m + (p - 1) / v))


def test_1f1b_keeps_the_activations_of_the_stages_to_come_and_gpipe_those_of_all():
    assert peak_in_flight(make_schedule("gpipe", 4, 4, 8)) == [8, 8, 8, 8]
    assert peak_in_flight(make_schedule("1f1b", 4, 4, 8)) == [4, 3, 2, 1]
    assert peak_in_flight(make_schedule("1f1b", 4, 4, 2)) == [2, 2, 2, 1]


def test_a_schedule_prints_as_a_table():
    assert str(make_schedule("1f1b", 2, 2, 3)).splitlines() == [
        "lane 0  F0 F1  . B0 F2 B1  . B2",
        "lane 1   . F0 B0 F1 B1 F2 B2  .",
        "1f1b: bubble 25.0%; activations kept at most, by lane: 2, 1",
    ]


def test_a_lane_of_several_stages_names_them():
    assert str(make_schedule("interleaved", 1, 2, 1)).splitlines() == [
        "lane 0  0F0 1F0 1B0 0B0",
        "interleaved: bubble 0.0%; activations kept at most, by lane: 2",
    ]


def test_a_drawing_has_a_bar_for_each_action_and_tells_the_bubble(tmp_path):
    svg = draw(make_schedule("gpipe", 2, 2, 4), tmp_path / "gpipe.svg")
    assert svg.count('<rect class="F"') == svg.count('<rect class="B"') == 8
    assert "gpipe: 2 stages, 4 microbatches, bubble 20.0%" in svg
    assert (tmp_path / "gpipe.svg").read_text() == svg


def test_an_unknown_schedule_is_refused():
    with pytest.raises(
        PlanError, match=r"^schedule='dream': expected one of gpipe, 1f1b, interleaved, or a function\.$"
    ):
        make_schedule("dream", 2, 2, 2)


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(PlanError, match=r"^microbatches=0: expected a positive number\.$"):
        make_schedule("gpipe", 2, 2, 0)
    with pytest.raises(PlanError, match=r"^schedule 'gpipe': 4 stages on 2 lanes; expected one for each\."):
        make_schedule("gpipe", 2, 4, 2)
    with pytest.raises(PlanError, match=r"^schedule 'interleaved': 3 stages cannot be dealt evenly to 2 lanes\."):
        make_schedule("interleaved", 2, 3, 2)


F0, B0 = Action("F", 0, 0), Action("B", 0, 0)
G0, C0 = Action("F", 1, 0), Action("B", 1, 0)


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        (((F0, B0), (G0,)), r"lane 1 does B of stage 1 for the microbatches \[\]; expected each of 1 once, in order"),
        (((F0, B0, G0), (G0, C0)), r"lane 0 does 1F0, but its stages are \[0\]"),
        (((B0, F0), (G0, C0)), r"lanes wait for one another for ever: lane 0 at 0B0, lane 1 at 1F0"),
        (((F0, B0),), r"is for 1 lanes, 2 stages and 1 microbatches; expected 2, 2 and 1"),
    ],
)
def test_a_rule_of_ones_own_is_checked(lanes, message):
    with pytest.raises(PlanError, match=rf"^schedule 'mine'.*{message}\.$"):
        make_schedule(lambda *_: Schedule("mine", 2, 1, lanes), 2, 2, 1)
