"""A DataLoader that shards, reshuffles and seeds its workers by itself, and can be resumed at any batch.

The invariant: with the same arguments on all ranks, the k-th batches of all ranks together are the k-th global batch,
in every epoch, without a call to ``set_epoch``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.context import BaseContext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, Sampler

from paceline.data.batches import dealt_shares
from paceline.data.counted import T_co
from paceline.data.counting import num_batches, source_of
from paceline.data.passes import Batches
from paceline.data.progress import Pass
from paceline.data.ranks import Place, current_rank, find_place
from paceline.data.sampler import DistributedSampler
from paceline.data.seeded import SeededLoader
from paceline.data.shares import equal_shares
from paceline.data.stream import ShardedStream
from paceline.data.suspicions import Watch, warn_of_looks, warn_of_sharding_twice
from paceline.data.wrapping import is_sharded
from paceline.errors import DataError


class DataLoader(SeededLoader[T_co]):
    """torch's DataLoader, whose batches are this rank's share.

    All of torch's arguments keep their meaning; ``batch_size`` is per rank. A map-style dataset that comes with
    neither ``sampler`` nor ``batch_sampler`` gets a ``DistributedSampler``. With ``drop_last=True`` and batches of b
    on N ranks, every global batch has N * b samples, and L samples make ``L // (N * b)`` of them. A sampler that is
    given is taken as it is: wrap it in a ``DistributedSampler``, batch samplers too, to have it shared out.

    An iterable dataset is dealt sample by sample to the ranks, and batch by batch to each rank's workers; all of them
    read the whole stream. It must yield the same samples everywhere; random states are seeded alike while it is read.
    Padding and ``drop_last`` are as for other datasets. ``sharded=True`` leaves a dataset alone that shards itself.

    Where the sampler is a paceline ``DistributedSampler``, made here or given (also inside a ``BatchSampler``), or the
    dataset an iterable one that is sharded here, the loader keeps count: each pass takes the next epoch once the pass
    before it has given a second batch or run to its end. So ``next(iter(loader))`` on one rank leaves that rank in
    step: the pass after it uses the same epoch. ``state_dict`` tells what the loop has taken, not what workers hold.

    Each batch is made from a random state of its own, so that random augmentations differ between ranks, epochs and
    batches, and come again with the run, however many workers there are, none included. It follows from
    ``torch.initial_seed()`` when the loader is made, or the ``generator`` that is given; and from ``seed``, the rank,
    the epoch and the batch's place in it. That holds for what draws from the CPU's global generators of torch, numpy
    and Python, whose states in this process are neither used nor changed. A loader that keeps no count leaves random
    states to torch.

    Args:
        num_replicas: as for ``DistributedSampler``; only for the sampler made here, as are ``rank`` and ``padding``.
        rank: as for ``DistributedSampler``.
        seed: of the shuffle and, mixed with the rank, of the workers; the same on all ranks.
        padding: as for ``DistributedSampler``.
        global_batch_size: samples of all ranks' batches together, instead of ``batch_size``. The k-th global batch then
            holds the same samples for any number of ranks; where ranks can't have equally many, lower ones have one
            more. Padding fills the last global batch; ``drop_last`` drops it if it is not full.
        weights: one a rank: their shares of each global batch, which is ``global_batch_size`` or as many samples as
            equal batches would have. Average the loss with ``paceline.global_mean``, since batches are unequal.
        sharded: the dataset holds or yields this rank's share already: it is not sharded again.
    Attributes:
        batch_size: of this rank, as in torch; its share where a global batch is dealt.
        source: the sampler or stream of ours that the loader draws from, if any.
    Raises:
        DataError: what ``DistributedSampler`` refuses; or an argument for the sampler that is made here came where none
            is made; or a share of the global batch is empty.
        ValueError: what torch's DataLoader refuses.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: BaseContext | str | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        padding: bool = True,
        global_batch_size: int | None = None,
        weights: Sequence[float] | None = None,
        sharded: bool = False,
    ) -> None:
        is_stream = _is_stream(dataset) and not sharded
        makes_sampler = sampler is None and batch_sampler is None and not isinstance(dataset, IterableDataset)
        if not (is_stream or makes_sampler) or sharded:
            _refuse_without_effect(
                is_sharded=sharded,
                num_replicas=num_replicas,
                rank=rank,
                weights=weights,
                global_batch_size=None if makes_sampler else global_batch_size,
                padding=None if padding or makes_sampler else padding,
            )
        deals = (is_stream or makes_sampler) and not sharded
        place = find_place(num_replicas, rank) if deals else Place(0, 1)
        shares = dealt_shares(batch_size, global_batch_size, weights, place.num_replicas)
        if shares is not None:
            batch_size = shares.sizes[place.rank]
        if makes_sampler:
            sampler = DistributedSampler(
                dataset,
                num_replicas if deals else 1,
                rank if deals else 0,
                bool(shuffle),
                seed,
                drop_last,
                padding=padding,
            )
            shuffle = None
            if shares is not None:
                sampler.deal(shares)
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            torch.Generator() if generator is None else generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.source = source_of(self.sampler, batch_sampler)
        key_rank = place.rank if deals else current_rank() if sharded or self.source is None else self.source.rank
        self._seed(seed, key_rank, generator)
        if is_stream:
            self.source = ShardedStream(
                cast(IterableDataset[T_co], dataset),
                equal_shares(place.num_replicas) if shares is None else shares,
                place,
                tail="drop" if drop_last else "pad" if padding else "keep",
                batch_size=1 if batch_size is None else batch_size,
                seed=seed,
                key=self._key,
            )
            if place.num_replicas > 1:
                warn_of_sharding_twice(dataset, worker_init_fn)
        is_foreign = self.source is None and is_sharded(self.sampler if batch_sampler is None else batch_sampler)
        self._watch = None if is_foreign else Watch(dataset, is_sharded=self.source is not None and not sharded)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator class
        """Begin a pass over this rank's batches: from where a loaded state stood, if the epoch is still that one.

        Raises:
            DataError: as iterating over the ``DistributedSampler`` does; and, at its end, if a sample's StopIteration
                has ended a pass before its time.
        """
        source, step = self.source, self._samples_a_step()
        if source is None:
            return Batches(super().__iter__(), None, self._watch)
        if isinstance(source, ShardedStream):
            lives_on = self.persistent_workers and self._iterator is not None
            current = source.begin_pass(in_running_workers=lives_on)
        else:
            current = source.begin_pass(counts_samples=step is not None)
            if source.shuffle:
                warn_of_looks(source.progress.num_looks)
        if self._watch is not None:
            self._watch.begin(self._dealt(current))
        num_left = None
        if step is not None and source.length is not None:
            num_left = num_batches(source, self.batch_sampler, start=current.start, rank=source.rank)
        return Batches(
            super().__iter__(),
            current,
            self._watch,
            samples_a_step=step or 0,
            num_batches=num_left,
            length=source.exact_length,
            key=self._seed_pass(current.epoch),
        )

    def __len__(self) -> int:
        """The number of this rank's batches in a whole epoch, also while one is resumed.

        Raises:
            TypeError: the dataset or the sampler has no length.
        """
        if isinstance(self.source, ShardedStream):
            len(self.dataset)  # type: ignore[arg-type]  # for torch's error
            return num_batches(self.source, self.batch_sampler, start=0, rank=self.source.rank)
        return super().__len__()

    def set_epoch(self, epoch: int) -> None:
        """Use ``epoch`` for the next pass; passes after it go on from there.

        Goes to whichever of the batch sampler, its sampler, the sampler and an iterable dataset has a ``set_epoch``.

        Args:
            epoch: any integer; the same on all ranks.
        """
        parts: list[Any] = [self.batch_sampler, getattr(self.batch_sampler, "sampler", None), self.sampler]
        if isinstance(self.dataset, IterableDataset):
            parts.append(self.dataset)
        if isinstance(self.source, ShardedStream):
            parts.append(self.source.progress)
        for part in {id(part): part for part in parts}.values():
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _dealt(self, current: Pass) -> dict[str, Any] | None:
        """What decides which samples a rank gets, to be compared between ranks; None unless all of the world share."""
        source = self.source
        if source is None or not dist.is_initialized() or source.num_replicas != dist.get_world_size():
            return None
        order = {"seed": source.seed, "epoch": current.epoch, "consumed": current.start}
        if isinstance(source, DistributedSampler):
            order |= {"shuffle": bool(source.shuffle), "padding": source.padding, "drop_last": source.drop_last}
        return order | {"global_batch_size": self._samples_a_step(), "weights": list(source.shares.weights)}


def _is_stream(dataset: Any) -> bool:
    """Whether samples come one after another; torch's own pipes are sharded by torch."""
    return isinstance(dataset, IterableDataset) and not isinstance(dataset, IterDataPipe)


def _refuse_without_effect(*, is_sharded: bool, **given: Any) -> None:
    """Refuse what is meant for a sampler that the loader makes, where it makes none."""
    named = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    if named and is_sharded:
        raise DataError(
            f"{named}: with sharded=True the dataset holds this rank's share already. Leave one of them out."
        )
    if named:
        raise DataError(
            f"{named}: for the sampler that the loader makes, and it makes none beside a sampler that is given. Give "
            "them to that sampler or to a paceline BatchSampler, or leave the sampler out."
        )
