"""What is noticed of data that is sharded twice or not at all; and that nobody waits for that."""

import linecache
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, Subset, random_split
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.data import DataLoader, DistributedSampler, suspicions
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
    # The line that is blamed is the user's loop.
    assert {linecache.getline(warning.filename, warning.lineno).strip() for warning in caught} <= {"list(loader)"}
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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (lambda rank: {"seed": rank}, "seed=0, but on rank 1 it has seed=1"),
        (lambda rank: {"batch_size": 2 + rank}, "global_batch_size=4, but on rank 1 it has global_batch_size=6"),
        (lambda rank: {"global_batch_size": 6, "weights": [[1, 2], [2, 1]][rank]},
         "weights=[1.0, 2.0], but on rank 1 it has weights=[2.0, 1.0]"),
        (lambda rank: {"padding": rank == 0}, "padding=True, but on rank 1 it has padding=False"),
    ],
)  # fmt: skip
def test_ranks_that_deal_by_different_arguments_are_told_so_once(arguments, named):
    def load(world):
        return heard(world, lambda rank: DataLoader(Numbers(24), **arguments(rank)))

    assert run_ranks(2, load, timeout_s=60)[0] == [
        f"rank 0: this loader has {named}. Ranks that do not deal alike give some samples twice and others never: make "
        "loaders with the same arguments on all ranks, and load the same state."
    ]


def test_a_state_that_one_rank_alone_has_loaded_is_told_once():
    def load(world):
        def make(rank):
            loader = DataLoader(Numbers(24), 2, shuffle=True)
            if rank == 0:
                loader.load_state_dict({**loader.state_dict(), "epoch": 3, "consumed": 8})
            return loader

        return heard(world, make, 3)

    first, second = run_ranks(2, load, timeout_s=60)
    assert ["epoch=3, but on rank 1 it has epoch=0" in said for said in first] == [True]
    assert ["epoch=0, but on rank 0 it has epoch=3" in said for said in second] == [True]


def test_streams_that_begin_differently_on_each_rank_are_said_once():
    class HidesThatItShards(IterableDataset):
        def __init__(self, rank):
            self.rank = rank

        def __iter__(self):
            yield from range(self.rank, 24, 2)

    def load(world):
        return heard(world, lambda rank: DataLoader(HidesThatItShards(rank), 2, num_workers=rank))

    for rank, said in enumerate(run_ranks(2, load, timeout_s=60)):
        assert said == [
            f"rank {rank}: the stream that this loader shards began with another sample on rank {1 - rank}. Either it "
            "shares itself out, and most samples come on no rank: then give sharded=True. Or it shuffles by a "
            "generator of its own: seed that alike, or draw from torch's, numpy's or Python's global one."
        ]


@pytest.mark.slow
def test_workers_that_read_a_stream_from_different_samples_on_are_said_once():
    class SharesOut(IterableDataset):
        start = 0

        def __iter__(self):
            yield from range(self.start, 24, 2)

    class Init:
        def __call__(self, worker_id):
            torch.utils.data.get_worker_info().dataset.start = worker_id

    loader = DataLoader(SharesOut(), 2, num_workers=2, worker_init_fn=Init())
    with pytest.warns(UserWarning, match=r"^two workers read a SharesOut from different samples on: if it is shared"):
        list(loader)
    list(loader)


def test_what_cannot_be_digested_and_a_store_that_has_gone_do_not_stop_a_pass(monkeypatch):
    class Gone:
        def __getattr__(self, name):
            raise dist.DistNetworkError("gone")

    def load(world):
        unsharded = DataLoader([lambda: 0] * 8, 2, sharded=True, collate_fn=list)
        assert len([*unsharded, *unsharded]) == 8
        monkeypatch.setattr(suspicions, "_store", Gone)
        loader = DataLoader(Numbers(8), 2)
        return len([*loader, *loader])

    assert run_ranks(2, load, timeout_s=60) == [4, 4]


def test_loaders_that_one_function_makes_are_told_apart_by_who_calls_it():
    def make(size):
        return DataLoader(Numbers(size), 2)

    def load(world):
        def train_loader(rank):
            if rank == 0:
                list(make(3))
            return make(40)

        return heard(world, train_loader)

    assert run_ranks(2, load, timeout_s=60) == [[], []]


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
