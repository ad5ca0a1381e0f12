"""What accompanies a batch of an iterable dataset from where its samples are read to the loader.

The invariant: neither the user's collate function nor the training loop sees any of it.

[Note: stamps]
The last sample of each batch is stamped. The stamp goes to the collate function, in a worker or here, with the seed of
the random state in which that is to run; and on with the batch to the loader, if it has more to tell: the dataset's own
state behind the batch, or, with the first batch that a worker makes, what the stream began with.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from paceline.data.digests import digest_if_any
from paceline.data.seeds import seed_process


class Stamped:
    """A sample, or the batch that it completes.

    Attributes:
        value: the sample or batch.
        seed: for the random state in which the batch is collated, by its place in the epoch.
        state: the dataset's state after all samples of that global batch; None without.
        opening: a digest of the first sample that was read, of whichever rank; None but with a worker's first batch.
    """

    def __init__(self, value: Any, seed: int, state: Any, opening: bytes | None) -> None:
        self.value = value
        self.seed = seed
        self.state = state
        self.opening = opening

    def pin_memory(self) -> "Stamped":
        pinned = pin_memory(self.value)  # type: ignore[no-untyped-call]
        return Stamped(pinned, self.seed, self.state, self.opening)


class Opened:
    """A stream, a digest of its first sample, once, and whether it has been read to its end."""

    def __init__(self, stream: Iterable[Any]) -> None:
        self._stream = stream
        self._digest: bytes | None = None
        self.is_through = False

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self._stream)
        for first in samples:
            self._digest = digest_if_any(first)
            yield first
            yield from samples
        self.is_through = True

    def take_digest(self) -> bytes | None:
        digest, self._digest = self._digest, None
        return digest


class CollateStamped:
    """A collate function behind which a stamp moves from the last sample to the batch."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, is_batched: bool) -> None:
        self._collate_fn = collate_fn
        self._is_batched = is_batched

    def __call__(self, data: Any) -> Any:
        last = data[-1] if self._is_batched else data
        if not isinstance(last, Stamped):
            return self._collate_fn(data)
        if get_worker_info() is not None:
            seed_process(last.seed)
        batch = self._collate_fn([*data[:-1], last.value] if self._is_batched else last.value)
        has_more = last.state is not None or last.opening is not None
        return Stamped(batch, last.seed, last.state, last.opening) if has_more else batch


class InitWorker:
    """What a worker runs first: ``get_worker_info().dataset`` is to be the user's dataset, as torch has it."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        # Past the guard of torch's class.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)
