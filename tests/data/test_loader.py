"""The loader: torch's batches where torch shards right, epochs that stay in step, workers that differ by rank."""

import copy
import inspect
import itertools
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, Subset, TensorDataset
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.data import DataLoader, DistributedSampler
from paceline.errors import DataError
from support.datasets import Numbers
from support.ranks import run_ranks


class Noise(Numbers):
    """Each sample is a random number, drawn wherever the sample is made."""

    def __getitem__(self, index):
        return torch.randint(2**40, ()).item()


class TensorNoise(Numbers):
    """Each sample is drawn from all random states there are."""

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])


class NoiseByTheBatch(Numbers):
    """The same, for whole lists of indices, which are never iterated over in Python."""

    def __getitems__(self, indices):
        count = len(np.asarray(indices))
        return [torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()]) for _ in range(count)]


class Stream(IterableDataset):
    """The numbers below five, and a memory of the last epoch set."""

    epoch = None

    def __iter__(self):
        return iter(range(5))

    def set_epoch(self, epoch):
        self.epoch = epoch


def batches(loader):
    return [batch.tolist() for batch in loader]


def all_ranks(size, num_replicas, **kwargs):
    return [DataLoader(Numbers(size), num_replicas=num_replicas, rank=rank, **kwargs) for rank in range(num_replicas)]


def test_the_signature_is_torchs_with_our_keywords_after_it():
    torchs = inspect.signature(TorchDataLoader.__init__).parameters.values()
    ours = inspect.signature(DataLoader.__init__).parameters.values()
    described = [(parameter.name, parameter.kind, parameter.default) for parameter in ours]
    assert described[: len(torchs)] == [(parameter.name, parameter.kind, parameter.default) for parameter in torchs]
    assert [(name, default) for name, _, default in described[len(torchs) :]] == [
        ("num_replicas", None), ("rank", None), ("seed", 0), ("padding", True),
        ("global_batch_size", None), ("weights", None), ("sharded", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("batch_size", "drop_last"), [(1, False), (3, False), (8, False), (None, False), (1, True), (3, True), (8, True)]
)
def test_alone_and_unshuffled_it_gives_torchs_batches(batch_size, drop_last):
    arguments = {"batch_size": batch_size, "drop_last": drop_last}
    dataset = TensorDataset(torch.arange(20).reshape(10, 2), torch.arange(10))
    ours, torchs = DataLoader(dataset, **arguments), TorchDataLoader(dataset, **arguments)
    assert len(ours) == len(iter(ours)) == len(torchs)
    for our_batch, torch_batch in zip(ours, torchs, strict=True):
        for our_part, torch_part in zip(our_batch, torch_batch, strict=True):
            torch.testing.assert_close(our_part, torch_part)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_tensors_are_read_a_batch_at_a_time_with_torchs_result(num_workers):
    whole = TensorDataset(torch.randn(9, 2, 3), torch.arange(9), torch.rand(9) > 0.5, torch.zeros(9, 0))
    for dataset in (whole, Subset(Subset(whole, [8, -2, 5, 0, 3]), range(4, 0, -1))):
        ours = list(DataLoader(dataset, 3, num_workers=num_workers))
        for our_batch, torch_batch in zip(ours, TorchDataLoader(dataset, 3), strict=True):
            assert type(our_batch) is type(torch_batch)
            for our_part, torch_part in zip(our_batch, torch_batch, strict=True):
                torch.testing.assert_close(our_part, torch_part, rtol=0, atol=0)
                assert our_part.is_contiguous()


def test_tensors_may_be_indexed_by_whatever_torch_takes():
    dataset, batches = TensorDataset(torch.arange(12).reshape(4, 3)), [[torch.tensor(1), 3], [(1, 2), (3, 0)], [True]]
    for ours, torchs in zip(
        DataLoader(dataset, batch_sampler=batches), TorchDataLoader(dataset, batch_sampler=batches), strict=True
    ):
        torch.testing.assert_close(ours, torchs, rtol=0, atol=0)


def test_what_a_user_has_made_of_tensors_is_read_sample_by_sample():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return [2 * part for part in super().__getitem__(index)]

    assert [x.tolist() for (x,) in DataLoader(Doubled(torch.arange(4)), 2)] == [[0, 2], [4, 6]]
    assert list(DataLoader(TensorDataset(torch.arange(4)), 2, collate_fn=len)) == [2, 2]
    loader = DataLoader(TensorDataset(torch.arange(4)), 2)
    loader.collate_fn = len
    assert list(loader) == [2, 2]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [3, 21, 24, 40])
