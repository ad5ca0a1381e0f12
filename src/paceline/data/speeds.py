"""Weights for ranks of unequal speed, by what each has measured."""

import math

import torch.distributed as dist

from paceline.data.exchange import ranks_of
from paceline.errors import DataError


def measured_weights(samples_per_s: float, *, group: dist.ProcessGroup | None = None) -> list[float]:
    """What to give to ``DataLoader(weights=...)`` or its ``set_weights``, so that all ranks need equally long.

    A collective call: all ranks get the same list.

    Args:
        samples_per_s: how fast this rank is by itself: samples over the seconds that it computed, not counting those in
            which it waited for the others.
        group: the ranks among which batches are divided; by default all.
    Returns:
        Each rank's part of the sum of all speeds.
    Raises:
        DataError: on all ranks alike: a speed is not positive and finite.
    """
    ranks = ranks_of(group)
    speeds = ranks.all(float(samples_per_s))
    for rank, speed in zip(ranks.names, speeds, strict=True):
        if not 0 < speed < math.inf:
            raise DataError(f"rank {rank}: samples_per_s should be positive and finite, got {speed}")
    return [speed / sum(speeds) for speed in speeds]
