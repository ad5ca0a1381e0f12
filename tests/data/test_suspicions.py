"""What is noticed of data that is sharded twice or not at all; and that nobody waits for that."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, Subset, random_split
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.data import DataLoader, DistributedSampler
from support.datasets import Numbers
from support.ranks import run_ranks


class KnowsItsRank(IterableDataset):
    def __iter__(self):
        yield from range(dist.get_rank(), 8, 2)


def heard(world, make, num_passes=2):
    """What this rank was warned of in some passes, between which all ranks meet."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = make(world.rank)
        for _ in range(num_passes):
            list(loader)
            world.barrier()
    return [str(warning.message) for warning in caught]


def test_the_same_first_batch_on_all_ranks_is_said_once():
    def load(world):
        return heard(world, lambda rank: DataLoader(Numbers(8), 2, sampler=range(8)), 4)

    for rank, said in enumerate(run_ranks(2, load, timeout_s=60)):
        assert said == [
            f"rank {rank}: rank {1 - rank} loaded the same first batch: nothing shards this loader, and every rank "
            "trains on the same samples. Wrap its sampler in a paceline DistributedSampler; or leave out the sampler, "
            "or sharded=True."
        ]


def test_random_splits_that_differ_between_ranks_are_said_once():
    def load(world):
        def make(rank):
            torch.manual_seed(rank)
            return DataLoader(random_split(Numbers(40), [20, 20])[0], 4)

        return heard(world, make)

    for rank, said in enumerate(run_ranks(2, load, timeout_s=60)):
        assert said == [
            f"rank {rank}: the loader shards its dataset, but rank {1 - rank} gave it another one: it is of another "
            "length, or a Subset of other samples. Either it was sharded before, and most samples come on no rank: "
            "then give sharded=True. Or random_split drew differently on each rank: seed it alike."
        ]


def test_nothing_is_said_where_all_is_well_nor_where_a_rank_has_loaders_of_its_own():
    def load(world):
        def make(rank):
            if rank == 0:
                list(DataLoader(Numbers(3), sharded=True))
            shared = DataLoader(Subset(Numbers(40), range(0, 40, 2)), 4, shuffle=True)
            list(DataLoader(Subset(Numbers(40), range(rank, 40, 2)), 4, sharded=True))
            list(DataLoader(Numbers(40), 4, sampler=DistributedSampler(Numbers(40))))
            # Ranks that share a model's work, and so its samples, have asked for that.
            list(DataLoader(Numbers(40), 4, sampler=TorchDistributedSampler(Numbers(40), 2, 0)))
            return shared

        return heard(world, make)

    assert run_ranks(3, load, timeout_s=60) == [[], [], []]


def test_a_stream_that_asks_for_its_rank_is_said_to_be_shared_out_twice():
    with pytest.warns(UserWarning, match=r"^KnowsItsRank\.__iter__ asks for its rank: if samples are shared out there"):
        DataLoader(KnowsItsRank(), num_replicas=2, rank=0)
    DataLoader(KnowsItsRank(), sharded=True)
    DataLoader(KnowsItsRank())


def test_a_worker_init_that_shares_out_is_said_to_do_it_twice():
    def init(worker_id):
        torch.utils.data.get_worker_info().dataset.start = worker_id

    with pytest.warns(UserWarning, match=r"^worker_init_fn asks for get_worker_info: if samples are shared out there"):
        DataLoader(KnowsItsRank(), num_workers=1, worker_init_fn=init, num_replicas=2, rank=0)
