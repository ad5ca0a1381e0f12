"""Every backend passes the battery in every world; and the battery notices a collective that is wrong."""

import contextlib
import hashlib
import importlib
import io

import pytest
import torch
import torch.distributed as dist

from support.battery import BATTERY, applicable, differences, main, same
from support.ranks import RankError, run_ranks

BACKENDS = ["gloo", "shm"]
WORLDS = [("gloo", 2), ("gloo", 3), *(("shm", size) for size in (1, 2, 3, 4, 8))]


def failures(world, names):
    found = {name: differences(name, world.rank, world.world_size) for name in names}
    return {name: texts for name, texts in found.items() if texts}


@pytest.mark.parametrize(("backend", "world_size"), WORLDS)
def test_the_battery_is_passed(backend, world_size):
    importlib.import_module("torch._dynamo")  # for functional collectives: here once, instead of in each rank
    names = applicable(backend, world_size)
    found = run_ranks(world_size, failures, names, backend=backend, timeout_s=60)
    assert found == [{}] * world_size


def sum_of_noise(world):
    t = torch.randn(100_003, generator=torch.Generator().manual_seed(world.rank))
    dist.all_reduce(t)
    return hashlib.sha256(t.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_have_the_same_bits_in_every_life_of_a_job(backend):
    digests = {digest for _ in range(3) for digest in run_ranks(3, sum_of_noise, backend=backend)}
    assert len(digests) == 1


# -- the battery itself ------------------------------------------------------------------------------------------------


def test_half_a_hundred_checks_apply_everywhere_but_in_a_world_of_one():
    assert len(applicable("gloo", 2)) > 50
    assert set(applicable("gloo", 1)) < set(applicable("gloo", 8)) < set(applicable("shm", 8)) == set(BATTERY)
    assert all(check.fn.__doc__ for check in BATTERY.values())


class Done:
    """A Work of nothing."""

    def wait(self):
        return True


def idle(world, spoiled):
    """The failed checks, each run with one of torch's functions doing nothing."""
    found = {}
    for function, name in spoiled:
        original = getattr(dist, function)
        setattr(dist, function, lambda *args, **kwargs: Done())
        try:
            found[name] = len(differences(name, world.rank, world.world_size))
        finally:
            setattr(dist, function, original)
    return found


def test_checks_fail_where_a_collective_does_nothing_and_ranks_stay_in_step():
    spoiled = {
        "all_reduce": "all_reduce_sums",
        "broadcast": "broadcast_in_every_dtype",
        "reduce": "reduce_to_each_root",
        "all_gather": "all_gather_into_a_list",
        "all_gather_into_tensor": "all_gather_into_one_tensor",
        "gather": "gather_to_each_root",
        "scatter": "scatter_from_each_root",
        "reduce_scatter": "reduce_scatter_of_unequal_pieces",
        "reduce_scatter_tensor": "reduce_scatter_from_one_tensor",
        "all_to_all": "all_to_all_of_lists",
        "all_to_all_single": "all_to_all_of_one_tensor",
        "all_gather_object": "objects_are_gathered",
        "broadcast_object_list": "objects_are_broadcast_and_scattered",
        "barrier": "barrier_holds_until_all_have_come",
    }
    counts = run_ranks(2, idle, [*spoiled.items()])
    for name in spoiled.values():
        assert sum(count[name] for count in counts) > 0, name


def raises(world):
    dist.all_reduce = None
    differences("all_reduce_sums", world.rank, world.world_size)


def test_a_check_that_raises_is_named():
    with pytest.raises(RankError, match="all_reduce_sums raised TypeError: 'NoneType' object is not callable"):
        run_ranks(2, raises)


def program(rank, world_size, directory, is_spoiled):
    if is_spoiled:
        dist.all_gather = lambda *args, **kwargs: Done()
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            main("gloo")
    except SystemExit as end:
        return end.code, out.getvalue()
    return None, out.getvalue()


def test_the_program_says_how_many_checks_were_passed_or_fails_with_the_first_that_was_not():
    number = len(applicable("gloo", 1))
    assert run_ranks(1, program, False, join=False) == [(None, f"ok {number} checks\n")]
    [(code, out)] = run_ranks(1, program, True, join=False)
    assert code.startswith("rank 0: data_keeps_its_bits failed: all_gather: got [tensor([0, 0, 0, 0, 0]")
    assert out == ""


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1.0, 3.0]),
        torch.tensor([1, 2]),
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        torch.tensor([1.0]),
        [1.0, 2.0],
        None,
    ],
)
def test_tensors_of_another_value_dtype_or_shape_are_not_the_same(other):
    assert same(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    assert not same(other, torch.tensor([1.0, 2.0]))
    assert not same([other], [torch.tensor([1.0, 2.0])])


def test_a_true_that_is_stored_as_two_is_not_the_same():
    assert not same(torch.tensor([2], dtype=torch.uint8).view(torch.bool), torch.tensor([True]))
