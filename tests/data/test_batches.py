"""Global batches: the same samples on any number of ranks, divided equally or by weights."""

import itertools

import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler

import paceline
from paceline import DistributedDataParallel, global_mean
from paceline.data import BatchSampler, DataLoader, DistributedSampler, measured_weights
from paceline.data.shares import Portion, Shares, apportion
from paceline.errors import DataError
from support.datasets import Numbers
from support.ranks import run_ranks


def global_batches(size, num_replicas, **arguments):
    loaders = [DataLoader(Numbers(size), num_replicas=num_replicas, rank=r, **arguments) for r in range(num_replicas)]
    steps = itertools.zip_longest(*loaders, fillvalue=torch.empty(0))
    return [sorted(int(index) for part in step for index in part.tolist()) for step in steps]


@pytest.mark.parametrize("arguments", [{}, {"padding": False}, {"drop_last": True}])
@pytest.mark.parametrize("size", [96, 101, 5])
def test_every_global_batch_holds_the_same_samples_on_any_number_of_ranks(size, arguments):
    alone = global_batches(size, 1, global_batch_size=12, shuffle=True, seed=3, **arguments)
    for num_replicas in (2, 3, 4, 5):
        assert global_batches(size, num_replicas, global_batch_size=12, shuffle=True, seed=3, **arguments) == alone


def test_the_last_global_batch_is_filled_dropped_or_dealt_as_it_is():
    assert global_batches(10, 2, global_batch_size=4) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9]]
    assert global_batches(10, 2, global_batch_size=4, drop_last=True) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert global_batches(10, 3, global_batch_size=4, padding=False) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("total", "weights", "sizes"),
    [
        (10, (1.0, 1.0, 1.0, 1.0), (3, 3, 2, 2)),
        (8, (3.0, 1.0), (6, 2)),
        (10, (0.5, 0.25, 0.25), (5, 3, 2)),
        (3, (1.0, 1.0, 1.0, 1.0), (1, 1, 1, 0)),
        (0, (2.0, 1.0), (0, 0)),
        (7, (1.0, 2.0, 4.0), (1, 2, 4)),
    ],
)
def test_shares_follow_the_weights_as_evenly_as_whole_numbers_allow(total, weights, sizes):
    assert apportion(total, weights) == sizes


def test_no_rank_gets_more_of_a_smaller_batch():
    weights = (1.0, 1.7, 0.3, 2.2)
    for total in range(60):
        assert all(a <= b for a, b in zip(apportion(total, weights), apportion(total + 1, weights), strict=True))


def test_weights_divide_every_global_batch():
    loaders = [DataLoader(Numbers(22), 4, weights=[3, 1], num_replicas=2, rank=r, padding=False) for r in range(2)]
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [
        [[0, 1, 2, 3, 4, 5], [8, 9, 10, 11, 12, 13], [16, 17, 18, 19, 20]],
        [[6, 7], [14, 15], [21]],
    ]
    assert [loader.batch_size for loader in loaders] == [6, 2]


def test_other_weights_take_over_with_the_next_pass_and_the_place_in_the_epoch_stays():
    loaders = [DataLoader(Numbers(24), 4, num_replicas=2, rank=r) for r in range(2)]
    first = [next(iter(loader)).tolist() for loader in loaders]
    for loader in loaders:
        loader.load_state_dict(loader.state_dict())
        loader.set_weights([5, 3])
    rest = [[batch.tolist() for batch in loader] for loader in loaders]
    assert first == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert rest == [[[8, 9, 10, 11, 12], [16, 17, 18, 19, 20]], [[13, 14, 15], [21, 22, 23]]]


def test_unequal_numbers_of_batches_are_known_in_advance():
    loader = DataLoader(Numbers(17), 4, num_replicas=3, rank=1, padding=False)
    assert loader.num_batches_of_ranks() == (2, 2, 2)
    assert DataLoader(Numbers(13), 4, num_replicas=3, rank=1, padding=False).num_batches_of_ranks() == (2, 1, 1)
    assert DataLoader(Numbers(13), 4, num_replicas=3, rank=1, drop_last=True).num_batches_of_ranks() == (1, 1, 1)
    weighted = DataLoader(Numbers(17), weights=[2, 1], global_batch_size=6, num_replicas=2, rank=1, padding=False)
    assert weighted.num_batches_of_ranks() == (3, 3)


