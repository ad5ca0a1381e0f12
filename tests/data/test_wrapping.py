"""Any sampler, shared out: what it draws comes on exactly one rank, whatever it draws from."""

import itertools

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.data import DataLoader, DistributedSampler
from support.datasets import Numbers


class ByLength(Sampler):
    """Batches of about as long samples, of unequal sizes, in random order; no length is known."""

    def __iter__(self):
        ends = sorted(torch.randperm(100)[:20].tolist())
        batches = [list(range(*pair)) for pair in itertools.pairwise([0, *ends, 100])]
        yield from (batches[number] for number in torch.randperm(len(batches)).tolist() if batches[number])


class Told(SequentialSampler):
    """A sampler with an order for each epoch, as those with a set_epoch of their own have."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch * 10 + index for index in range(4)])


class OfNoClass:
    """A batch sampler as some libraries have them: no class of torch's, and for each epoch another length."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4 + 3 * self.epoch

    def __iter__(self):
        return iter([[number, number + 1] for number in range(0, 2 * len(self), 2)])


def on_ranks(make, num_replicas, **arguments):
    return [list(DistributedSampler(make(), num_replicas, rank, **arguments)) for rank in range(num_replicas)]


def interleaved(ranks):
    return [item for step in itertools.zip_longest(*ranks) for item in step if item is not None]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SequentialSampler(Numbers(21)),
        lambda: RandomSampler(Numbers(21)),
        lambda: SubsetRandomSampler(range(50, 71)),
        lambda: WeightedRandomSampler([1.0] * 9 + [50.0], 21),
        lambda: BatchSampler(RandomSampler(Numbers(21)), 4, False),
        ByLength,
        OfNoClass,
    ],
)
def test_ranks_together_get_what_one_gets_alone(make):
    alone = on_ranks(make, 1, seed=3)[0]
    for num_replicas in (2, 3, 5):
        assert interleaved(on_ranks(make, num_replicas, seed=3, padding=False)) == alone


def test_what_a_random_sampler_draws_follows_seed_and_epoch_and_leaves_the_process_as_it_is():
    before = torch.get_rng_state()
    first, same, other = (DistributedSampler(RandomSampler(Numbers(30)), seed=seed) for seed in (1, 1, 2))
    epochs = [list(first), list(first)]
    torch.manual_seed(99)
    assert [list(same), list(same)] == epochs
    torch.set_rng_state(before)
    assert list(other) not in epochs
    assert epochs[0] != epochs[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_the_samplers_own_still_matters():
    def draw(seed):
        return list(DistributedSampler(RandomSampler(Numbers(30), generator=torch.Generator().manual_seed(seed))))

    assert draw(1) == draw(1) != draw(2)


def test_padding_and_dropping_are_as_for_datasets():
    def make():
        return SequentialSampler(Numbers(7))

    assert on_ranks(make, 3) == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    assert on_ranks(make, 3, drop_last=True) == [[0, 3], [1, 4], [2, 5]]
    assert on_ranks(make, 3, padding=False) == [[0, 3, 6], [1, 4], [2, 5]]
    assert on_ranks(lambda: SequentialSampler(Numbers(2)), 5) == [[0], [1], [0], [1], [0]]


def test_lengths_are_those_of_what_comes_and_unknown_ones_say_so():
    assert [len(DistributedSampler(SequentialSampler(Numbers(7)), 3, r, padding=False)) for r in range(3)] == [3, 2, 2]
    with pytest.raises(TypeError, match=r"^ByLength, which this sampler wraps, has no length$"):
        len(DistributedSampler(ByLength()))


def test_the_epoch_advances_by_itself_and_reaches_samplers_that_want_to_be_told():
    sampler = DistributedSampler(Told(Numbers(4)))
    assert [list(sampler) for _ in range(2)] == [[0, 1, 2, 3], [10, 11, 12, 13]]
    sampler.set_epoch(5)
    assert list(sampler) == [50, 51, 52, 53]


def test_a_sampler_may_have_another_length_in_each_epoch():
    loader = DataLoader(Numbers(99), batch_sampler=DistributedSampler(OfNoClass(), 2, 0))
    epochs = []
    for _ in range(2):
        running = iter(loader)
        epochs.append([batch.tolist() for batch in running])
        assert len(loader) == len(running) == len(epochs[-1])
    assert epochs == [[[0, 1], [4, 5]], [[0, 1], [4, 5], [8, 9], [12, 13]]]
    running = iter(loader)
    assert [next(running).tolist() for _ in range(5)][-1] == [16, 17]
    assert loader.state_dict()["consumed"] == 10


def test_a_pass_over_a_sampler_counts_beyond_its_half():
    for taken, epoch in ((300, 0), (301, 1)):
        sampler = DistributedSampler(SequentialSampler(Numbers(600)))
        running = iter(sampler)
        for _ in range(taken):
            next(running)
        iter(sampler)
        assert sampler.epoch == epoch


def test_loaders_share_out_samplers_and_batch_samplers_that_are_wrapped():
    def load(rank):
        weighted = DistributedSampler(SubsetRandomSampler(range(8, 16)), 2, rank)
        batches = DistributedSampler(BatchSampler(SequentialSampler(Numbers(8)), 3, False), 2, rank, padding=False)
        single = DataLoader(Numbers(16), 2, sampler=weighted)
        whole = DataLoader(Numbers(8), batch_sampler=batches)
        assert len(single) == len(list(single)) == 2
        assert whole.indices().tolist() == [index for batch in whole for index in batch.tolist()]
        return [index for batch in single for index in batch.tolist()], [batch.tolist() for batch in whole]

    (first, some), (second, others) = load(0), load(1)
    assert sorted(first + second) == list(range(8, 16))
    assert (some, others) == ([[0, 1, 2], [6, 7]], [[3, 4, 5]])


@pytest.mark.parametrize("deep", [False, True])
def test_wrapping_what_shards_already_is_warned_of(deep):
    sharded = TorchDistributedSampler(Numbers(8), 2, 1)
    kind = "BatchSampler" if deep else "DistributedSampler"
    expected = f"^rank 1: the {kind} given to DistributedSampler gives this rank's share already. Sharded twice, "
    with pytest.warns(UserWarning, match=expected):
        DistributedSampler(BatchSampler(sharded, 2, False) if deep else sharded, 2, 1)
