"""A DataLoader that shards, reshuffles and seeds its workers by itself, and can be resumed at any batch.

The invariant: with the same arguments on all ranks, the k-th batches of all ranks together are the k-th global batch,
in every epoch, without a call to ``set_epoch``.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.context import BaseContext
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, Dataset, IterableDataset, IterDataPipe, Sampler

from paceline.data.batches import dealt_shares
from paceline.data.counting import Source, num_batches, samples_a_step, source_of
from paceline.data.order import UNKNOWN
from paceline.data.passes import Batches, SeededBatches
from paceline.data.permutation import mix
from paceline.data.progress import Pass
from paceline.data.sampler import DistributedSampler, current_rank, place
from paceline.data.shares import equal_shares, shares_of
from paceline.data.stream import CollateStamped, InitWorker, ShardedStream
from paceline.data.suspicions import Watch, warn_of_sharding_twice
from paceline.data.wrapping import is_sharded
from paceline.errors import DataError

T_co = TypeVar("T_co", covariant=True)


class DataLoader(torch.utils.data.DataLoader[T_co]):
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

    Each rank's workers have seeds of their own, so that random augmentations differ between ranks and epochs even where
    all ranks called ``torch.manual_seed`` alike; they follow from ``torch.initial_seed()`` when the loader is made,
    ``seed``, the rank and the epoch. Workers are seeded anew for each batch of a map-style dataset, by its place in the
    epoch: it matters not how many there are. The global random state is neither used nor changed. With
    ``num_workers=0`` augmentations run in this process, from its own random state.

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
        if sharded:
            num_replicas, rank = 1, 0
        num_ranks, own_rank = place(num_replicas, rank) if is_stream or makes_sampler else (1, current_rank())
        shares = dealt_shares(batch_size, global_batch_size, weights, num_ranks)
        if shares is not None:
            batch_size = shares.sizes[own_rank]
        if makes_sampler:
            sampler = DistributedSampler(dataset, num_replicas, rank, bool(shuffle), seed, drop_last, padding=padding)
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
        self.source: Source | None = source_of(self.sampler, batch_sampler)
        if is_stream:
            self.source = ShardedStream(
                cast(IterableDataset[T_co], dataset),
                equal_shares(num_ranks) if shares is None else shares,
                own_rank,
                tail="drop" if drop_last else "pad" if padding else "keep",
                batch_size=1 if batch_size is None else batch_size,
                seed=seed,
            )
        if is_stream and num_ranks > 1:
            warn_of_sharding_twice(dataset, worker_init_fn)
        is_foreign = self.source is None and is_sharded(self.sampler if batch_sampler is None else batch_sampler)
        self._watch = None if is_foreign else Watch(dataset, is_sharded=self.source is not None and not sharded)
        seeding_rank = current_rank() if self.source is None or sharded else self.source.rank
        self._worker_key = mix(torch.initial_seed(), seed, seeding_rank)
        self._seeds_workers = generator is None
        if self._seeds_workers:
            self.generator.manual_seed(self._worker_key)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator class
        """Begin a pass over this rank's batches: from where a loaded state stood, if the epoch is still that one.

        Raises:
            DataError: as iterating over the ``DistributedSampler`` does.
        """
        if self.source is None:
            return Batches(super().__iter__(), Pass(0, 0, 0), self._watch)
        step = self._samples_a_step()
        current = self.source.begin_pass(counts_samples=step is not None)
        if self._seeds_workers:
            # By epoch, and not one draw after another: a look at the data on one rank shifts nothing.
            self.generator.manual_seed(mix(self._worker_key, current.epoch))
        known = self.source.length
        # Torch counts the batches of a whole epoch; what remains of one is counted here.
        is_whole = current.start == 0 and isinstance(self.source, DistributedSampler)
        return Batches(
            super().__iter__(),
            current,
            self._watch,
            samples_a_step=0 if step is None else step,
            length=UNKNOWN if known is None or isinstance(self.source, ShardedStream) else max(known, current.start),
            num_batches=None
            if is_whole or step is None or known is None
            else num_batches(self.source, self.batch_sampler, start=current.start, rank=self.source.rank),
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

    def state_dict(self) -> dict[str, Any]:
        """Where the training loop is: the epoch, and how many samples of it all ranks together have consumed.

        Consumed are the batches that this loader has given, not those that workers have ready. The ranks are taken to
        keep pace, so any rank's state is good for all. The own state of an iterable dataset that has one is part of it.

        Raises:
            DataError: the loader keeps no count, since it draws from something else than a ``DistributedSampler``, or
                in batches of another maker; or workers may give them out of order.
        """
        return self._counting_source().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken, with exactly the samples not yet consumed.

        The number of ranks, of workers and the batch sizes may be others than when it was saved.

        Args:
            state: from ``state_dict`` of a loader of the same dataset, seed and shuffle; the same on all ranks.
        Raises:
            DataError: it is not; or as ``state_dict``.
        """
        source = self._counting_source()
        source.load_state_dict(state)
        if isinstance(source, ShardedStream):
            self._iterator = None  # workers that live on know the dataset as it was

    def set_weights(self, weights: Sequence[float]) -> None:
        """Divide global batches by other weights, from the next pass on; their size stays.

        Args:
            weights: one a rank; the same on all ranks.
        Raises:
            DataError: as ``state_dict``; or there are no batches to divide, or a share is empty.
        """
        source = self._counting_source()
        if self.batch_size is None:
            raise DataError(
                "set_weights divides global batches, and this loader makes none of its own. Give it a batch size "
                "instead of a batch sampler or of batch_size=None, or give the weights to a paceline BatchSampler."
            )
        total = self._samples_a_step()
        assert total is not None
        shares = shares_of(total, source.num_replicas, weights)
        source.deal(shares)
        batches: Any = self.batch_sampler
        # Past the guard of torch's class, which is there for loaders that have made something of the size already.
        batches.batch_size = vars(self)["batch_size"] = shares.sizes[source.rank]
        if isinstance(source, ShardedStream):
            self._iterator = None

    def num_batches_of_ranks(self) -> tuple[int, ...]:
        """How many batches each rank has in a whole epoch, by rank: known before any is loaded.

        Where they differ (``padding=False``), train under ``model.join()``; ``drop_last=True`` makes them equal.

        Raises:
            DataError: as ``state_dict``; or the epoch's length is not known.
        """
        source = self._counting_source()
        if source.length is None:
            raise DataError(
                f"a {type(self.dataset).__name__} does not tell its length, so the batches can't be counted"
            )
        ranks = range(source.num_replicas)
        return tuple(num_batches(source, self.batch_sampler, start=0, rank=rank) for rank in ranks)

    def indices(self) -> npt.NDArray[np.int64]:
        """The dataset indices of the samples in this rank's batches, in order, in the epoch in use.

        Returns:
            shape (n,), without what a last partial batch would hold where it is dropped, nor what an earlier run had
            consumed.
        Raises:
            DataError: the batches are drawn by something else than a paceline ``DistributedSampler``, alone or in
                torch's own ``BatchSampler``; or workers may give them out of order.
        """
        if not isinstance(self.source, DistributedSampler) or self._samples_a_step() is None:
            raise DataError(
                f"only a loader on a paceline DistributedSampler can tell its indices; this one draws from "
                f"{self._drawn_from()}. Let the dataset return each sample's index and pass those."
            )
        if self.num_workers > 0 and not self.in_order:
            raise DataError(
                "a loader with in_order=False gives batches in whatever order its workers finish, so its indices are "
                "not known. Use in_order=True, or let the dataset return each sample's index and pass those."
            )
        indices = self.source.indices()
        batches = self.batch_sampler
        if isinstance(batches, BatchSampler) and batches.drop_last:
            return indices[: len(indices) // batches.batch_size * batches.batch_size]
        return indices

    @property
    def _index_sampler(self) -> Any:
        """What torch's iterators draw from: the batches, each with the seed of the worker that will make it."""
        batches = super()._index_sampler
        step = self._samples_a_step()
        if self.num_workers == 0 or step is None or not self._auto_collation or not self._seeds_workers:
            return batches
        if not isinstance(self.source, DistributedSampler):
            return batches
        return SeededBatches(batches, self._worker_key, self.source.progress, step)

    def _get_iterator(self) -> Any:
        if not isinstance(self.source, ShardedStream):
            return super()._get_iterator()
        # torch's iterators take everything from the loader that they are given; the user's keeps its dataset.
        twin = copy.copy(self)
        vars(twin).update(
            dataset=self.source,
            collate_fn=CollateStamped(self.collate_fn, is_batched=self._auto_collation),
            worker_init_fn=InitWorker(self.worker_init_fn),
        )
        return super(DataLoader, twin)._get_iterator()

    def _samples_a_step(self) -> int | None:
        return samples_a_step(self.source, self.batch_sampler)

    def _counting_source(self) -> Source:
        if self.source is None or self._samples_a_step() is None:
            raise DataError(
                f"this loader keeps no count of samples, since it draws from {self._drawn_from()}. Wrap that in a "
                "paceline DistributedSampler, or let the loader make its own."
            )
        if self.num_workers > 0 and not self.in_order:
            raise DataError(
                "a loader with in_order=False gives batches in whatever order its workers finish, so what has been "
                "consumed is not known. Use in_order=True."
            )
        return self.source

    def _drawn_from(self) -> str:
        return type(self.sampler if self.source is None else self.batch_sampler).__name__


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
