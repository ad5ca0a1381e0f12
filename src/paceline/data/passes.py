"""One pass over a loader's batches, on its way out of torch's iterator, and the seeds on the way in.

The invariant: a batch is consumed when the training loop has been given it, and not when a worker has made it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from paceline.data.order import UNKNOWN
from paceline.data.permutation import mix
from paceline.data.progress import Pass, Progress
from paceline.data.seeds import SeededBatch
from paceline.data.stream import Stamped
from paceline.data.suspicions import Watch


class Batches(Iterator[Any]):
    """torch's iterator over a loader, counting; the pass counts as an epoch from its second batch on."""

    def __init__(
        self,
        batches: Iterator[Any],
        current: Pass,
        watch: Watch | None,
        *,
        samples_a_step: int = 0,
        length: int = UNKNOWN,
        num_batches: int | None = None,
    ) -> None:
        self._batches = batches
        self._current = current
        self._watch = watch
        self._samples_a_step = samples_a_step
        self._length = length
        self._num_batches = num_batches
        self._num_given = 0

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._current.is_counted = self._current.is_ended = True
            raise
        current = self._current
        self._num_given += 1
        current.consumed = min(current.consumed + self._samples_a_step, self._length)
        current.snapshot = None
        if type(batch) is Stamped:
            batch, current.snapshot = batch.value, batch.state
        if self._num_given <= 2:
            if self._watch is not None:
                self._watch.see(batch, self._num_given)
            current.is_counted = self._num_given == 2
        return batch

    def __len__(self) -> int:
        return len(self._batches) if self._num_batches is None else self._num_batches  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # What some loops reach for on torch's iterator, such as _shutdown_workers. Not found in a half-made copy.
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)


class SeededBatches(Iterable[Any]):
    """Lists of indices, each with the seed of whichever worker makes that batch.

    The seed follows from the batch's place in the epoch, so a resumed run draws what an unbroken one would.
    """

    def __init__(self, batches: Iterable[Any], key: int, progress: Progress, samples_a_step: int) -> None:
        self._batches = batches
        self._key = key
        self._progress = progress
        self._samples_a_step = samples_a_step

    def __iter__(self) -> Iterator[SeededBatch]:
        key, position = mix(self._key, self._progress.epoch), self._progress.start
        for batch in self._batches:
            yield SeededBatch(batch, mix(key, position))
            position += self._samples_a_step

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]
