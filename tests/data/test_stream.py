"""Iterable datasets: each sample on one rank and in one worker, in an order that neither changes."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data import DataLoader


class Shuffled(IterableDataset):
    """Numbers in an order that each random state of the process has a part in."""

    epoch = None

    def __init__(self, size=24):
        self.size = size

    def __len__(self):
        return self.size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(self.size))
        random.shuffle(order)
        order = np.random.permutation(order)[torch.randperm(self.size)].tolist()
        yield from (100 * self.epoch + number for number in order)


class SharesOutByWorker(IterableDataset):
    """torch's own recipe, which is to do no harm."""

    def __iter__(self):
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(start, 12, step)


def batches(*args, **kwargs):
    return [batch.tolist() for batch in DataLoader(*args, **kwargs)]


def test_ranks_take_turns():
    parts = [batches(SharesOutByWorker(), 2, num_replicas=3, rank=rank) for rank in range(3)]
    assert parts == [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8, 11]]]


def test_an_end_that_does_not_divide_is_padded_dropped_or_kept():
    def parts(**arguments):
        return [batches(SharesOutByWorker(), 2, num_replicas=5, rank=rank, **arguments) for rank in range(5)]

    assert parts() == [[[0, 5], [10]], [[1, 6], [11]], [[2, 7], [0]], [[3, 8], [1]], [[4, 9], [2]]]
    assert parts(padding=False) == [[[0, 5], [10]], [[1, 6], [11]], [[2, 7]], [[3, 8]], [[4, 9]]]
    assert parts(drop_last=True) == [[[rank, rank + 5]] for rank in range(5)]


def test_streams_that_draw_are_the_same_on_all_ranks_and_each_epoch_another():
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    loaders = [DataLoader(Shuffled(), 3, num_replicas=2, rank=rank, seed=4) for rank in range(2)]
    epochs = []
    for epoch in range(2):
        seen = [list(itertools.chain(*(batch.tolist() for batch in loader))) for loader in loaders]
        assert sorted(itertools.chain(*seen)) == list(range(100 * epoch, 100 * epoch + 24))
        epochs.append([number % 100 for number in seen[0]])
    assert epochs[0] != epochs[1]
    assert torch.equal(state[0], torch.get_rng_state())
    assert (np.random.get_state()[1].tolist(), random.getstate()) == state[1:]


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Shuffled(26), SharesOutByWorker()])
def test_batches_do_not_depend_on_the_number_of_workers(dataset):
    def load(num_workers, **arguments):
        loader = DataLoader(dataset, 2, num_replicas=2, rank=1, num_workers=num_workers, **arguments)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    alone = load(0)
    assert load(1) == alone
    assert load(2, persistent_workers=True) == alone


def test_lengths_are_this_ranks():
    loaders = [DataLoader(Shuffled(25), 4, num_replicas=2, rank=rank, padding=False) for rank in range(2)]
    assert [len(loader) for loader in loaders] == [len(list(loader)) for loader in loaders] == [4, 3]
    assert loaders[0].num_batches_of_ranks() == (4, 3)
    with pytest.raises(TypeError, match="has no len"):
        len(DataLoader(SharesOutByWorker()))


def test_weights_and_global_batches_divide_streams_too():
    def parts(**arguments):
        return [batches(SharesOutByWorker(), num_replicas=2, rank=rank, **arguments) for rank in range(2)]

    assert parts(global_batch_size=6, weights=[2, 1]) == [[[0, 1, 2, 3], [6, 7, 8, 9]], [[4, 5], [10, 11]]]
    loader = DataLoader(SharesOutByWorker(), 3, num_replicas=2, rank=1)
    loader.set_weights([1, 2])
    assert [batch.tolist() for batch in loader] == [[2, 3, 4, 5], [8, 9, 10, 11]]


@pytest.mark.slow
def test_workers_see_the_users_dataset_and_the_loader_keeps_it():
    dataset = Shuffled(4)

    def init(worker_id):
        assert type(torch.utils.data.get_worker_info().dataset) is Shuffled

    loader = DataLoader(dataset, 2, num_workers=1, worker_init_fn=init)
    assert len(list(loader)) == 2
    assert loader.dataset is dataset


def test_a_dataset_that_shards_itself_is_left_alone():
    assert batches(SharesOutByWorker(), 6, sharded=True) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