def test_numbers_of_batches_that_only_the_end_can_tell_are_refused():
    class Endless(Sampler):
        def __iter__(self):
            return itertools.count()

    class Stream(IterableDataset):
        def __iter__(self):
            return itertools.count()

    for name, loader in (
        ("Endless", DataLoader(Numbers(8), 2, sampler=DistributedSampler(Endless()))),
        ("Stream", DataLoader(Stream())),
    ):
        with pytest.raises(DataError) as caught:
            loader.num_batches_of_ranks()
        assert str(caught.value) == f"a {name} does not tell its length, so the batches can't be counted"


def test_a_batch_sampler_shards_whatever_sampler_it_is_given():
    def batches(rank, **arguments):
        sampler = DistributedSampler(SequentialSampler(Numbers(10)), 2, rank)
        return list(BatchSampler(sampler, **arguments))

    assert [batches(rank, batch_size=2) for rank in range(2)] == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]
    assert [batches(rank, global_batch_size=6, drop_last=True) for rank in range(2)] == [[[0, 1, 2]], [[3, 4, 5]]]
    assert list(BatchSampler(SequentialSampler(Numbers(5)), 2, True)) == [[0, 1], [2, 3]]
    assert paceline.BatchSampler is BatchSampler


def test_one_line_of_a_script_for_one_process_is_enough():
    def load(world):
        return list(BatchSampler(RandomSampler(Numbers(12)), 3))

    first, second = run_ranks(2, load, timeout_s=60)
    assert sorted(itertools.chain(*first, *second)) == list(range(12))


def test_ranks_that_measured_their_speed_share_by_it():
    def weigh(world):
        return measured_weights([30.0, 10.0][world.rank])

    assert run_ranks(2, weigh, timeout_s=60) == [[0.75, 0.25]] * 2
    with pytest.raises(DataError, match=r"^rank 0: samples_per_s should be positive and finite, got 0\.0$"):
        measured_weights(0)


def test_unequal_ranks_train_exactly_as_one_process():
    features = torch.randn(42, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def train(world):
        model = torch.nn.Linear(5, 1, dtype=torch.float64)
        torch.nn.init.ones_(model.weight)
        model = DistributedDataParallel(model)
        loader = DataLoader(features, global_batch_size=9, weights=[5, 2, 1][: world.world_size], padding=False)
        for x in loader:
            model.zero_grad()
            global_mean((model(x) ** 2).sum(), len(x)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        return model.module.weight.detach()

    alone = run_ranks(1, train, timeout_s=60)[0]
    for weight in run_ranks(3, train, timeout_s=60):
        torch.testing.assert_close(weight, alone, rtol=1e-13, atol=0)


def test_portions_count_what_all_take_together():
    shares = Shares(4, (1.0, 1.0))
    assert [Portion(shares, 0, 0, 10, tail).num_dealt for tail in ("pad", "drop", "keep")] == [12, 8, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 4, "global_batch_size": 8},
         "batch_size=4 is of this rank and global_batch_size=8 of all together. Give one of them."),
        ({"global_batch_size": 0}, "global_batch_size should be 1 or more, got 0"),
        ({"global_batch_size": 1, "num_replicas": 2, "rank": 0},
         "a global batch of 1 leaves nothing for rank 1 of 2, whose weight is 1 of 2. Make the global batch larger, or "
         "the weights less unequal."),
        ({"weights": [1, 2]}, "weights should hold one number for each of 1 ranks, got 2"),
        ({"weights": [1, 0], "num_replicas": 2, "rank": 0},
         "weights should be positive and finite, got 0.0 for rank 1"),
        ({"weights": [1], "batch_size": None},
         "weights divide batches, and batch_size=None makes none. Give batch_size or global_batch_size."),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(DataError) as caught:
        DataLoader(Numbers(8), **arguments)
    assert str(caught.value) == message


def test_a_batch_sampler_wants_one_size():
    with pytest.raises(DataError) as caught:
        BatchSampler(SequentialSampler(Numbers(8)))
    assert str(caught.value) == (
        "a BatchSampler wants one of batch_size, of this rank, and global_batch_size; got batch_size=None and "
        "global_batch_size=None"
    )


def test_weights_for_batches_that_are_not_the_loaders_own_are_refused():
    loader = DataLoader(Numbers(8), batch_sampler=BatchSampler(DistributedSampler(Numbers(8)), 2))
    with pytest.raises(
        DataError, match=r"^set_weights divides global batches, and this loader makes none of its own\."
    ):
        loader.set_weights([1])
