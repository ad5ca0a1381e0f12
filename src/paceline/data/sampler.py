"""Which samples a rank sees, and in which order: torch's DistributedSampler without its list of all indices.

The invariant: position p of an epoch holds the same sample whatever the number of ranks, and rank r of N takes the
positions r, r + N, r + 2N, ... So a step sees the same global batch on one rank or on many.
"""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, Sampler

from paceline.data.digests import digest_of_subset
from paceline.data.order import UNKNOWN, Computed, Drawn
from paceline.data.paced import PacedSampler
from paceline.data.permutation import SIZE_LIMIT
from paceline.data.progress import Pass, Progress
from paceline.data.ranks import as_integer, find_place
from paceline.data.shares import Portion, Shares, Tail, equal_shares
from paceline.data.wrapping import generators_of, is_sampler, is_sharded, length_of, set_epoch_of, words_of
from paceline.errors import DataError


class DistributedSampler(PacedSampler):
    """torch's DistributedSampler in constant memory, with epochs that advance by themselves and a state to resume from.

    Sharding, padding and ``drop_last`` are torch's to the index; the shuffled order is our own, and depends on the
    dataset's length, ``seed`` and the epoch alone.

    In place of the dataset it takes any other sampler, weighted, of a subset, sorted by length, or a batch sampler, and
    gives this rank's share of what that one draws, whatever that is: whole batches, from a batch sampler. All ranks
    draw alike, from a random state that follows from ``seed`` and the epoch. ``shuffle`` has no effect then. A sampler
    is what can be iterated over but not indexed, or a ``torch.utils.data.Sampler``.

    The first pass is epoch 0, or the epoch last given to ``set_epoch``. Each later pass takes the next epoch if the
    pass before it counted, and the same epoch again if not. A pass counts once it has given more than half of the
    rank's indices (or all, where that is none); a shorter one is taken for a look at the data. When passes end in the
    first half on purpose, or the ranks make different numbers of passes, call ``set_epoch`` before each.

    Args:
        dataset: anything with a length, which must not change afterwards; or a sampler.
        num_replicas: how many ranks share the dataset; by default those of torch.distributed's default group, or
            one where no group is initialised.
        rank: this one among them; by default this process's rank in that group.
        shuffle: reshuffle every epoch; otherwise the dataset's own order.
        seed: must be the same on all ranks.
        drop_last: drop the tail that does not divide evenly, so that no sample comes twice.
        padding: repeat samples from the start of the epoch until all ranks have equally many. With False each sample
            comes exactly once, ranks may differ by one sample, and some may have none: right for evaluation.
    Attributes:
        epoch: the epoch in use: that of the latest pass, or what ``set_epoch`` gave since.
        wrapped: the sampler that was given; None where it was a dataset.
    Raises:
        DataError: ``rank`` or ``num_replicas`` is out of range, or only ``num_replicas`` was given and the rank can't
            be told from it; ``seed`` is no integer; ``padding=False`` came with ``drop_last=True``; the dataset is
            larger than 2**40, or an iterator.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sampler[Any] | Iterable[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        padding: bool = True,
    ) -> None:
        self._place = find_place(num_replicas, rank)
        num_replicas, rank = self._place.num_replicas, self._place.rank
        if drop_last and not padding:
            raise DataError(
                "padding=False keeps every sample and drop_last=True drops the tail: the two contradict each other. "
                "Give padding=False alone to see each sample once, or drop_last=True alone for ranks of equal length."
            )
        self.wrapped: Any = dataset if is_sampler(dataset) else None
        self._length = len(cast(Sized, dataset)) if self.wrapped is None else length_of(dataset)
        if self._length is not None and self._length > SIZE_LIMIT:
            raise DataError(f"the dataset has {self._length} samples; a sampler can order at most {SIZE_LIMIT} (2**40)")
        if self.wrapped is not None and num_replicas > 1 and is_sharded(dataset):
            warnings.warn(
                f"rank {rank}: the {type(dataset).__name__} given to DistributedSampler gives this rank's share "
                "already. Sharded twice, most samples come on no rank. Leave one of the two out.",
                stacklevel=2,
            )
        # What torch's class sets; its own __init__ wants a length.
        self.dataset: Any = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = as_integer("seed", seed)
        self.drop_last = drop_last
        self.padding = padding
        self.progress = Progress()
        self._generators = generators_of(dataset) if self.wrapped is not None else []
        self.deal(equal_shares(num_replicas))

    @property
    def length(self) -> int | None:
        """Samples in an epoch, as the ranks share them; None where only its end will tell."""
        return self._length

    @property
    def exact_length(self) -> int | None:
        """The same, but None also where a wrapped sampler tells it, which may be a guess."""
        return self._length if self.wrapped is None else None

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass.

        Raises:
            DataError: the dataset's length has changed, or this sampler took the process for the only one and a group
                of several ranks has been initialised since.
        """
        self._check_unchanged()
        if self._paced_by_loader:
            portion = self._portion(self.progress.start)
            chunks: Iterator[Any] = self._order().chunks(portion)
            if self._drawn_by is not None:
                chunks = map(self._drawn_by.follow, chunks, itertools.repeat(self._as_counted(portion)))
            return itertools.chain.from_iterable(chunks)
        current = self._begin()
        order, portion = self._order(), self._portion(current.start)
        return itertools.chain.from_iterable(self._followed(order, portion, current))

    def __len__(self) -> int:
        """How many indices this rank has in a whole epoch, also while one is resumed.

        Raises:
            TypeError: the wrapped sampler has no length.
        """
        if self._length is None:
            raise TypeError(f"{type(self.dataset).__name__}, which this sampler wraps, has no length")
        return self.num_samples

    def deal(self, shares: Shares, *, drop_last: bool | None = None) -> None:
        """Take another share of every round, from the next pass on: what batches of unequal size are made of.

        Args:
            shares: one for each rank; alike on all ranks.
            drop_last: replaces the sampler's own.
        """
        assert len(shares.weights) == self.num_replicas
        self.shares = shares
        self.drop_last = self.drop_last if drop_last is None else drop_last
        self._measure()

    def portion_of(self, rank: int, start: int = 0) -> Portion:
        """What a rank takes of an epoch from the position ``start`` on."""
        tail: Tail = "drop" if self.drop_last else "pad" if self.padding else "keep"
        return Portion(self.shares, rank, start, UNKNOWN if self._length is None else self._length, tail)

    def indices(self) -> npt.NDArray[np.int64]:
        """This rank's dataset indices in the epoch in use, in the order in which a pass gives them.

        Changes nothing, neither the epoch nor a pass under way.

        Returns:
            shape (n,): num_samples, or what is left of the epoch where it was resumed.
        """
        order, portion = self._order(), self._portion(self.progress.start)
        if isinstance(order, Computed):
            return order.indices(portion, 0, portion.num_samples)
        items = itertools.chain.from_iterable(order.chunks(portion))
        return np.fromiter(itertools.chain.from_iterable(map(_as_list, items)), np.int64)

    def _followed(self, order: Computed | Drawn, portion: Portion, current: Pass) -> Iterator[Iterator[Any]]:
        """The pass in chunks; it counts when one beyond half of it is asked for."""
        half, given, counted = portion.num_samples // 2, 0, self._as_counted(portion)
        for chunk in order.chunks(portion):
            current.is_counted = given >= half
            given += len(chunk)
            yield current.follow(chunk, counted)
        current.is_counted = current.is_ended = True

    def _begin(self) -> Pass:
        current = super()._begin()
        if self.wrapped is not None:
            # Batch samplers may have another number of batches in each epoch.
            set_epoch_of(self.wrapped, current.epoch)
            self._length = length_of(self.wrapped)
            self._measure()
        return current

    def _measure(self) -> None:
        epoch = self._portion(0)
        self.num_samples, self.total_size = epoch.num_samples, epoch.num_dealt

    def _order(self) -> Computed | Drawn:
        epoch = self.progress.epoch
        if self.wrapped is None:
            assert self._length is not None
            return Computed(self._length, shuffle=self.shuffle, seed=self.seed, epoch=epoch)
        set_epoch_of(self.wrapped, epoch)
        return Drawn(self.wrapped, self._generators, seed=self.seed, epoch=epoch)

    def _portion(self, start: int) -> Portion:
        return self.portion_of(self.rank, start)

    def _as_counted(self, portion: Portion) -> Portion:
        """The portion by which consumed samples are counted: the length that a wrapped sampler tells may be a guess."""
        return portion if self.wrapped is None else dataclasses.replace(portion, length=UNKNOWN)

    def _order_in_words(self) -> dict[str, Any]:
        if self.wrapped is not None:
            return {"wraps": words_of(self.wrapped), "seed": self.seed}
        chosen = {} if self._subset is None else {"subset": self._subset}
        return {"length": self._length, "seed": self.seed, "shuffle": bool(self.shuffle), **chosen}

    @functools.cached_property
    def _subset(self) -> str | None:
        digest = digest_of_subset(self.dataset)
        return None if digest is None else digest.hex()[:16]

    def _check_unchanged(self) -> None:
        length = self._length if self.wrapped is not None else len(cast(Sized, self.dataset))
        if length != self._length:
            raise DataError(
                f"rank {self.rank}: the dataset had {self._length} samples when its sampler was made and now has "
                f"{length}. Make a new sampler after changing a dataset."
            )
        self._place.check("sampler")


def _as_list(item: Any) -> list[Any]:
    return list(item) if isinstance(item, (list, tuple)) else [item]
