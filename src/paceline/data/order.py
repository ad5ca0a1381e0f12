"""The order of an epoch: which sample each position holds, computed or drawn from another sampler.

The invariant: an order depends on the epoch and the seed, never on the rank. Each rank takes its own portion of it.
"""

import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Generator

from paceline.data.permutation import Permutation, mix
from paceline.data.seeds import OwnRandomness
from paceline.data.shares import Portion

# The length of an order that only its end can tell.
UNKNOWN = 2**62

# Chunks are small at first, so that the first index is there at once, then large, so that each is cheap.
_FIRST_CHUNK, _LAST_CHUNK, _CHUNK_GROWTH = 1024, 65536, 4


class Order(Protocol):
    """One epoch's order."""

    def chunks(self, portion: Portion) -> Iterator[Sequence[Any]]:
        """The portion's samples, in order, in pieces; none crosses the middle of the portion."""


class Computed:
    """The dataset's own order, or a permutation of it. Nothing is kept but a key."""

    def __init__(self, length: int, *, shuffle: bool, seed: int, epoch: int) -> None:
        self._permutation = Permutation(length, seed=seed, epoch=epoch) if shuffle and length else None

    def chunks(self, portion: Portion) -> Iterator[Sequence[int]]:
        half, size, first = portion.num_samples // 2, _FIRST_CHUNK, 0
        while first < portion.num_samples:
            last = min(first + size, half if first < half else portion.num_samples)
            # An array makes its integers as they are asked for, in memory that is still warm; a list makes all at once.
            yield array("q", self.indices(portion, first, last).tobytes())
            first, size = last, min(size * _CHUNK_GROWTH, _LAST_CHUNK)

    def indices(self, portion: Portion, first: int, last: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The portion's samples number ``first`` to ``last``, exclusive."""
        positions = portion.positions(first, last)
        return positions if self._permutation is None else self._permutation.permute(positions)


class Drawn:
    """What another sampler draws, whatever its items are. Every rank draws all of them and keeps its own.

    The sampler draws from a random state of its own, seeded by seed and epoch, so all ranks draw alike and that of the
    process is neither used nor changed. Generators that it holds are seeded likewise, from their own seeds.
    """

    def __init__(self, sampler: Any, generators: list[tuple[Generator, int]], *, seed: int, epoch: int) -> None:
        self._sampler = sampler
        self._generators = [(generator, mix(initial, seed, epoch)) for generator, initial in generators]
        self.randomness = OwnRandomness(mix(seed, epoch, 1))

    def chunks(self, portion: Portion) -> Iterator[Sequence[Any]]:
        half = portion.num_samples // 2
        parts, size, given = self.rounds(portion, max(_FIRST_CHUNK // portion.width, 1)), _FIRST_CHUNK, 0
        while True:
            own: list[Any] = []
            with self.randomness:
                for part in parts:
                    own += part
                    if len(own) >= size:
                        break
            if not own:
                return
            middle = half - given if given < half < given + len(own) else 0
            yield from filter(None, (own[:middle], own[middle:]))
            given, size = given + len(own), min(size * _CHUNK_GROWTH, _LAST_CHUNK)

    def rounds(self, portion: Portion, at_once: int = 1) -> Iterator[list[Any]]:
        """What is the rank's own of so many rounds at once; to be read within ``randomness``.

        Reads no further than it is asked.
        """
        period = portion.shares.total
        items = self._items()
        opening: list[Any] = []
        for item in itertools.islice(items, portion.start):
            if len(opening) < period:
                opening.append(item)
        while dealt := list(itertools.islice(items, period * at_once)):
            opening += dealt[: period - len(opening)]
            is_end = len(dealt) < period * at_once
            if portion.tail == "pad":
                dealt += itertools.islice(itertools.cycle(opening), -len(dealt) % period)
            yield portion.own_of(dealt)
            if is_end:
                return

    def _items(self) -> Iterator[Any]:
        for generator, seed in self._generators:
            generator.manual_seed(seed)
        return iter(self._sampler)
