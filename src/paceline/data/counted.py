"""What a loader whose batches are counted can be asked: where it is, to go on there, and what its batches hold.

The invariant: all that is told follows from the source of ours that the loader draws from, and nothing from workers.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.utils.data
from torch.utils.data import BatchSampler

from paceline.data.counting import Source, num_batches, samples_a_step
from paceline.data.sampler import DistributedSampler
from paceline.data.shares import shares_of
from paceline.data.stream import ShardedStream
from paceline.errors import DataError

T_co = TypeVar("T_co", covariant=True)


class CountedLoader(torch.utils.data.DataLoader[T_co]):
    """torch's DataLoader with a ``source``: the sampler or stream of ours that it draws from, if any."""

    source: Source | None

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
            untold = self.dataset if isinstance(source, ShardedStream) else source.dataset
            raise DataError(f"a {type(untold).__name__} does not tell its length, so the batches can't be counted")
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
