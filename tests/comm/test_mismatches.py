"""Where ranks call different things, all are told, none has written anything, and the group goes on."""

import pytest

from support.layouts import run_on
from support.mismatches import SIDES, cases, messages_of_another_dtype, mismatches
from support.ranks import run_ranks

WHERE = ["shm", (0, 0, 1), (0, 1, 2)]


def all_mismatches(world):
    return mismatches(world.rank, world.world_size)


@pytest.mark.parametrize("where", WHERE, ids=str)
def test_lists_and_sparse_tensors_that_differ_are_refused_on_all_ranks_and_nothing_is_written(where):
    assert run_on(where, all_mismatches) == [[], [], []]


def names(world):
    return [name for name, _ in cases(world.rank, world.world_size)]


def test_each_case_has_its_sides():
    assert run_ranks(2, names, backend="shm") == [list(SIDES)] * 2


def takes_another_dtype(world):
    return messages_of_another_dtype(world.rank)


@pytest.mark.parametrize("where", WHERE, ids=str)
def test_a_message_of_another_dtype_is_not_written(where):
    _, (error, received), _ = run_on(where, takes_another_dtype)
    assert "rank 1 waits for 4 elements of float32 with tag 0, but rank 0 sent 4 elements of int32" in error
    assert received == [-1.0] * 4
