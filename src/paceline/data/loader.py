"""A DataLoader that shards, reshuffles and seeds its workers by itself.

The invariant: with the same arguments on all ranks, the k-th batches of all ranks together are the k-th global batch,
in every epoch, without a call to ``set_epoch``.
"""

from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler

from paceline.data.permutation import mix
from paceline.data.sampler import DistributedSampler, current_rank
from paceline.errors import DataError

T_co = TypeVar("T_co", covariant=True)


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """torch's DataLoader, whose batches are this rank's share.

    All of torch's arguments keep their meaning; ``batch_size`` is per rank. A map-style dataset that comes with
    neither ``sampler`` nor ``batch_sampler`` gets a ``DistributedSampler``. With ``drop_last=True`` and batches of b
    on N ranks, every global batch has N * b samples, and L samples make ``L // (N * b)`` of them. A sampler that is
    given is taken as it is, and iterable datasets pass through unsharded, as in torch.

    Where the sampler is a paceline ``DistributedSampler``, made here or given (also inside a ``BatchSampler``), each
    pass takes the next epoch once the pass before it has given a second batch or run to its end. So ``next(iter(
    loader))`` on one rank leaves that rank in step: the pass after it uses the same epoch.

    Each rank's workers have seeds of their own, so that random augmentations differ between ranks and epochs even where
    all ranks called ``torch.manual_seed`` alike; they follow from ``torch.initial_seed()`` when the loader is made,
    ``seed``, the rank and the epoch. The global random state is neither used nor changed. With ``num_workers=0``
    augmentations run in this process, from its own random state.

    Args:
        num_replicas: as for ``DistributedSampler``; only for the sampler made here, as are ``rank`` and ``padding``.
        rank: as for ``DistributedSampler``.
        seed: of the shuffle and, mixed with the rank, of the workers; the same on all ranks.
        padding: as for ``DistributedSampler``.
    Raises:
        DataError: what ``DistributedSampler`` refuses; or ``num_replicas``, ``rank`` or ``padding=False`` came with a
            sampler, a batch sampler or an iterable dataset, which they would not affect.
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
    ) -> None:
        if sampler is None and batch_sampler is None and not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, num_replicas, rank, bool(shuffle), seed, drop_last, padding=padding)
            shuffle = None
        elif num_replicas is not None or rank is not None or not padding:
            raise DataError(
                f"num_replicas={num_replicas}, rank={rank}, padding={padding} are for the sampler that the loader "
                "makes for a map-style dataset, and it makes none for an iterable dataset or beside a sampler that is "
                "given. Give them to that sampler, or leave the sampler out."
            )
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
        # torch fills `sampler` with one that it does not use where a batch sampler is given.
        drawn_from = self.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None)
        self._paced = drawn_from if isinstance(drawn_from, DistributedSampler) else None
        own_rank = current_rank() if self._paced is None else self._paced.rank
        self._worker_key = mix(torch.initial_seed(), seed, own_rank)
        self._seeds_workers = generator is None
        if self._seeds_workers:
            self.generator.manual_seed(self._worker_key)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator class
        """Begin a pass over this rank's batches.

        Raises:
            DataError: as iterating over the ``DistributedSampler`` does.
        """
        if self._paced is None:
            return super().__iter__()
        counted = self._paced.begin_pass()
        if self._seeds_workers:
            # By epoch, and not one draw after another: a look at the data on one rank shifts nothing.
            self.generator.manual_seed(mix(self._worker_key, self._paced.epoch))
        return _Pass(super().__iter__(), counted)

    def set_epoch(self, epoch: int) -> None:
        """Use ``epoch`` for the next pass; passes after it go on from there.

        Goes to whichever of the batch sampler, its sampler, the sampler and an iterable dataset has a ``set_epoch``.

        Args:
            epoch: any integer; the same on all ranks.
        """
        parts: list[Any] = [self.batch_sampler, getattr(self.batch_sampler, "sampler", None), self.sampler]
        if isinstance(self.dataset, IterableDataset):
            parts.append(self.dataset)
        for part in {id(part): part for part in parts}.values():
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def indices(self) -> npt.NDArray[np.int64]:
        """The dataset indices of the samples in this rank's batches, in order, in the epoch in use.

        Returns:
            shape (n,), without what a last partial batch would hold where it is dropped.
        Raises:
            DataError: the batches are drawn by something else than a paceline ``DistributedSampler``, alone or in
                torch's own ``BatchSampler``; or workers may give them out of order.
        """
        batches = self.batch_sampler
        if self._paced is None or not (batches is None or type(batches) is BatchSampler):
            raise DataError(
                f"only a loader on a paceline DistributedSampler can tell its indices; this one draws from "
                f"{type(self.sampler if self._paced is None else batches).__name__}. "
                "Let the dataset return each sample's index and pass those."
            )
        if self.num_workers > 0 and not self.in_order:
            raise DataError(
                "a loader with in_order=False gives batches in whatever order its workers finish, so its indices are "
                "not known. Use in_order=True, or let the dataset return each sample's index and pass those."
            )
        indices = self._paced.indices()
        if isinstance(batches, BatchSampler) and batches.drop_last:
            return indices[: len(indices) // batches.batch_size * batches.batch_size]
        return indices


class _Pass(Iterator[Any]):
    """torch's iterator over a loader, with an eye on whether the pass counts."""

    def __init__(self, batches: Iterator[Any], counted: Callable[[], None]) -> None:
        self._batches = batches
        self._counted = counted
        self._num_given = 0

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._counted()
            raise
        self._num_given += 1
        if self._num_given == 2:
            self._counted()
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # What some loops reach for on torch's iterator, such as _shutdown_workers. Not found in a half-made copy.
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)