def test_unshuffled_batches_are_those_of_torchs_loader_on_torchs_sampler(size, drop_last):
    for rank, ours in enumerate(all_ranks(size, 4, batch_size=3, drop_last=drop_last)):
        sampler = TorchDistributedSampler(Numbers(size), 4, rank, shuffle=False, drop_last=drop_last)
        torchs = TorchDataLoader(Numbers(size), batch_size=3, sampler=sampler, drop_last=drop_last)
        assert batches(ours) == batches(torchs)
        assert len(ours) == len(torchs)


@pytest.mark.parametrize(("size", "num_replicas", "batch_size"), [(100, 3, 4), (23, 2, 4), (7, 2, 4), (48, 4, 4)])
def test_drop_last_leaves_full_global_batches_only(size, num_replicas, batch_size):
    loaders = all_ranks(size, num_replicas, batch_size=batch_size, drop_last=True, shuffle=True)
    for loader in loaders:
        assert [len(batch) for batch in loader] == [batch_size] * (size // (num_replicas * batch_size))


def test_a_global_batch_holds_the_same_samples_for_any_number_of_ranks():
    def global_batches(num_replicas):
        loaders = all_ranks(96, num_replicas, batch_size=24 // num_replicas, shuffle=True, seed=3)
        return [sorted(itertools.chain(*step)) for step in zip(*map(batches, loaders), strict=True)]

    alone = global_batches(1)
    assert len(alone) == 4
    assert all(global_batches(num_replicas) == alone for num_replicas in (2, 3, 4))


def test_without_padding_all_ranks_together_see_each_sample_once():
    for size, num_replicas in ((21, 2), (3, 7)):
        loaders = all_ranks(size, num_replicas, batch_size=2, padding=False)
        assert sorted(itertools.chain(*itertools.chain(*map(batches, loaders)))) == list(range(size))


def test_shuffle_follows_the_seed_and_changes_each_epoch():
    first, same, other = (DataLoader(Numbers(64), 8, shuffle=True, seed=seed) for seed in (1, 1, 2))
    epochs = [batches(first) for _ in range(3)]
    assert [batches(same) for _ in range(3)] == epochs
    assert epochs[0] != epochs[1] != epochs[2]
    assert batches(other) != epochs[0]


def test_a_peek_on_one_rank_leaves_all_ranks_in_the_same_epoch():
    peeking, plain = all_ranks(64, 2, batch_size=4, shuffle=True)
    for epoch in range(3):
        first = next(iter(peeking)).tolist()
        iter(peeking)
        seen = batches(peeking)
        assert seen[0] == first
        assert sorted(itertools.chain(*seen, *batches(plain))) == list(range(64))
        assert (peeking.sampler.epoch, plain.sampler.epoch) == (epoch, epoch)


def test_a_pass_counts_from_its_second_batch():
    loader = DataLoader(Numbers(64), 4, shuffle=True)
    for given, epoch in ((1, 0), (2, 0), (1, 1), (16, 1), (1, 2)):
        for _ in zip(range(given), loader, strict=False):
            pass
        assert loader.sampler.epoch == epoch


def test_an_epoch_of_a_single_batch_or_of_none_counts_once_it_has_ended():
    single = DataLoader(Numbers(4), 4, shuffle=True)
    empty = DataLoader(Numbers(1), 4, num_replicas=2, rank=1, padding=False)
    for epoch in range(3):
        assert (len(batches(single)), len(batches(empty))) == (1, 0)
        assert (single.sampler.epoch, empty.sampler.epoch) == (epoch, epoch)


def test_looking_at_the_loaders_sampler_changes_nothing():
    loader = DataLoader(Numbers(64), 4, shuffle=True)
    for epoch in range(2):
        seen = list(itertools.chain(*batches(loader)))
        assert list(loader.sampler) == list(loader.sampler) == loader.indices().tolist() == seen
        assert loader.sampler.epoch == epoch


def test_set_epoch_on_the_loader_or_on_its_sampler_decides_the_next_pass():
    reference = DataLoader(Numbers(64), 4, shuffle=True)
    by_epoch = [batches(reference) for _ in range(7)]
    loader = DataLoader(Numbers(64), 4, shuffle=True)
    loader.set_epoch(4)
    assert [batches(loader), batches(loader)] == by_epoch[4:6]
    loader.sampler.set_epoch(1)
    assert [batches(loader), batches(loader)] == by_epoch[1:3]
    loader.set_epoch(3)
    next(iter(loader))
    assert batches(loader) == by_epoch[3]


def test_set_epoch_reaches_foreign_samplers_and_iterable_datasets():
    foreign = TorchDistributedSampler(Numbers(8), 2, 0)
    DataLoader(Numbers(8), sampler=foreign).set_epoch(3)
    assert foreign.epoch == 3
    DataLoader(Numbers(8), batch_sampler=BatchSampler(foreign, 2, False)).set_epoch(4)
    assert foreign.epoch == 4
    stream = Stream()
    DataLoader(stream).set_epoch(5)
    assert stream.epoch == 5
    DataLoader(Numbers(8), sampler=SequentialSampler(Numbers(8))).set_epoch(6)


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_give_the_same_epochs_and_peeks_as_none(batch_size, persistent_workers):
    inline = DataLoader(Numbers(24), batch_size, shuffle=True)
    working = DataLoader(Numbers(24), batch_size, shuffle=True, num_workers=1, persistent_workers=persistent_workers)

    def flat(loader):
        return [batch.tolist() if batch_size else batch for batch in loader]

    for _ in range(2):
        next(iter(working))
        assert flat(working) == flat(inline)
    assert (working.sampler.epoch, inline.sampler.epoch) == (1, 1)


def test_worker_seeds_differ_by_rank_and_epoch_and_repeat_with_the_run():
    def noise(rank, seed=0):
        torch.manual_seed(11)
        loader = DataLoader(Noise(4), 2, num_workers=1, num_replicas=2, rank=rank, seed=seed)
        return [tuple(itertools.chain(*batches(loader))) for _ in range(2)]

    first = noise(0)
    assert noise(0) == first
    assert len({*first, *noise(1), *noise(0, seed=1)}) == 6


@pytest.mark.slow
@pytest.mark.parametrize(("make", "batch_size"), [(TensorNoise, 2), (NoiseByTheBatch, 2), (TensorNoise, None)])
def test_what_is_drawn_does_not_depend_on_how_many_workers_there_are_nor_on_where_a_run_was_resumed(make, batch_size):
    def loader(num_workers):
        torch.manual_seed(11)
        return DataLoader(make(16), batch_size, num_workers=num_workers, shuffle=True, num_replicas=2, rank=1)

    def draw(loader):
        return [sample for batch in loader for sample in batch.reshape(-1, 3).tolist()]

    alone = loader(0)
    epochs = [draw(alone) for _ in range(2)]
    assert len({*map(tuple, itertools.chain(*epochs))}) == 16
    for num_workers in (1, 2):
        working = loader(num_workers)
        assert [draw(working) for _ in range(2)] == epochs
    for num_workers in (0, 2):
        resumed = loader(num_workers)
        resumed.load_state_dict({**working.state_dict(), "epoch": 1, "consumed": 8})
        assert draw(resumed) == epochs[1][4:]


def test_what_is_drawn_in_this_process_follows_rank_and_epoch_and_leaves_its_own_state_alone():
    def draw(rank, generator=None):
        torch.manual_seed(11)
        loader = DataLoader(TensorNoise(4), 2, num_replicas=2, rank=rank, generator=generator)
        return [str(batches(loader)) for _ in range(2)]

    random.seed(2)
    np.random.seed(2)
    before = random.getstate(), np.random.get_state()[1].tolist()
    first = draw(0)
    torch.randn(3)
    assert draw(0) == first
    assert len({*first, *draw(1)}) == 4
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    # The recipe of torch's notes on randomness: the same generator on all ranks.
    given = [draw(rank, torch.Generator().manual_seed(0)) for rank in range(2)]
    assert len({*given[0], *given[1]}) == 4


def test_workers_begin_with_seeds_of_their_own_even_where_ranks_were_given_generators_alike():
    def seeds(rank, **given):
        torch.manual_seed(11)
        loader = DataLoader(Numbers(2), num_workers=1, num_replicas=2, rank=rank, collate_fn=seed_of_worker, **given)
        return [seed for _ in range(2) for seed in loader]

    given = [seeds(rank, generator=torch.Generator().manual_seed(0)) for rank in range(2)]
    assert given[0] == seeds(0, generator=torch.Generator().manual_seed(0))
    assert len({*given[0], *given[1], *seeds(0), *seeds(1)}) == 8


def seed_of_worker(batch):
    return torch.utils.data.get_worker_info().seed


def test_a_thread_that_loads_ahead_leaves_the_main_threads_random_state_alone():
    drawn = []

    class DrawsBeside(Numbers):
        def __getitem__(self, index):
            if threading.current_thread() is threading.main_thread():
                return index
            begun.set()
            assert done.wait(10)
            return index

    begun, done = threading.Event(), threading.Event()
    loader = DataLoader(DrawsBeside(1))
    torch.manual_seed(0)
    thread = threading.Thread(target=lambda: list(loader))
    thread.start()
    assert begun.wait(10)
    drawn.append(torch.rand(()).item())
    done.set()
    thread.join()
    drawn.append(torch.rand(()).item())
    torch.manual_seed(0)
    assert drawn == [torch.rand(()).item() for _ in range(2)]


def test_a_peek_does_not_shift_the_worker_seeds_of_the_pass_after_it():
    def noise(peek):
        torch.manual_seed(11)
        loader = DataLoader(Noise(4), 2, num_workers=1)
        if peek:
            next(iter(loader))
        return batches(loader)

    assert noise(peek=True) == noise(peek=False)


def test_worker_seeds_follow_the_global_seed_that_is_set_before():
    keys = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        loader = DataLoader(Numbers(4))
        iter(loader)
        keys.add(loader.generator.initial_seed())
    assert len(keys) == 2


def test_the_global_random_state_is_neither_used_nor_changed():
    before = torch.get_rng_state()
    for sampler in (None, SequentialSampler(Numbers(8))):
        batches(DataLoader(Numbers(8), 2, sampler=sampler, shuffle=None if sampler else True))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_given_generator_is_used_as_torch_uses_it():
    ours, torchs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    loader = DataLoader(Numbers(8), generator=ours)
    batches(loader)
    batches(TorchDataLoader(Numbers(8), generator=torchs))
    assert loader.generator is ours
    assert torch.equal(ours.get_state(), torchs.get_state())


def test_foreign_samplers_and_batch_samplers_are_taken_as_they_are():
    sampler = RandomSampler(Numbers(8), generator=torch.Generator().manual_seed(5))
    twin = RandomSampler(Numbers(8), generator=torch.Generator().manual_seed(5))
    assert batches(DataLoader(Numbers(8), 3, sampler=sampler)) == batches(TorchDataLoader(Numbers(8), 3, sampler=twin))
    assert batches(DataLoader(Numbers(8), batch_sampler=[[3, 1], [2]])) == [[3, 1], [2]]


def test_a_paceline_sampler_that_is_given_is_kept_in_step_as_well():
    for make in (
        lambda sampler: DataLoader(Numbers(64), 4, sampler=sampler),
        lambda sampler: DataLoader(Numbers(64), batch_sampler=BatchSampler(sampler, 4, False)),
    ):
        loader = make(DistributedSampler(Numbers(64), 2, 1))
        first = next(iter(loader)).tolist()
        seen = batches(loader)
        assert seen[0] == first
        assert loader.indices().tolist() == list(itertools.chain(*seen))
        assert batches(loader) != seen


def test_iterable_datasets_alone_pass_through():
    assert batches(DataLoader(Stream(), 2)) == [[0, 1], [2, 3], [4]]
    assert batches(DataLoader(Stream(), 2, drop_last=True)) == [[0, 1], [2, 3]]


def test_indices_are_those_of_the_batches_even_where_a_partial_one_is_dropped():
    for drop_last in (False, True):
        loader = DataLoader(Numbers(23), 4, shuffle=True, drop_last=drop_last, num_replicas=2, rank=1)
        for _ in range(2):
            seen = list(itertools.chain(*batches(loader)))
            assert loader.indices().tolist() == seen
    single = DataLoader(Numbers(5), None)
    assert single.indices().tolist() == list(single)


def test_ranks_come_from_the_process_group():
    def load(world):
        return batches(DataLoader(Numbers(8), 2))

    assert run_ranks(2, load, timeout_s=30) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_workers_of_iterable_datasets_are_seeded_by_rank():
    def key(world):
        torch.manual_seed(0)
        return DataLoader(Stream()).generator.initial_seed()

    assert len(set(run_ranks(2, key, timeout_s=30))) == 2


def test_a_loader_and_its_copy_go_on_independently():
    loader = DataLoader(Numbers(16), 4, shuffle=True)
    seen = batches(loader)
    twin = copy.deepcopy(loader)
    assert batches(twin) == batches(loader) != seen


class Failing(Numbers):
    """Sample 5 can't be loaded."""

    error = ValueError

    def __getitem__(self, index):
        if index == 5:
            raise self.error("sample 5")
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_failed_is_consumed_once_the_loop_goes_on_behind_it(num_workers):
    running = iter(loader := DataLoader(Failing(12), 2, num_workers=num_workers))
    assert [next(running).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="sample 5"):
        next(running)
    assert loader.state_dict()["consumed"] == 4  # saved now, a run would try again
    assert next(running).tolist() == [6, 7]
    assert loader.state_dict()["consumed"] == 8
    list(running)


def test_a_batch_that_did_not_come_in_time_is_not_consumed():
    running = iter(loader := DataLoader(Waits(20), 2, num_workers=1, timeout=1))
    assert next(running).tolist() == [0, 1]
    with Waits.lock, pytest.raises(RuntimeError, match="timed out after 1"):
        # One or two are ready; a third one is not.
        list(running)
    before = loader.state_dict()["consumed"]
    assert next(running).tolist() == [before, before + 1]
    assert loader.state_dict()["consumed"] == before + 2
    list(running)


class Waits(Numbers):
    lock = torch.multiprocessing.get_context("fork").Lock()

    def __getitem__(self, index):
        with self.lock:
            return index


def test_a_samples_stop_iteration_does_not_end_an_epoch_before_its_time():
    class Ending(Failing):
        error = StopIteration

    running = iter(DataLoader(Ending(8), 2))
    assert [next(running).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(DataError) as caught:
        next(running)
    assert str(caught.value) == (
        "the pass ended after 2 of 4 batches: the dataset or the collate function raised StopIteration, which would "
        "end the epoch early on this rank alone. Let it raise something else."
    )


def test_a_loop_that_begins_a_pass_for_each_batch_is_told_so_once():
    loader = DataLoader(Numbers(64), 4, shuffle=True)
    looks = [next(iter(loader)).tolist() for _ in range(20)]
    with pytest.warns(UserWarning, match=r"^20 passes in a row were given up after their first batch, and all had the"):
        looks.append(next(iter(loader)).tolist())
    looks.append(next(iter(loader)).tolist())
    assert looks == looks[:1] * 22
    for _ in range(30):
        batches(DataLoader(Numbers(4), 4, shuffle=True))
    single = DataLoader(Numbers(4), 4, shuffle=True)
    for _ in range(30):
        batches(single)


def test_a_profiler_finds_torchs_notes():
    loader = DataLoader(Numbers(4), 2)
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        batches(loader)
    assert sum(event.name.startswith("enumerate(DataLoader)") for event in profile.function_events) == 3


def test_what_loops_reach_for_on_torchs_iterator_is_there():
    running = iter(DataLoader(Numbers(8), 2))
    next(running)
    assert (len(running), running._num_yielded, iter(running) is running) == (4, 1, True)
    with pytest.raises(AttributeError, match=r"^_batches$"):
        running.__class__.__new__(running.__class__)._batches  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_replicas": 2, "rank": 0, "sampler": SequentialSampler(Numbers(8))}, "num_replicas=2, rank=0"),
        ({"rank": 0, "batch_sampler": [[0, 1]]}, "rank=0"),
        ({"padding": False, "sampler": SequentialSampler(Numbers(8))}, "padding=False"),
        ({"weights": [1, 2], "sampler": SequentialSampler(Numbers(8))}, "weights=[1, 2]"),
    ],
)
def test_sharding_arguments_beside_a_given_sampler_are_refused(arguments, named):
    with pytest.raises(DataError) as caught:
        DataLoader(Numbers(8), **arguments)
    assert str(caught.value) == (
        f"{named}: for the sampler that the loader makes, and it makes none beside a sampler that is given. "
        "Give them to that sampler or to a paceline BatchSampler, or leave the sampler out."
    )


def test_sharding_arguments_for_a_dataset_that_is_sharded_already_are_refused():
    with pytest.raises(DataError) as caught:
        DataLoader(Stream(), num_replicas=2, rank=1, sharded=True)
    assert str(caught.value) == (
        "num_replicas=2, rank=1: with sharded=True the dataset holds this rank's share already. Leave one of them out."
    )


def test_padding_false_and_drop_last_are_refused_together():
    with pytest.raises(DataError, match=r"^padding=False keeps every sample and drop_last=True drops the tail"):
        DataLoader(Numbers(8), drop_last=True, padding=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shuffle": True, "sampler": [0]}, "sampler option is mutually exclusive with shuffle"),
        ({"batch_size": None, "drop_last": True}, "batch_size=None option disables auto-batching"),
        ({"num_workers": -1}, "num_workers option should be non-negative"),
    ],
)
def test_what_torch_refuses_is_refused_in_torchs_words(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        DataLoader(Numbers(8), **arguments)


def test_indices_of_a_foreign_sampler_are_refused():
    advice = r"\. Let the dataset return each sample's index and pass those\.$"
    start = r"^only a loader on a paceline DistributedSampler can tell its indices; this one draws from "
    with pytest.raises(DataError, match=start + "SequentialSampler" + advice):
        DataLoader(Numbers(8), sampler=SequentialSampler(Numbers(8))).indices()

    class OwnBatches(BatchSampler):
        pass

    ours = DistributedSampler(Numbers(8))
    with pytest.raises(DataError, match=start + "OwnBatches" + advice):
        DataLoader(Numbers(8), batch_sampler=OwnBatches(ours, 2, False)).indices()


def test_indices_of_batches_in_no_known_order_are_refused():
    with pytest.raises(DataError, match=r"^a loader with in_order=False gives batches in whatever order its workers"):
        DataLoader(Numbers(8), num_workers=1, in_order=False).indices()
    assert DataLoader(Numbers(3), in_order=False).indices().tolist() == np.arange(3).tolist()
