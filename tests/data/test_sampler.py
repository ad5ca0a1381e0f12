"""The sampler: torch's sharding to the index, epochs that advance by themselves, and memory that does not grow."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch.utils.data.distributed as torch_distributed
from torch.utils.data import DataLoader as TorchDataLoader

from paceline.data import DistributedSampler
from paceline.errors import DataError
from support.datasets import Numbers
from support.ranks import run_ranks


def all_ranks(size, num_replicas, **kwargs):
    return [DistributedSampler(Numbers(size), num_replicas, rank, **kwargs) for rank in range(num_replicas)]


def peek(sampler):
    return next(iter(sampler))


SIZES = [0, 1, 2, 3, 5, 7, 8, 21, 64, 257]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7, 8])
def test_unshuffled_indices_and_lengths_are_torchs(num_replicas, drop_last):
    for size, rank in itertools.product(SIZES, range(num_replicas)):
        arguments = (Numbers(size), num_replicas, rank, False, 0, drop_last)
        ours, torchs = DistributedSampler(*arguments), torch_distributed.DistributedSampler(*arguments)
        assert list(ours) == list(torchs)
        assert len(ours) == len(torchs)
        assert (ours.num_samples, ours.total_size) == (torchs.num_samples, torchs.total_size)


def test_it_is_torchs_class_too_and_yields_plain_ints():
    sampler = DistributedSampler(Numbers(5000), 2, 1)
    assert isinstance(sampler, torch_distributed.DistributedSampler)
    assert {type(index) for index in sampler} == {int}


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_shuffled_ranks_partition_the_dataset_where_it_divides_evenly(num_replicas):
    for size in (8, 64, 8000):
        assert sorted(itertools.chain(*all_ranks(size, num_replicas))) == list(range(size))


def test_padding_wraps_round_as_often_as_it_must():
    # torch's own rule, written out: three samples for seven ranks, two for ten.
    assert [list(sampler) for sampler in all_ranks(3, 7, shuffle=False)] == [[0], [1], [2], [0], [1], [2], [0]]
    assert [list(sampler) for sampler in all_ranks(2, 5, shuffle=False)] == [[0], [1], [0], [1], [0]]


def test_shuffled_padding_repeats_the_start_of_the_same_epoch():
    order = list(DistributedSampler(Numbers(10), 1, 0, seed=3))
    ranks = [list(sampler) for sampler in all_ranks(10, 4, seed=3)]
    assert [index for step in zip(*ranks, strict=True) for index in step] == order + order[:2]


def test_without_padding_each_sample_comes_exactly_once():
    assert [list(sampler) for sampler in all_ranks(3, 7, shuffle=False, padding=False)] == [
        [0], [1], [2], [], [], [], [],
    ]  # fmt: skip
    for size, num_replicas in ((21, 2), (3, 7), (0, 2), (5000, 7)):
        samplers = all_ranks(size, num_replicas, padding=False)
        assert sorted(itertools.chain(*samplers)) == list(range(size))
        assert sum(map(len, samplers)) == size
        assert max(map(len, samplers)) - min(map(len, samplers)) <= 1


def test_a_global_batch_holds_the_same_samples_for_any_number_of_ranks():
    def global_batches(num_replicas):
        per_rank = [list(sampler) for sampler in all_ranks(4800, num_replicas, seed=5)]
        width = 48 // num_replicas
        return [
            sorted(itertools.chain(*(indices[start : start + width] for indices in per_rank)))
            for start in range(0, 4800 // num_replicas, width)
        ]

    alone = global_batches(1)
    assert all(global_batches(num_replicas) == alone for num_replicas in (2, 3, 4, 6, 48))


def test_without_a_process_group_it_is_a_world_of_one():
    sampler = DistributedSampler(Numbers(4), shuffle=False)
    assert (sampler.num_replicas, sampler.rank, list(sampler)) == (1, 0, [0, 1, 2, 3])


def test_rank_and_number_of_ranks_come_from_the_process_group():
    def place(world):
        sampler = DistributedSampler(Numbers(5), shuffle=False)
        return sampler.rank, sampler.num_replicas, list(sampler)

    assert run_ranks(2, place, timeout_s=30) == [(0, 2, [0, 2, 4]), (1, 2, [1, 3, 0])]


def test_each_pass_takes_the_next_epoch_and_none_repeats_an_order():
    sampler = DistributedSampler(Numbers(1000), 2, 0)
    passes, epochs = [], []
    for _ in range(4):
        passes.append(tuple(sampler))
        epochs.append(sampler.epoch)
    assert epochs == [0, 1, 2, 3]
    assert len(set(passes)) == 4


def test_set_epoch_decides_the_next_pass_and_later_ones_go_on_from_it():
    reference = DistributedSampler(Numbers(100), 2, 0)
    by_epoch = [list(reference) for _ in range(8)]
    sampler = DistributedSampler(Numbers(100), 2, 0)
    sampler.set_epoch(5)
    assert sampler.epoch == 5
    assert [list(sampler), list(sampler)] == by_epoch[5:7]
    sampler.set_epoch(2)
    sampler.set_epoch(1)
    assert [list(sampler), list(sampler)] == by_epoch[1:3]


def test_the_same_epoch_set_again_gives_the_same_order():
    sampler = DistributedSampler(Numbers(100))
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_the_next_seed_is_not_the_next_epoch():
    # torch adds seed and epoch, so that a second run with seed 1 repeats the first run's orders one epoch later.
    by_seed = DistributedSampler(Numbers(1000), seed=1)
    by_epoch = DistributedSampler(Numbers(1000), seed=0)
    by_epoch.set_epoch(1)
    assert list(by_seed) != list(by_epoch)


def test_a_look_at_the_data_leaves_the_epoch_where_it_is():
    looked_at, untouched = all_ranks(1000, 2)
    for epoch in range(3):
        assert peek(looked_at) == looked_at.indices()[0]
        list(itertools.islice(looked_at, 250))
        list(looked_at)
        list(untouched)
        assert (looked_at.epoch, untouched.epoch) == (epoch, epoch)


def test_a_pass_counts_from_the_first_index_beyond_half():
    for taken, epoch in ((499, 0), (500, 0), (501, 1)):
        sampler = DistributedSampler(Numbers(1000))
        unfinished = iter(sampler)
        for _ in range(taken):
            next(unfinished)
        iter(sampler)
        assert sampler.epoch == epoch


def test_an_epoch_of_no_samples_counts_once_it_has_ended():
    empty = DistributedSampler(Numbers(3), 7, 5, padding=False)
    assert (list(empty), list(empty), empty.epoch) == ([], [], 1)


def test_a_pass_left_over_from_before_set_epoch_does_not_count_for_the_new_epoch():
    sampler = DistributedSampler(Numbers(10))
    left_over = iter(sampler)
    sampler.set_epoch(7)
    assert len(list(left_over)) == 10
    iter(sampler)
    assert sampler.epoch == 7


def test_a_look_through_torchs_own_loader_leaves_the_epoch_where_it_is():
    sampler = DistributedSampler(Numbers(1000), 2, 0)
    loader = TorchDataLoader(Numbers(1000), batch_size=32, sampler=sampler)
    first = next(iter(loader)).tolist()
    again = [batch.tolist() for batch in loader]
    assert (again[0], sampler.epoch) == (first, 0)
    assert [batch.tolist() for batch in loader] != again
    assert sampler.epoch == 1


def test_indices_are_those_of_the_pass_and_asking_changes_nothing():
    sampler = DistributedSampler(Numbers(10_000), 3, 1)
    for epoch in range(2):
        given = list(sampler)
        indices = sampler.indices()
        assert (indices.dtype, indices.tolist(), sampler.epoch) == (np.int64, given, epoch)
        assert sampler.indices().tolist() == given


def test_chunks_join_without_a_seam():
    sampler = DistributedSampler(Numbers(400_000), 2, 1, shuffle=False)
    assert list(sampler) == list(range(1, 400_000, 2))


def test_the_first_of_a_thousand_million_indices_takes_no_memory_to_speak_of():
    peek(DistributedSampler(Numbers(10**6)))  # imports and first-use costs
    tracemalloc.start()
    peek(DistributedSampler(Numbers(10**9), 8, 3))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(DistributedSampler(Numbers(10**9), 8, 3)) == 125_000_000
    assert peak_bytes < 100_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_replicas": 4, "rank": 4}, "rank should be from 0 to 3, since num_replicas is 4; got 4"),
        ({"num_replicas": 4, "rank": -1}, "rank should be from 0 to 3, since num_replicas is 4; got -1"),
        ({"rank": 1}, "rank should be from 0 to 0, since num_replicas is 1; got 1"),
        ({"num_replicas": 0, "rank": 0}, "num_replicas should be 1 or more, got 0"),
        ({"num_replicas": 2.0, "rank": 0}, "num_replicas should be an integer, got 2.0 of type float"),
        ({"num_replicas": 2, "rank": "1"}, "rank should be an integer, got '1' of type str"),
        ({"seed": None}, "seed should be an integer, got None of type NoneType"),
        (
            {"num_replicas": 4},
            "num_replicas=4 came without a rank, and the rank can't be told from a world of 1. Give both, or neither.",
        ),
        (
            {"padding": False, "drop_last": True},
            "padding=False keeps every sample and drop_last=True drops the tail: the two contradict each other. "
            "Give padding=False alone to see each sample once, or drop_last=True alone for ranks of equal length.",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(DataError) as caught:
        DistributedSampler(Numbers(10), **arguments)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


def test_a_dataset_beyond_the_limit_is_refused():
    with pytest.raises(
        DataError, match=r"^the dataset has 1099511627777 samples; .* at most 1099511627776 \(2\*\*40\)$"
    ):
        DistributedSampler(Numbers(2**40 + 1))


def test_an_iterator_is_refused_since_it_has_no_second_epoch():
    with pytest.raises(DataError) as caught:
        DistributedSampler(iter([3, 1, 2]))
    assert str(caught.value) == (
        "a list_iterator gives what it has only once, and nothing in the second epoch. Give a sampler, which begins "
        "anew each time, or a list's indices as SubsetRandomSampler(list)."
    )


def test_a_dataset_that_changed_its_length_is_refused():
    dataset = Numbers(10)
    sampler = DistributedSampler(dataset, 2, 1)
    dataset.size = 12
    with pytest.raises(DataError, match=r"^rank 1: the dataset had 10 samples when .* now has 12\. Make a new sampler"):
        iter(sampler)


def test_a_sampler_made_before_the_process_group_refuses_to_give_every_rank_everything():
    early = DistributedSampler(Numbers(10))
    placed = DistributedSampler(Numbers(10), num_replicas=1, rank=0, shuffle=False)

    def iterate(world):
        with pytest.raises(DataError) as caught:
            iter(early)
        return str(caught.value), list(placed)

    for rank, (message, indices) in enumerate(run_ranks(2, iterate, timeout_s=30)):
        assert message == (
            "this sampler was made before torch.distributed was initialised and took its process for the only one, "
            f"but the process is rank {rank} of 2: every rank would see the whole dataset. "
            "Make samplers and loaders after the process group, or give num_replicas and rank."
        )
        assert indices == list(range(10))
