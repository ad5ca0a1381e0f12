"""What a loader draws from, and how its batches count: samples a step, and batches an epoch.

The invariant: all ranks have batches of a size that their shares of a round divide, so the k-th batches together are
whole rounds of the epoch.
"""

from typing import Any, TypeAlias

from torch.utils.data import BatchSampler

from paceline.data.batches import BatchSampler as OwnBatchSampler
from paceline.data.sampler import DistributedSampler
from paceline.data.stream import ShardedStream
from paceline.data.wrapping import chain_of

Source: TypeAlias = DistributedSampler | ShardedStream


def source_of(sampler: Any, batch_sampler: Any) -> Source | None:
    """Our sampler, wherever it is. torch fills ``sampler`` with one that it doesn't use beside a batch sampler."""
    drawn = chain_of(sampler if batch_sampler is None else batch_sampler)
    return next((part for part in drawn if isinstance(part, DistributedSampler)), None)


def samples_a_step(source: Source | None, batches: Any) -> int | None:
    """How many positions of the epoch all ranks together take with each batch; None where that can't be known.

    Args:
        source: what the batches are drawn from, if it is ours.
        batches: the batch sampler; None where samples come one by one. It may be the source itself.
    """
    if source is None:
        return None
    own = source.shares.sizes[source.rank]
    if batches is None or batches is source:
        return source.shares.total if own == 1 else None
    is_known = type(batches) in (BatchSampler, OwnBatchSampler) and batches.sampler is source
    if isinstance(source, DistributedSampler) and not is_known:
        return None
    rounds, rest = divmod(batches.batch_size, own)
    return None if rest else rounds * source.shares.total


def num_batches(source: Source, batches: Any, *, start: int, rank: int) -> int:
    """How many batches a rank has of an epoch from ``start`` on; arguments as above."""
    num_samples = source.portion_of(rank, start).num_samples
    if batches is None or batches is source:
        return num_samples
    sizes = source.shares.sizes
    batch_size: int = batches.batch_size // sizes[source.rank] * sizes[rank]
    return num_samples // batch_size if batches.drop_last else -(-num_samples // batch_size)
