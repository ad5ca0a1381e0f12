"""Batches: how large this rank's are, and which indices are in them.

The invariant: a global batch is one round of the sampler, or several whole ones, so that it holds the same samples
however many ranks share it.
"""

from collections.abc import Sequence
from typing import Any

import torch.utils.data
from torch.utils.data import Sampler

from paceline.data.sampler import DistributedSampler
from paceline.data.shares import Shares, shares_of
from paceline.errors import DataError


class BatchSampler(torch.utils.data.BatchSampler):
    """torch's BatchSampler, whose batches are this rank's share; for a loader's ``batch_sampler``.

    Args:
        sampler: a ``DistributedSampler``; or any other sampler, of which one is made.
        batch_size: samples in this rank's batches; None with ``global_batch_size``.
        drop_last: drop a last batch that is not full, on all ranks alike where ``global_batch_size`` is given.
        global_batch_size: samples in all ranks' batches together; see ``DataLoader``.
        weights: one a rank: their shares of each global batch.
    Raises:
        DataError: what ``DistributedSampler`` refuses; both sizes were given, or none; a share is empty.
    """

    def __init__(
        self,
        sampler: Sampler[Any],
        batch_size: int | None = None,
        drop_last: bool = False,
        *,
        global_batch_size: int | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        if not isinstance(sampler, DistributedSampler):
            sampler = DistributedSampler(sampler, drop_last=drop_last)
        if (batch_size is None) == (global_batch_size is None):
            raise DataError(
                "a BatchSampler wants one of batch_size, of this rank, and global_batch_size; got "
                f"batch_size={batch_size} and global_batch_size={global_batch_size}"
            )
        shares = dealt_shares(1 if batch_size is None else batch_size, global_batch_size, weights, sampler.num_replicas)
        if shares is not None:
            sampler.deal(shares, drop_last=drop_last or sampler.drop_last)
            batch_size = shares.sizes[sampler.rank]
        assert batch_size is not None
        super().__init__(sampler, batch_size, drop_last)
        self._sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Use ``epoch`` for the next pass, as the sampler's own."""
        self._sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken, with batches of any size.

        Raises:
            DataError: as for the sampler.
        """
        self._sampler.load_state_dict(state)


def dealt_shares(
    batch_size: int | None, global_batch_size: int | None, weights: Sequence[float] | None, num_replicas: int
) -> Shares | None:
    """Rounds that are whole global batches; None where equal batches of ``batch_size`` will do.

    Raises:
        DataError: two sizes were given, or none; a size is not positive; a share is empty.
    """
    if global_batch_size is None and weights is None:
        return None
    if global_batch_size is None:
        if batch_size is None:
            raise DataError(
                "weights divide batches, and batch_size=None makes none. Give batch_size or global_batch_size."
            )
        return shares_of(batch_size * num_replicas, num_replicas, weights)
    if batch_size != 1:
        raise DataError(
            f"batch_size={batch_size} is of this rank and global_batch_size={global_batch_size} of all together. "
            "Give one of them."
        )
    if global_batch_size < 1:
        raise DataError(f"global_batch_size should be 1 or more, got {global_batch_size}")
    return shares_of(global_batch_size, num_replicas, weights)
