"""Which samples a rank sees, and in which order: torch's DistributedSampler without its list of all indices.

The invariant: position p of an epoch holds the same sample whatever the number of ranks, and rank r of N takes the
positions r, r + N, r + 2N, ... So a step sees the same global batch on one rank or on many.

[Note: what counts as an epoch]
The epoch advances by itself, yet a look at the data must not: ``next(iter(loader))`` on rank 0 alone, to log a few
images, would put rank 0 an epoch ahead of the others, and from then on the ranks would see some samples twice and
others never. So a pass must go far enough to count. Our DataLoader knows its batches and counts a pass from the second
one on. A bare sampler does not know how many indices make a batch, nor how many a foreign loader fetches ahead, and
counts a pass once it has given more than half of its indices.
"""

import operator
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
import torch.utils.data.distributed
from torch.utils.data import Dataset

from paceline.data.permutation import SIZE_LIMIT, Permutation
from paceline.errors import DataError

# Indices are computed in chunks: small at first, so that the first is there at once, then large, so that each is cheap.
_FIRST_CHUNK, _LAST_CHUNK, _CHUNK_GROWTH = 256, 65536, 4


class DistributedSampler(torch.utils.data.distributed.DistributedSampler[int]):
    """torch's DistributedSampler in constant memory, with epochs that advance by themselves.

    Sharding, padding and ``drop_last`` are torch's to the index; the shuffled order is our own, and depends on the
    dataset's length, ``seed`` and the epoch alone.

    The first pass is epoch 0, or the epoch last given to ``set_epoch``. Each later pass takes the next epoch if the
    pass before it counted, and the same epoch again if not. A pass counts once it has given more than half of the
    rank's indices (or all, where that is none); a shorter one is taken for a look at the data. When passes end in the
    first half on purpose, or the ranks make different numbers of passes, call ``set_epoch`` before each.

    Args:
        dataset: anything with a length, which must not change afterwards.
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
    Raises:
        DataError: ``rank`` or ``num_replicas`` is out of range, or only ``num_replicas`` was given and the rank can't
            be told from it; ``padding=False`` came with ``drop_last=True``; the dataset is larger than 2**40.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        padding: bool = True,
    ) -> None:
        # A group that is initialised later would show that this process was not alone after all.
        self._assumed_alone = (num_replicas is None or rank is None) and _default_group() is None
        num_replicas, rank = _place(num_replicas, rank)
        if drop_last and not padding:
            raise DataError(
                "padding=False keeps every sample and drop_last=True drops the tail: the two contradict each other. "
                "Give padding=False alone to see each sample once, or drop_last=True alone for ranks of equal length."
            )
        self._length = len(cast(Sized, dataset))
        if self._length > SIZE_LIMIT:
            raise DataError(f"the dataset has {self._length} samples; a sampler can order at most {SIZE_LIMIT} (2**40)")
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.padding = padding
        if not padding:
            self.num_samples = len(range(rank, self._length, num_replicas))
            self.total_size = self._length
        self._epoch_counted = False
        self._num_passes = 0
        self._paced_by_loader = False

    def __iter__(self) -> Iterator[int]:
        """Begin a pass.

        Raises:
            DataError: the dataset's length has changed, or this sampler took the process for the only one and a group
                of several ranks has been initialised since.
        """
        self._check_unchanged()
        if self._paced_by_loader:
            return self._generate(self.epoch, lambda: None)
        counted = self._next_pass()
        return self._generate(self.epoch, counted)

    def set_epoch(self, epoch: int) -> None:
        """Use ``epoch`` for the next pass; passes after it go on from there.

        Args:
            epoch: any integer; the same on all ranks.
        """
        self.epoch = epoch
        self._epoch_counted = False
        # A pass that is still under way belongs to the epoch before; it must not count for this one.
        self._num_passes += 1

    def begin_pass(self) -> Callable[[], None]:
        """Begin a pass for a loader that decides itself when it counts; the loader then iterates over the sampler.

        From the first call on, iterating over the sampler only reads the epoch in use and never advances it.

        Returns:
            A function to call once the pass counts, so that the next one takes the next epoch.
        Raises:
            DataError: as iterating does.
        """
        self._check_unchanged()
        self._paced_by_loader = True
        return self._next_pass()

    def indices(self) -> npt.NDArray[np.int64]:
        """This rank's dataset indices in the epoch in use, in the order in which a pass gives them.

        Changes nothing, neither the epoch nor a pass under way.

        Returns:
            shape (num_samples,).
        """
        return self._dataset_indices(self._order(self.epoch), 0, self.num_samples)

    def _next_pass(self) -> Callable[[], None]:
        """Move to the epoch that the next pass is for; give what marks that pass as counted."""
        if self._epoch_counted:
            self.epoch += 1
            self._epoch_counted = False
        self._num_passes += 1
        number = self._num_passes

        def counted() -> None:
            if self._num_passes == number:
                self._epoch_counted = True

        return counted

    def _generate(self, epoch: int, counted: Callable[[], None]) -> Iterator[int]:
        """Yield the rank's indices; call ``counted`` when one beyond half of them is asked for."""
        order = self._order(epoch)
        half, chunk, start = self.num_samples // 2, _FIRST_CHUNK, 0
        while start < self.num_samples:
            if start == half:
                counted()
            # No chunk crosses the half, so that the moment is exact without a test an index.
            limit = half if start < half else self.num_samples
            stop = min(start + chunk, limit)
            yield from self._dataset_indices(order, start, stop).tolist()
            start, chunk = stop, min(chunk * _CHUNK_GROWTH, _LAST_CHUNK)
        counted()

    def _order(self, epoch: int) -> Permutation | None:
        if not self.shuffle or self._length == 0:
            return None
        return Permutation(self._length, seed=self.seed, epoch=epoch)

    def _dataset_indices(self, order: Permutation | None, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The indices of this rank's samples number ``start`` to ``stop``, exclusive."""
        positions = self.rank + self.num_replicas * np.arange(start, stop, dtype=np.int64)
        if positions.size and positions[-1] >= self._length:
            positions %= self._length  # padding wraps round, as often as it must
        return positions if order is None else order.permute(positions)

    def _check_unchanged(self) -> None:
        length = len(cast(Sized, self.dataset))
        if length != self._length:
            raise DataError(
                f"rank {self.rank}: the dataset had {self._length} samples when its sampler was made and now has "
                f"{length}. Make a new sampler after changing a dataset."
            )
        group = _default_group()
        if self._assumed_alone and group is not None and group[0] > 1:
            raise DataError(
                f"this sampler was made before torch.distributed was initialised and took its process for the only "
                f"one, but the process is rank {group[1]} of {group[0]}: every rank would see the whole dataset. "
                "Make samplers and loaders after the process group, or give num_replicas and rank."
            )


def current_rank() -> int:
    """This process's rank in torch.distributed's default group; 0 where none is initialised."""
    group = _default_group()
    return 0 if group is None else group[1]


def _default_group() -> tuple[int, int] | None:
    """World size and rank in the default group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return None


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Fill in what was not given from the default group, and check the result."""
    world_size, world_rank = _default_group() or (1, 0)
    replicas = world_size if num_replicas is None else _as_integer("num_replicas", num_replicas)
    if replicas < 1:
        raise DataError(f"num_replicas should be 1 or more, got {replicas}")
    if rank is None and replicas != world_size:
        raise DataError(
            f"num_replicas={replicas} came without a rank, and the rank can't be told from a world of {world_size}. "
            "Give both, or neither."
        )
    place = world_rank if rank is None else _as_integer("rank", rank)
    if not 0 <= place < replicas:
        raise DataError(f"rank should be from 0 to {replicas - 1}, since num_replicas is {replicas}; got {place}")
    return replicas, place


def _as_integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise DataError(f"{name} should be an integer, got {value!r} of type {type(value).__name__}") from None
