"""How an epoch's positions are dealt to the ranks: equally, or by weights.

The invariant: positions are dealt in rounds, one after another, and all ranks have taken part in a round before the
next begins. So what the ranks have taken together is always the start of the epoch, whatever each one's share is.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError

Tail: TypeAlias = Literal["pad", "drop", "keep"]


@lru_cache(maxsize=64)
def apportion(total: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """Divide ``total`` samples in proportion to ``weights``, as evenly as whole numbers allow.

    Webster's method: unlike largest remainders, no rank gets more of a smaller total. Of equals the lower rank comes
    first.

    Args:
        total: 0 or more.
        weights: one a rank, positive and finite.
    Returns:
        Each rank's number; their sum is ``total``.
    """
    if len(set(weights)) == 1:
        each, rest = divmod(total, len(weights))
        return tuple(each + (rank < rest) for rank in range(len(weights)))
    sizes = [0] * len(weights)
    queue = [(-weight, rank) for rank, weight in enumerate(weights)]
    heapq.heapify(queue)
    for _ in range(total):
        rank = queue[0][1]
        sizes[rank] += 1
        heapq.heapreplace(queue, (-weights[rank] / (2 * sizes[rank] + 1), rank))
    return tuple(sizes)


@dataclass(frozen=True)
class Shares:
    """A round of ``total`` positions, and the weights by which it is dealt.

    Raises:
        DataError: a weight is not positive and finite, or some rank would get nothing of a full round.
    """

    total: int
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        for rank, weight in enumerate(self.weights):
            if not 0 < weight < math.inf:
                raise DataError(f"weights should be positive and finite, got {weight} for rank {rank}")
        for rank, size in enumerate(self.sizes):
            if size == 0:
                raise DataError(
                    f"a global batch of {self.total} leaves nothing for rank {rank} of {len(self.weights)}, whose "
                    f"weight is {self.weights[rank]:g} of {sum(self.weights):g}. Make the global batch larger, or the "
                    "weights less unequal."
                )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many positions of a full round each rank has."""
        return apportion(self.total, self.weights)

    def full_span(self, rank: int) -> tuple[int, int]:
        """Where a rank's positions lie in a full round: the first one, and how many."""
        return self._spans[rank]

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        return [*zip(itertools.accumulate(self.sizes, initial=0), self.sizes, strict=False)]

    def span(self, rank: int, size: int) -> tuple[int, int]:
        """Where a rank's positions lie in a round of ``size``: the first one, and how many."""
        sizes = apportion(size, self.weights)
        return sum(sizes[:rank]), sizes[rank]


def equal_shares(num_replicas: int) -> Shares:
    """One position of each round for each rank, as torch deals them."""
    return Shares(num_replicas, (1.0,) * num_replicas)


def shares_of(global_batch_size: int, num_replicas: int, weights: Sequence[float] | None) -> Shares:
    """Rounds that are global batches.

    Raises:
        DataError: as ``Shares``; or there is not one weight for each rank.
    """
    given = (1.0,) * num_replicas if weights is None else tuple(float(weight) for weight in weights)
    if len(given) != num_replicas:
        raise DataError(f"weights should hold one number for each of {num_replicas} ranks, got {len(given)}")
    return Shares(global_batch_size, given)


@dataclass(frozen=True)
class Portion:
    """What one rank takes of an epoch's positions from ``start`` to ``length``.

    ``tail`` says what becomes of a last round that is not full: it is filled from the start of the epoch, dropped, or
    dealt as it is, so that some ranks may get less, or nothing.
    """

    shares: Shares
    rank: int
    start: int
    length: int
    tail: Tail

    # Where the rank's positions lie in a full round, and in a last one that is dealt as it is: the first, and how many.
    _full: tuple[int, int] = field(init=False, repr=False)
    _last: tuple[int, int] = field(init=False, repr=False)
    _num_full: int = field(init=False, repr=False)
    _rest: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # At once and past the guard of a frozen class: cached properties take locks, which take longer.
        rounds, rest = divmod(max(self.length - self.start, 0), self.shares.total)
        dealt = rest if self.tail == "keep" else 0
        vars(self).update(
            _full=self.shares.full_span(self.rank),
            _last=self.shares.span(self.rank, dealt) if dealt else (0, 0),
            _num_full=rounds + (rest > 0 and self.tail == "pad"),
            _rest=dealt,
        )

    @property
    def width(self) -> int:
        """How many positions of a full round the rank takes."""
        return self._full[1]

    @property
    def num_samples(self) -> int:
        """How many positions the rank takes."""
        return self._num_full * self._full[1] + self._last[1]

    @property
    def num_dealt(self) -> int:
        """How many positions all ranks take together, repetitions included."""
        return self._num_full * self.shares.total + self._rest

    def positions(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """The rank's positions number ``first`` to ``last``, exclusive, each in ``range(length)``; in order."""
        offset, width = self._full
        if width == 1:
            step = self.shares.total
            positions = np.arange(self.start + offset + first * step, self.start + offset + last * step, step)
        else:
            numbers = np.arange(first, last, dtype=np.int64)
            positions = numbers // width * self.shares.total + (numbers % width + (self.start + offset))
        if last > self._num_full * width:
            positions[max(self._num_full * width - first, 0) :] += self._last[0] - offset
        if positions.size and positions[-1] >= self.length:
            positions %= self.length  # padding wraps round, as often as it must
        return positions

    def own_of(self, dealt: Sequence[Any]) -> list[Any]:
        """The rank's part of what was dealt in some rounds, of which only the last may not be full."""
        period, (first, width) = self.shares.total, self._full
        full = len(dealt) // period * period
        if width == 1:
            own = [*dealt[first:full:period]]
        else:
            own = [item for start in range(first, full, period) for item in dealt[start : start + width]]
        if full < len(dealt) and self.tail == "keep":
            start, count = self.shares.span(self.rank, len(dealt) - full)
            own += dealt[full + start : full + start + count]
        return own

    def consumed_after(self, num_taken: int) -> int:
        """How much of the epoch is consumed once this rank has taken that many, and the others have kept pace."""
        if num_taken >= self.num_samples:
            return max(self.length, self.start)
        return min(self.start + num_taken // self._full[1] * self.shares.total, self.length)
