"""How a loader's batches are made: each from a random state of its own, here or in whichever worker.

The invariant: what is drawn follows from the key, the epoch and the batch's place in it, and from nothing else.
"""

import copy
from typing import Any

import torch

from paceline.data.counted import CountedLoader, T_co
from paceline.data.passes import SeededItems
from paceline.data.permutation import mix
from paceline.data.rows import Rows, as_it_is, rows_of
from paceline.data.sampler import DistributedSampler
from paceline.data.stamps import CollateStamped, InitWorker
from paceline.data.stream import ShardedStream


class SeededLoader(CountedLoader[T_co]):
    """A loader with a key for what is drawn when its batches are made: one for each rank.

    Without a generator of the user's, torch's seeds for starting workers follow from the key too.
    """

    def _seed(self, seed: int, rank: int, generator: torch.Generator | None) -> None:
        self._key = mix(torch.initial_seed() if generator is None else generator.initial_seed(), seed, rank)
        self._has_own_generator = generator is None
        if self._has_own_generator:
            self.generator.manual_seed(self._key)

    def _seed_pass(self, epoch: int) -> int | None:
        """The epoch's key, for what is drawn in this process; None where nothing is, or batches are not counted."""
        key = mix(self._key, epoch)
        if self._has_own_generator:
            # By epoch, and not one draw after another: a look at the data on one rank shifts nothing.
            self.generator.manual_seed(key)
        is_made_here = self.num_workers == 0 and self._samples_a_step() is not None and self._rows() is None
        return key if is_made_here else None

    @property
    def _index_sampler(self) -> Any:
        """What torch's iterators draw from: batches or indices, each with the seed of the worker that will load it."""
        items = super()._index_sampler
        step = self._samples_a_step()
        if self.num_workers == 0 or step is None or not isinstance(self.source, DistributedSampler):
            return items
        return SeededItems(items, self._key, self.source.progress, step)

    def _get_iterator(self) -> Any:
        # torch's iterators take everything from the loader that they are given; the user's keeps what it had.
        twin = copy.copy(self)
        if isinstance(self.source, ShardedStream):
            loaded: Any = self.source
            collate_fn: Any = CollateStamped(self.collate_fn, is_batched=self._auto_collation)
        else:
            loaded, collate_fn = self._rows(), as_it_is
        if loaded is not None:
            init = InitWorker(self.worker_init_fn)
            vars(twin).update(dataset=loaded, collate_fn=collate_fn, worker_init_fn=init)
        if self.source is not None and not self._has_own_generator:
            # Drawn as torch draws it; but it may be drawn alike on all ranks, and their workers are to differ.
            drawn = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
            vars(twin).update(generator=torch.Generator().manual_seed(mix(drawn, self._key)))
        return super(SeededLoader, twin)._get_iterator()

    def _rows(self) -> Rows | None:
        return rows_of(self.dataset, self.collate_fn) if self._auto_collation else None
