"""Which ranks are asked during a forward, when some have run out of data."""

import datetime

import pytest
import torch
import torch.distributed as dist

from paceline.parallel.live import declare_live, divisor_of, forget_live, live_group
from support.ranks import run_ranks

BACKENDS = ["gloo", "shm"]


def total(group):
    """The sum of what the ranks of ``group`` are worth: rank r is worth 10 to the r."""
    t = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(t, group=group)
    return t.item()


def without_a_join(world):
    default = dist.distributed_c10d._get_default_group()
    pair = dist.new_group([0, 1])
    outside = world.rank == 2
    return (
        live_group(None) is default,
        live_group(default) is default,
        live_group(pair) is pair,
        divisor_of(None),
        divisor_of(default),
        outside or divisor_of(pair),
    )


def test_without_a_join_it_is_the_group_itself_whose_ranks_all_count():
    seen = run_ranks(3, without_a_join)
    assert seen == [(True, True, True, 3, 3, 2), (True, True, True, 3, 3, 2), (True, True, True, 3, 3, True)]


def test_without_a_process_group_there_is_none_and_one_rank():
    assert live_group(None) is None
    assert divisor_of(None) == 1


def ranks_that_leave(world):
    group = dist.distributed_c10d._get_default_group()
    seen = []
    for live in ([0, 1, 2], [0, 2], [2], [0, 2]):
        declare_live(group, live)
        seen.append((total(live_group(None)), divisor_of(None)) if world.rank in live else None)
    forget_live(group)
    forget_live(group)  # once more does no harm
    return [*seen, (total(live_group(None)), divisor_of(None))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_group_holds_those_that_still_have_data(backend):
    everyone, two, one = (111.0, 3), (101.0, 2), (100.0, 1)
    assert run_ranks(3, ranks_that_leave, backend=backend) == [
        [everyone, two, None, two, everyone],
        [everyone, None, None, None, everyone],
        [everyone, two, one, two, everyone],
    ]


def kept(world):
    group = dist.distributed_c10d._get_default_group()
    found = []
    for _ in range(2):
        for live in ([0, 1], [0]):
            declare_live(group, live)
            if world.rank in live:
                found.append(live_group(group))
        forget_live(group)
    return [found.index(each) for each in found]


def test_a_group_is_made_once_for_each_set_of_ranks():
    assert run_ranks(3, kept) == [[0, 1, 0, 1], [0, 0], []]


def backend_and_timeout(world):
    parent = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=17))
    declare_live(parent, [0, 1])
    if world.rank == 2:
        return None
    made = live_group(parent)
    made_timeout = made._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return dist.get_backend(made), dist.get_process_group_ranks(made), made_timeout


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_group_has_its_parents_backend_and_timeout(backend):
    assert run_ranks(3, backend_and_timeout, backend=backend) == [(backend, [0, 1], 17.0)] * 2 + [None]


def smaller_group(world):
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    mine = [pair for pair in pairs if dist.get_rank(pair) >= 0]
    declare_live(dist.distributed_c10d._get_default_group(), [1, 2])
    if world.rank == 0:
        return None
    return [(total(live_group(pair)), divisor_of(pair)) for pair in mine]


def test_a_smaller_group_follows_the_roll_call_of_the_larger_one():
    assert run_ranks(3, smaller_group) == [None, [(10.0, 1), (110.0, 2)], [(110.0, 2)]]


def larger_group(world):
    pair = dist.new_group([0, 1])
    if world.rank < 2:
        declare_live(pair, [0])
    return total(live_group(None)), divisor_of(None)


def test_the_roll_call_of_a_smaller_group_says_nothing_about_a_larger_one():
    assert run_ranks(3, larger_group) == [(111.0, 3)] * 3


def two_roll_calls(world):
    pair = dist.new_group([0, 1])
    declare_live(dist.distributed_c10d._get_default_group(), [0, 1])
    if world.rank < 2:
        declare_live(pair, [1])
    if world.rank == 1:
        return total(live_group(pair)), divisor_of(pair)
    return None


def test_where_two_roll_calls_speak_of_a_rank_it_is_live_in_both():
    assert run_ranks(3, two_roll_calls) == [None, (10.0, 1), None]


def divided_by_all(world):
    group = dist.distributed_c10d._get_default_group()
    declare_live(group, [0], divides_by_initial=True)
    return divisor_of(None), dist.get_world_size(live_group(None)) if world.is_main else None


def test_the_divisor_is_the_initial_number_where_the_join_was_told_so():
    assert run_ranks(2, divided_by_all) == [(2, 1), (2, None)]


def asked_by_one_that_has_left(world):
    declare_live(dist.distributed_c10d._get_default_group(), [0, 2])
    if world.rank == 1:
        with pytest.raises(RuntimeError) as caught:
            live_group(None)
        return f"{type(caught.value).__name__}: {caught.value}"
    return None


def test_a_rank_that_has_run_out_of_data_is_told_that_it_has_no_part_in_it():
    assert run_ranks(3, asked_by_one_that_has_left)[1] == (
        "CommunicationError: rank 1: it has run out of data while ranks 0, 2 train on, so it has no part in what they "
        "exchange. Under join, call SyncBatchNorm, global_mean and their like within the loop over batches only."
    )


def outside(world):
    pair = dist.new_group([0, 1])
    declare_live(dist.distributed_c10d._get_default_group(), [0, 2])
    return live_group(pair) is pair if world.rank == 2 else None


def test_a_rank_outside_a_group_gets_back_what_it_gave():
    assert run_ranks(3, outside)[2] is True
