"""One pass over a loader's batches, on its way out of torch's iterator, and the seeds on the way in.

The invariant: a batch is consumed when the training loop has been given it, and not when a worker has made it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.autograd import profiler

from paceline.data.permutation import mix
from paceline.data.progress import Pass, Progress
from paceline.data.seeds import ForWorker, Seeded, seed_at
from paceline.data.stamps import Stamped
from paceline.data.suspicions import Watch
from paceline.errors import DataError


class Batches(Iterator[Any]):
    """torch's iterator over a loader, counting; the pass counts as an epoch from its second batch on.

    Args:
        batches: torch's iterator.
        current: the pass, which is told what has been consumed; None where the loader draws from no source of ours.
        watch: sees the first batches.
        samples_a_step: by which the batches count.
        length: of the epoch, in samples, where it is certain: no more can be consumed, and no fewer can come.
        num_batches: how many are left of it.
        key: the seed of batches that are made in this process; None leaves it its own random state.
    """

    def __init__(
        self,
        batches: Any,
        current: Pass | None,
        watch: Watch | None,
        *,
        samples_a_step: int = 0,
        length: int | None = None,
        num_batches: int | None = None,
        key: int | None = None,
    ) -> None:
        self._batches = batches
        self._current = Pass(0, 0, 0) if current is None else current
        self._watch = watch
        self._samples_a_step = samples_a_step
        self._length = length
        self._num_batches = num_batches
        self._key = key
        self._next_data = None if current is None else batches._next_data
        self._opening: bytes | None = None
        self._num_given = 0
        self._num_passed = 0  # and those that could not be made, where the loop went on all the same

    def __next__(self) -> Any:
        current, step = self._current, self._samples_a_step
        try:
            if self._key is None:
                batch = self._fetch()
            else:
                with Seeded(seed_at(self._key, current.start + self._num_passed * step)):
                    batch = self._fetch()
        except StopIteration as end:
            self._end(end)
            raise
        except Exception:
            # With workers, torch tells how far it has come: no further, if it lost patience or a worker.
            self._num_passed = getattr(self._batches, "_rcvd_idx", self._num_passed + 1)
            raise
        self._num_given += 1
        self._num_passed += 1
        consumed = current.start + self._num_passed * step
        current.consumed = consumed if self._length is None else min(consumed, max(self._length, current.start))
        current.snapshot = None
        if type(batch) is Stamped:
            current.snapshot = batch.state
            self._note_opening(batch.opening)
            batch = batch.value
        if self._num_given <= 2:
            current.is_counted = self._num_given == 2
            if self._watch is not None:
                self._watch.see(batch, self._opening)
        return batch

    def __len__(self) -> int:
        return len(self._batches) if self._num_batches is None else self._num_batches

    def __getattr__(self, name: str) -> Any:
        # What some loops reach for on torch's iterator, such as _shutdown_workers. Not found in a half-made copy.
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def _fetch(self) -> Any:
        """torch's ``__next__``, without its note for profilers if none listens: it takes most of the time there."""
        if self._next_data is None or profiler._is_profiler_enabled:
            return next(self._batches)
        batch = self._next_data()
        self._batches._num_yielded += 1
        return batch

    def _note_opening(self, opening: bytes | None) -> None:
        """Each worker tells once what it has read first of a stream."""
        if self._watch is not None and opening is not None and self._opening not in (None, opening):
            self._watch.warn_of_workers()
        self._opening = self._opening or opening

    def _end(self, end: StopIteration) -> None:
        self._current.is_counted = self._current.is_ended = True
        if self._length is not None and self._num_batches is not None and self._num_passed < self._num_batches:
            raise DataError(
                f"the pass ended after {self._num_passed} of {self._num_batches} batches: the dataset or the collate "
                "function raised StopIteration, which would end the epoch early on this rank alone. Let it raise "
                "something else."
            ) from end


class SeededItems(Iterable[Any]):
    """What workers are to load, batches or single indices, each with its seed.

    The seed follows from the place in the epoch, so a resumed run draws what an unbroken one would.
    """

    def __init__(self, items: Iterable[Any], key: int, progress: Progress, samples_a_step: int) -> None:
        self._items = items
        self._key = key
        self._progress = progress
        self._samples_a_step = samples_a_step

    def __iter__(self) -> Iterator[ForWorker]:
        key, position = mix(self._key, self._progress.epoch), self._progress.start
        for item in self._items:
            yield ForWorker(item, key, position)
            position += self._samples_a_step

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]
