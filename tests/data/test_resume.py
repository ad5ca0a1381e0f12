"""Resuming: whatever changes between two parts of an epoch, each sample comes exactly once."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import (
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

from paceline.data import BatchSampler, DataLoader, DistributedSampler
from paceline.data.shares import Portion, Shares, equal_shares
from paceline.errors import DataError
from support.datasets import Numbers


class Counting(IterableDataset):
    """The numbers below a size; how many were read, in all."""

    def __init__(self, size):
        self.size = size
        self.num_read = 0

    def __iter__(self):
        for number in range(self.size):
            self.num_read += 1
            yield number


class Seekable(Counting):
    """The same, with a state: the next number, at which it goes on."""

    position = 0

    def __iter__(self):
        while self.position < self.size:
            self.num_read += 1
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Sized(Counting):
    def __len__(self):
        return self.size


def flat(batches):
    return [index for batch in batches for index in batch.tolist()]


def take_together(loaders, num_steps):
    """The samples of the next steps of all ranks, in order of step and rank; whether all have come to their end."""
    passes = [iter(loader) for loader in loaders]
    taken = []
    for _ in range(num_steps):
        step = [next(rank, None) for rank in passes]
        if all(batch is None for batch in step):
            return taken, True
        taken += flat(batch for batch in step if batch is not None)
    return taken, False


def on_ranks(dataset, num_replicas, **arguments):
    return [DataLoader(dataset, num_replicas=num_replicas, rank=rank, **arguments) for rank in range(num_replicas)]


def test_a_thousand_resizes_over_an_epoch_lose_and_repeat_nothing():
    rng, size, state, taken, resizes, done = random.Random(0), 25_003, None, [], 0, False
    while not done:
        sizes = {"num_replicas": rng.randint(1, 5), "batch_size": rng.randint(1, 10)}
        loaders = on_ranks(Numbers(size), **sizes, shuffle=True, padding=False, seed=5)
        for loader in loaders if state else ():
            loader.load_state_dict(state)
        more, done = take_together(loaders, rng.randint(1, 2))
        taken += more
        states = [loader.state_dict() for loader in loaders]
        # Where the last batches are unequal, a rank without one has ended already.
        assert len({(s["epoch"], s["consumed"]) for s in states} - {(0, size), (1, 0)}) <= 1
        state, resizes = states[0], resizes + 1
    assert resizes > 1000
    assert sorted(taken) == list(range(size))
    assert (state["epoch"], state["consumed"]) == (1, 0)


@pytest.mark.parametrize("seed", range(3))
def test_portions_of_any_shares_cut_an_epoch_into_exact_parts(seed):
    rng = random.Random(seed)
    for _ in range(300):
        length, start, seen = rng.randint(0, 200), 0, []
        while start < length:
            num_replicas = rng.randint(1, 5)
            weights = tuple(rng.choice([1.0, 2.0, 3.5]) for _ in range(num_replicas))
            shares = rng.choice([equal_shares(num_replicas), Shares(rng.randint(4, 9) * num_replicas, weights)])
            portions = [Portion(shares, rank, start, length, "keep") for rank in range(num_replicas)]
            rounds = rng.randint(1, 6)
            taken = [min(rounds * shares.sizes[rank], part.num_samples) for rank, part in enumerate(portions)]
            for part, count in zip(portions, taken, strict=True):
                seen += part.positions(0, count).tolist()
            start = min(start + rounds * shares.total, length)
        assert sorted(seen) == list(range(length))


def test_the_order_goes_on_as_if_nothing_had_happened():
    unbroken = flat(DataLoader(Numbers(97), 8, shuffle=True, seed=3))
    first = DataLoader(Numbers(97), 8, shuffle=True, seed=3)
    begun = flat(itertools.islice(first, 5))
    second = DataLoader(Numbers(97), 3, shuffle=True, seed=3)
    second.load_state_dict(first.state_dict())
    assert begun + flat(second) == unbroken
    assert flat(second) == flat(first) == _epoch(Numbers(97), 1, seed=3).tolist()


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_what_workers_have_ready_does_not_count(persistent_workers):
    loader = DataLoader(Numbers(64), 4, shuffle=True, num_workers=2, persistent_workers=persistent_workers)
    unbroken = DataLoader(Numbers(64), 4, shuffle=True)
    list(loader)
    begun = flat(itertools.islice(loader, 3))
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (1, 12)
    resumed = DataLoader(Numbers(64), 6, shuffle=True)
    resumed.load_state_dict(state)
    list(unbroken)
    assert begun + flat(resumed) == flat(unbroken)
    loader.load_state_dict(state)
    assert flat(loader) == _epoch(Numbers(64), 1)[12:].tolist()


def _epoch(dataset, epoch, seed=0):
    sampler = DistributedSampler(dataset, seed=seed)
    sampler.set_epoch(epoch)
    return sampler.indices()


def test_a_state_tells_epoch_consumed_and_of_which_order():
    loader = DataLoader(Numbers(30), 4, shuffle=True, num_replicas=3, rank=1, seed=9)
    assert loader.state_dict() == {"epoch": 0, "consumed": 0, "length": 30, "seed": 9, "shuffle": True}
    running = iter(loader)
    next(running)
    assert loader.state_dict()["consumed"] == loader.sampler.state_dict()["consumed"] == 12
    next(running)
    next(running)
    assert loader.state_dict() == {"epoch": 0, "consumed": 30, "length": 30, "seed": 9, "shuffle": True}
    assert next(running, None) is None
    assert loader.state_dict() == {"epoch": 1, "consumed": 0, "length": 30, "seed": 9, "shuffle": True}


def test_a_state_saved_after_the_last_batch_resumes_with_nothing_left_and_then_the_next_epoch():
    first = DataLoader(Numbers(8), 4, shuffle=True)
    running = iter(first)
    next(running)
    next(running)
    resumed = DataLoader(Numbers(8), 4, shuffle=True)
    resumed.load_state_dict(first.state_dict())
    assert flat(resumed) == []
    assert flat(resumed) == _epoch(Numbers(8), 1).tolist()


def test_a_look_at_the_data_and_the_epoch_that_was_loaded_keep_the_place_and_another_epoch_does_not():
    state = {"epoch": 4, "consumed": 20, "length": 50, "seed": 0, "shuffle": True}
    loader = DataLoader(Numbers(50), 5, shuffle=True)
    loader.load_state_dict(state)
    next(iter(loader))
    loader.set_epoch(4)
    assert flat(loader) == _epoch(Numbers(50), 4)[20:].tolist()
    loader.set_epoch(4)
    assert flat(loader) == _epoch(Numbers(50), 4).tolist()
    loader.load_state_dict(state)
    loader.set_epoch(5)
    assert flat(loader) == _epoch(Numbers(50), 5).tolist()


def test_length_is_the_epochs_and_that_of_a_pass_is_what_is_left():
    loader = DataLoader(Numbers(50), 4, num_replicas=2, rank=0)
    loader.load_state_dict({"epoch": 0, "consumed": 16, "length": 50, "seed": 0, "shuffle": False})
    assert (len(loader), len(iter(loader)), len(list(loader)), len(loader.indices())) == (7, 5, 5, 17)


def test_a_bare_sampler_counts_what_it_has_given_and_resumes():
    sampler = DistributedSampler(Numbers(20_000), 4, 1)
    running = iter(sampler)
    taken = [next(running) for _ in range(777)]
    state = sampler.state_dict()
    assert state["consumed"] == 777 * 4
    rest = DistributedSampler(Numbers(20_000), 4, 1)
    rest.load_state_dict(state)
    assert taken + list(rest) == sampler.indices().tolist()
    assert rest.state_dict()["epoch"] == 1


def test_a_sampler_in_torchs_loader_resumes_too():
    sampler = DistributedSampler(Numbers(60), 2, 0, padding=False)
    loader = TorchDataLoader(Numbers(60), 5, sampler=sampler)
    taken = flat(itertools.islice(loader, 4))
    sampler.load_state_dict(sampler.state_dict())
    assert taken + flat(loader) == _epoch(Numbers(60), 0)[::2].tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightedRandomSampler([1.0, 5.0, 2.0] * 20, 60),
        lambda: SubsetRandomSampler(range(100, 160), generator=torch.Generator().manual_seed(4)),
        lambda: TorchBatchSampler(SequentialSampler(Numbers(180)), 3, False),
    ],
)
def test_wrapped_samplers_resume_on_any_number_of_ranks(make):
    unbroken = list(DistributedSampler(make(), 1, 0, seed=2))
    for before, after in ((2, 3), (4, 1)):
        samplers = [DistributedSampler(make(), before, rank, padding=False, seed=2) for rank in range(before)]
        passes = [iter(sampler) for sampler in samplers]
        taken = [next(rank) for _ in range(24 // before) for rank in passes]
        state = samplers[0].state_dict()
        assert state["consumed"] == 24
        rest = [DistributedSampler(make(), after, rank, padding=False, seed=2) for rank in range(after)]
        for sampler in rest:
            sampler.load_state_dict(state)
        taken += [item for step in itertools.zip_longest(*rest) for item in step if item is not None]
        assert taken == unbroken


def test_under_batches_of_another_maker_a_sampler_counts_what_is_drawn_from_it():
    class Doubling(TorchBatchSampler):
        def __iter__(self):
            items, size = iter(self.sampler), 1
            while batch := list(itertools.islice(items, size)):
                yield batch
                size *= 2

    sampler = DistributedSampler(Numbers(100), 2, 1)
    loader = DataLoader(Numbers(100), batch_sampler=Doubling(sampler, 1, False))
    taken = flat(itertools.islice(loader, 3))
    assert sampler.state_dict()["consumed"] == 14
    rest = DistributedSampler(Numbers(100), 2, 1)
    rest.load_state_dict(sampler.state_dict())
    assert taken + list(rest) == sampler.indices().tolist()


def test_whole_batches_of_a_batch_sampler_are_resumed_through_a_loader():
    def loader(rank, num_replicas):
        batches = TorchBatchSampler(SequentialSampler(Numbers(40)), 4, False)
        return DataLoader(Numbers(40), batch_sampler=DistributedSampler(batches, num_replicas, rank, padding=False))

    first = [loader(rank, 2) for rank in range(2)]
    taken, _ = take_together(first, 2)
    rest = [loader(rank, 3) for rank in range(3)]
    for part in rest:
        part.load_state_dict(first[0].state_dict())
    more, _ = take_together(rest, 99)
    assert taken + more == list(range(40))


@pytest.mark.parametrize("dataset", [Counting, Seekable])
def test_a_stream_resumes_on_any_number_of_ranks_and_workers(dataset):
    rng, state, taken, done = random.Random(1), None, [], False
    while not done:
        num_replicas, batch_size = rng.randint(1, 4), rng.randint(1, 8)
        loaders = [
            DataLoader(dataset(200), batch_size, num_replicas=num_replicas, rank=rank, padding=False)
            for rank in range(num_replicas)
        ]
        for loader in loaders if state else ():
            loader.load_state_dict(state)
        more, done = take_together(loaders, rng.randint(1, 3))
        taken += more
        state = loaders[0].state_dict()
    assert sorted(taken) == list(range(200))
    assert state["epoch"] == 1


def test_a_stream_with_a_state_is_entered_there_and_others_are_read_up_to_there():
    for make, num_read in ((Seekable, 60), (Counting, 100)):
        first = DataLoader(make(100), 4)
        begun = flat(itertools.islice(first, 10))
        assert begun == list(range(40))
        resumed = DataLoader(make(100), 5)
        resumed.load_state_dict(first.state_dict())
        assert flat(resumed) == list(range(40, 100))
        assert resumed.dataset.num_read == num_read


def test_a_state_at_the_end_of_a_stream_that_begins_anew_there_has_nothing_left():
    for num_replicas, size, steps in ((2, 7, 2), (2, 8, 2), (1, 4, 2), (3, 1, 1)):
        loaders = on_ranks(Seekable(size), num_replicas, batch_size=2, padding=False)
        running = iter(loaders[0])
        for _ in range(steps):
            next(running)
        state = loaders[0].state_dict()
        for loader in loaders:
            loader.load_state_dict(state)
            assert flat(loader) == []


def test_a_look_at_a_stream_with_a_state_loses_nothing():
    loader = DataLoader(Seekable(10), 2)
    assert next(iter(loader)).tolist() == [0, 1]
    assert flat(loader) == list(range(10))
    state = {**loader.state_dict(), "epoch": 0, "consumed": 4, "dataset": {"position": 4}}
    loader.load_state_dict(state)
    next(iter(loader))
    assert flat(loader) == list(range(4, 10))
    assert flat(loader) == list(range(10))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Counting, Seekable])
def test_a_stream_in_workers_resumes_where_the_loop_was(make):
    first = DataLoader(make(60), 4, num_workers=2, persistent_workers=True)
    begun = flat(itertools.islice(first, 4))
    state = first.state_dict()
    assert (begun, state["consumed"]) == (list(range(16)), 16)
    resumed = DataLoader(make(60), 4, num_workers=1)
    resumed.load_state_dict(state)
    assert flat(resumed) == list(range(16, 60))
    first.load_state_dict(state)
    assert flat(first) == list(range(16, 60))
    assert flat(first) == list(range(60))


def test_a_batch_sampler_has_its_samplers_state():
    batches = BatchSampler(DistributedSampler(Numbers(24), 2, 0), 3)
    loader = DataLoader(Numbers(24), batch_sampler=batches)
    list(itertools.islice(loader, 2))
    assert batches.state_dict() == loader.state_dict()
    assert batches.state_dict()["consumed"] == 12
    batches.load_state_dict({**batches.state_dict(), "consumed": 18})
    assert len(flat(loader)) == 3
    batches.set_epoch(7)
    assert batches.sampler.epoch == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"length": 31},
            "the state was saved with length=31, but this sampler has length=30: its order of samples is another, so "
            "some would come twice and others never. Make it as the one that was saved.",
        ),
        (
            {"seed": 1},
            "the state was saved with seed=1, but this sampler has seed=0: its order of samples is another, so "
            "some would come twice and others never. Make it as the one that was saved.",
        ),
        ({"consumed": -1}, "consumed should be from 0 to 30, got -1; the state has been changed"),
        ({"consumed": 31}, "consumed should be from 0 to 30, got 31; the state has been changed"),
        ({"epoch": 0.5}, "epoch should be an integer, got 0.5 of type float"),
    ],
)
def test_a_state_of_another_order_is_refused(change, message):
    sampler = DistributedSampler(Numbers(30))
    with pytest.raises(DataError) as caught:
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert str(caught.value) == message


@pytest.mark.parametrize(("state", "got"), [({"epoch": 1}, "['epoch']"), (3, "int")])
def test_what_is_no_state_is_refused(state, got):
    with pytest.raises(DataError) as caught:
        DistributedSampler(Numbers(30)).load_state_dict(state)
    assert str(caught.value) == (
        f"a sampler's state should be what its state_dict() gave, with epoch and consumed; got {got}"
    )


def test_what_a_stream_or_another_sampler_has_consumed_is_not_negative():
    for owner in (DataLoader(Counting(8)), DistributedSampler(SequentialSampler(Numbers(8)))):
        with pytest.raises(DataError, match=r"^consumed should be 0 or more, got -1; the state has been changed$"):
            owner.load_state_dict({**owner.state_dict(), "consumed": -1})


def test_numbers_of_other_libraries_become_plain_ones():
    sampler = DistributedSampler(Numbers(8), seed=np.int64(3))
    sampler.set_epoch(torch.tensor(5))
    assert json.loads(json.dumps(sampler.state_dict()))["epoch"] == 5
    assert list(sampler) == _epoch(Numbers(8), 5, seed=3).tolist()


def test_a_state_of_another_subset_or_of_a_sampler_of_other_batches_is_refused():
    def refusal(saved, loaded):
        with pytest.raises(DataError) as caught:
            loaded.load_state_dict(saved.state_dict())
        return str(caught.value)

    splits = [random_split(Numbers(30), [20, 10], torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)]
    first, same, other = (DataLoader(split, 4) for split in splits)
    same.load_state_dict(first.state_dict())
    assert refusal(first, other).startswith("the state was saved with subset='")
    four, five = (DistributedSampler(TorchBatchSampler(RandomSampler(Numbers(30)), size, False)) for size in (4, 5))
    assert refusal(four, five).startswith(
        "the state was saved with wraps='BatchSampler(4) of RandomSampler(30)', but this sampler has "
        "wraps='BatchSampler(5) of RandomSampler(30)': "
    )
    assert refusal(DataLoader(Sized(8)), DataLoader(Sized(9))).startswith(
        "the state was saved with length=8, but this loader has length=9: "
    )


def test_a_loader_that_keeps_no_count_says_so():
    with pytest.raises(DataError) as caught:
        DataLoader(Numbers(8), sampler=SequentialSampler(Numbers(8))).state_dict()
    assert str(caught.value) == (
        "this loader keeps no count of samples, since it draws from SequentialSampler. Wrap that in a paceline "
        "DistributedSampler, or let the loader make its own."
    )
    with pytest.raises(DataError, match=r"^a loader with in_order=False gives batches in whatever order"):
        DataLoader(Numbers(8), num_workers=1, in_order=False).state_dict()
