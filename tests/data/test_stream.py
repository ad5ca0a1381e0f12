"""Iterable datasets: each sample on one rank and in one worker, in an order that neither changes."""

import copy
import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data import DataLoader
from paceline.errors import DataError
from support.ranks import run_ranks


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


class Noise:
    """A collate function that draws."""

    def __call__(self, samples):
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])


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


def drawn(rank, num_workers=0, **arguments):
    torch.manual_seed(3)
    loader = DataLoader(
        Shuffled(8), 2, num_replicas=2, rank=rank, collate_fn=Noise(), num_workers=num_workers, **arguments
    )
    return [[batch.tolist() for batch in loader] for _ in range(2)]


def test_what_is_drawn_when_batches_are_collated_differs_by_rank_and_epoch_and_comes_again():
    assert drawn(0) == drawn(0)
    given = [drawn(rank, generator=torch.Generator().manual_seed(0)) for rank in range(2)]
    for first, second in ((drawn(0), drawn(1)), given):
        assert len({*map(tuple, itertools.chain(*first, *second))}) == 8


@pytest.mark.slow
def test_what_is_drawn_when_batches_are_collated_does_not_depend_on_the_number_of_workers():
    assert drawn(1, 1) == drawn(1, 2, persistent_workers=True) == drawn(1)


def test_a_loader_made_before_the_process_group_refuses_to_give_every_rank_everything():
    early = DataLoader(SharesOutByWorker())

    def load(world):
        with pytest.raises(
            DataError, match=r"^this loader was made before torch\.distributed was initialised and took"
        ):
            iter(early)

    run_ranks(2, load, timeout_s=30)


@pytest.mark.slow
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_workers_of_a_copied_loader_that_live_on_are_told_of_the_next_epoch(copied):
    loader = copied(DataLoader(Shuffled(4), 4, num_workers=1, persistent_workers=True))
    assert [sorted(batch.tolist()) for _ in range(2) for batch in loader] == [[0, 1, 2, 3], [100, 101, 102, 103]]


def test_passes_that_overlap_keep_to_their_own_epochs():
    loader = DataLoader(Shuffled(6), 2)
    first, expected = iter(loader), batches(Shuffled(6), 2)
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert epochs[0] == expected != epochs[1]
    assert [batch.tolist() for batch in first] == expected


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
