"""Averages in shared memory: right, the same bits everywhere, in any interleaving with collectives."""

import time

import pytest
import torch
import torch.distributed as dist

from support.ranks import expect_errors, run_ranks


def averages():
    return dist.distributed_c10d._get_default_group().averages()


def averages_one(world, numel, dtype):
    shared = averages().allocate(numel, dtype)
    shared.tensor.copy_(torch.arange(numel) % 64 + world.rank)
    averages().wait(averages().launch(shared))
    return shared.tensor.clone()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("numel", [1, 63, 64, 1000, 300_001])
def test_the_average_of_i_plus_rank_is_i_plus_the_mean_rank(world_size, dtype, numel):
    if numel == 300_001 and (world_size == 3 or dtype not in (torch.float32, torch.bfloat16)):
        pytest.skip("large ones in a few forms only")
    expected = (torch.arange(numel) % 64 + (world_size - 1) / 2).to(dtype)
    for result in run_ranks(world_size, averages_one, numel, dtype, backend="shm"):
        assert torch.equal(result, expected)


def averages_at_random(world):
    torch.manual_seed(world.rank)
    shared = averages().allocate(100_003, torch.float32)
    results = []
    for _ in range(3):
        shared.tensor.copy_(torch.randn(100_003, generator=torch.Generator().manual_seed(world.rank)))
        averages().wait(averages().launch(shared))
        results.append(shared.tensor.clone())
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_have_the_same_bits_and_so_has_every_repetition(world_size):
    everyones = run_ranks(world_size, averages_at_random, backend="shm")
    assert all(torch.equal(result, everyones[0][0]) for results in everyones for result in results)


def halves_that_would_overflow(world):
    shared = averages().allocate(4, torch.float16)
    shared.tensor.fill_(60000.0)
    averages().wait(averages().launch(shared))
    return shared.tensor.tolist()


def test_the_average_of_large_halves_is_finite():
    assert run_ranks(2, halves_that_would_overflow, backend="shm") == [[60000.0] * 4] * 2


def interleaves(world):
    tensors = [averages().allocate(50_000 + number, torch.float32) for number in range(8)]
    group = averages()
    for turn in range(3):
        launches = []
        for number, shared in enumerate(tensors):
            shared.tensor.fill_(float(turn + number + 2 * world.rank))
            if number == 3 * world.rank:  # a rank's own collectives come in between, elsewhere on each
                total = torch.tensor([world.rank])
                work = dist.all_reduce(total, async_op=True)
            launches.append(group.launch(shared))
        for number in reversed(range(8)):
            group.wait(launches[number])
            assert torch.equal(tensors[number].tensor, torch.full((50_000 + number,), float(turn + number + 1)))
        work.wait()
        assert total.item() == 1
    return True


def test_averages_and_collectives_do_not_mind_each_others_order():
    assert run_ranks(2, interleaves, backend="shm") == [True, True]


def launches_many(world):
    shared = averages().allocate(64, torch.float32)
    for number in range(3000):
        shared.tensor.fill_(float(number + world.rank * 2))
        averages().wait(averages().launch(shared))
    tensors = [averages().allocate(8, torch.float32) for _ in range(1500)]  # more than there are slots for
    for number, each in enumerate(tensors):
        each.tensor.fill_(float(number + world.rank * 2))
    launches = [averages().launch(each) for each in tensors]
    averages().wait(launches[-1])
    return float(shared.tensor[0]), [float(each.tensor[0]) for each in tensors] == [n + 1.0 for n in range(1500)]


def test_any_number_of_averages_may_be_under_way():
    assert run_ranks(2, launches_many, backend="shm") == [(3000.0, True)] * 2


def launches_other_sizes(world):
    shared = averages().allocate(10 + world.rank, torch.float32)
    averages().wait(averages().launch(shared))


def test_launches_of_other_sizes_are_named():
    errors = expect_errors(2, launches_other_sizes)
    assert any("averages 40 bytes, but rank 1 44. All ranks must average the same" in error for error in errors)


def leaves_the_others_waiting(world):
    shared = averages().allocate(10, torch.float32)
    if world.rank == 1:
        raise ArithmeticError("the loss is no number")
    started = time.monotonic()
    try:
        averages().wait(averages().launch(shared))
    finally:
        assert time.monotonic() - started < 10


def test_a_rank_that_fails_is_missed_with_its_last_words():
    with pytest.raises(
        AssertionError, match=r"(?s)PeerError: rank 0: rank 1 \(pid \d+\) failed.*the loss is no number"
    ):
        run_ranks(2, leaves_the_others_waiting, backend="shm")
