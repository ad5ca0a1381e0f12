"""Fingerprints: what the ranks really get, by the contents of the samples."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

import paceline
from paceline.data import DataLoader, DistributedSampler, fingerprint
from paceline.data.digests import digest_of
from paceline.data.fingerprint import compare
from paceline.errors import DataError
from support.datasets import Numbers
from support.ranks import run_ranks


@dataclasses.dataclass
class Point:
    x: int
    name: str


class Stream(IterableDataset):
    def __iter__(self):
        yield from ({"x": torch.tensor([number, number]), "y": str(number)} for number in range(7))


def digests_of(*values):
    return [digest_of(value) for value in values]


def test_ranks_of_a_sharding_loader_partition_the_dataset():
    def look(world):
        loader = DataLoader(Numbers(10), 2, shuffle=True)
        list(loader)
        state = loader.state_dict()
        found = [fingerprint(loader), fingerprint(TorchDataLoader(Numbers(9), sampler=loader.sampler))]
        assert loader.state_dict() == state
        return [(look.is_partition, look.num_samples, look.num_missing, str(look).splitlines()[-1]) for look in found]

    for found in run_ranks(2, look, timeout_s=60):
        assert found == [(True, (5, 5), 0, "No sample comes on two ranks, and none is left out.")] * 2


def test_what_nothing_shards_and_what_is_padded_shows():
    def look(world):
        same = fingerprint(TorchDataLoader(Numbers(4), 2))
        padded = fingerprint(TorchDataLoader(Numbers(5), sampler=TorchDistributedSampler(Numbers(5), shuffle=False)))
        stream = fingerprint(DataLoader(Stream(), 2, padding=False))
        return str(same), str(padded), stream.num_samples, str(stream).splitlines()[-1]

    for same, padded, counts, last in run_ranks(2, look, timeout_s=60):
        assert same.splitlines()[-1] == "All ranks get the same samples: nothing shards them."
        assert padded.splitlines()[-1] == "1 samples come on several ranks: 0."
        assert (counts, last) == ((4, 3), "No sample comes on two ranks.")


def test_looking_at_a_loader_alone_changes_nothing():
    loader = DataLoader(TensorDataset(torch.arange(6)), 4, shuffle=True)
    before = torch.get_rng_state()
    look = paceline.fingerprint(loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert (look.num_samples, look.is_partition) == ((6,), True)
    order = [digest_of((torch.tensor(index),)) for index in loader.indices().tolist()]
    assert look.digests == (hashlib.sha256(b"".join(order)).hexdigest(),)
    stream = DataLoader(Stream(), 3)
    assert fingerprint(stream).digests == fingerprint(stream).digests
    assert stream.state_dict()["epoch"] == 0
    assert fingerprint(DataLoader(Stream(), None)).num_samples == (7,)


def test_generators_that_loaders_and_samplers_hold_are_left_alone():
    held = torch.Generator().manual_seed(1)
    loaders = [
        TorchDataLoader(Numbers(6), 2, shuffle=True, generator=held),
        DataLoader(Numbers(6), 2, sampler=DistributedSampler(RandomSampler(Numbers(6), generator=held))),
    ]
    before = held.get_state()
    for loader in loaders:
        assert fingerprint(loader).num_samples == (6,)
        assert torch.equal(held.get_state(), before)


def test_a_look_at_a_stream_leaves_a_pass_in_workers_and_the_datasets_place_alone():
    class Placed(Stream):
        place = 5

        def state_dict(self):
            return self.place

        def load_state_dict(self, place):
            self.place = place

    loader = DataLoader(Placed(), 2, num_workers=1, persistent_workers=True)
    running = iter(loader)
    assert next(running)["y"] == ["0", "1"]
    loader.dataset.place = 3
    assert fingerprint(loader).num_samples == (7,)
    assert loader.dataset.place == 3
    assert [batch["y"] for batch in running] == [["2", "3"], ["4", "5"], ["6"]]


def test_a_sample_that_cannot_be_loaded_is_told_on_all_ranks():
    class Broken(Numbers):
        def __getitem__(self, index):
            return 1 // index

    def look(world):
        with pytest.raises(DataError) as caught:
            fingerprint(DataLoader(Broken(4), padding=False))
        return str(caught.value)

    assert (
        run_ranks(2, look, timeout_s=60)
        == ["rank 0 could not load its samples to look at them: ZeroDivisionError: integer division or modulo by zero"]
        * 2
    )


def test_a_bare_sampler_is_looked_at_in_its_own_epoch():
    sampler = DistributedSampler(Numbers(6))
    list(sampler)
    loader = TorchDataLoader(Numbers(6), 2, sampler=sampler)
    assert fingerprint(loader).digests == fingerprint(loader).digests
    assert sampler.state_dict()["epoch"] == 1


def test_ranks_that_list_a_dataset_in_different_orders_show():
    a, b, c, d = digests_of("a", "b", "c", "d")
    look = compare([[0, 2], [1, 3]], [[a, c], [c, d]], 4)
    assert (look.num_shared, look.num_alike, look.num_missing, look.is_partition) == (0, 1, 0, False)
    assert str(look).splitlines()[-1] == (
        "1 contents come on several ranks under different indices: the dataset holds equal samples, or the ranks list "
        "it in different orders."
    )
    gap = compare([[0], [2]], [[a], [b]], 9)
    assert "7 samples come on no rank: 1, 3, 4, 5, 6, ...." in str(gap)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), np.zeros(2)),
        (1, 1.0),
        ("1", 1),
        ({"a": 1}, {"b": 1}),
        ([1, [2]], [[1], 2]),
        (None, 0),
        ({3}, {4}),
        (Point(1, "a"), Point(1, "b")),
    ],
)
def test_digests_tell_contents_apart(value, other):
    assert digest_of(value) == digest_of(value) != digest_of(other)
    assert len(digest_of(value)) == 32


def test_digests_do_not_depend_on_the_order_of_a_set_nor_on_what_is_one_object():
    names = {f"name {number}" for number in range(50)}
    assert digest_of(names) == digest_of(frozenset(sorted(names)))
    twice = "".join(["a", "b"])
    assert digest_of([Point(1, twice), Point(1, twice)]) == digest_of([Point(1, "ab"), Point(1, "".join(["a", "b"]))])
