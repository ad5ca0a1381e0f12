"""The bucket rule, as literal tables."""

import dataclasses

import pytest

from paceline.errors import PlanError
from paceline.plan import BucketPlan, ParamSpec, plan_buckets


def specs(*numels, kind="float32", itemsize=4):
    return [ParamSpec(index, numel, itemsize, kind) for index, numel in enumerate(numels)]


def test_a_bucket_is_closed_by_the_parameter_that_fills_it():
    plan = plan_buckets(specs(1, 1, 2, 1, 4, 1), caps_bytes=(8, 16))
    assert plan.buckets == ((0, 1), (2, 3, 4), (5,))


def test_parameters_keep_the_order_in_which_they_came():
    plan = plan_buckets(specs(1, 1, 1)[::-1], caps_bytes=[100])
    assert plan.buckets == ((2, 1, 0),)


def test_a_cap_of_zero_gives_each_its_own():
    assert plan_buckets(specs(1, 0, 3), caps_bytes=[0]).buckets == ((0,), (1,), (2,))


def test_a_parameter_larger_than_the_cap_fills_a_bucket_by_itself():
    assert plan_buckets(specs(100, 1, 1), caps_bytes=[8]).buckets == ((0,), (1, 2))


def test_each_kind_goes_through_the_caps_by_itself_and_stays_at_the_last():
    wide = [ParamSpec(index, 1, 8, "float64") for index in (10, 11, 12)]
    plan = plan_buckets([*specs(1, 2, 1, 2, 1), *wide], caps_bytes=[4, 12])
    assert plan.buckets == ((0,), (1, 2), (3, 4), (10,), (11, 12))


def test_kinds_do_not_mix_and_are_launched_when_their_last_member_arrives():
    wide = [ParamSpec(index, 1, 8, "float64") for index in (1, 2)]
    narrow = [ParamSpec(index, 1, 4, "float32") for index in (0, 3)]
    plan = plan_buckets([narrow[0], *wide, narrow[1]], caps_bytes=[100])
    assert plan.buckets == ((1, 2), (0, 3))


def test_sparse_gradients_travel_alone():
    rows = dataclasses.replace(specs(0, 5)[1], sparse=True)
    plan = plan_buckets([specs(1)[0], rows, specs(0, 0, 1)[2]], caps_bytes=[100])
    assert plan.buckets == ((1,), (0, 2))


def test_no_parameters_make_no_buckets():
    assert plan_buckets([]) == BucketPlan(())


def test_the_default_first_bucket_holds_one_mebibyte():
    plan = plan_buckets(specs(*[1 << 17] * 60))
    assert [len(bucket) for bucket in plan.buckets] == [2, 50, 8]  # of 0.5 MiB each: 1 MiB, 25 MiB, the rest


def test_a_thousand_parameters_sit_in_exactly_one_bucket_each():
    plan = plan_buckets(specs(*range(1000)), caps_bytes=[5000])
    assert sorted(index for bucket in plan.buckets for index in bucket) == list(range(1000))


@pytest.mark.parametrize("caps", [(), (-1,), (1, -1)])
def test_no_cap_or_a_negative_one_is_an_error(caps):
    with pytest.raises(PlanError, match=r"expected at least one number of bytes, none less than 0\.$"):
        plan_buckets(specs(1), caps_bytes=caps)


def test_a_parameter_named_twice_is_an_error():
    with pytest.raises(PlanError, match=r"^a parameter appears twice; each must be in exactly one bucket\.$"):
        plan_buckets(specs(1) * 2)
