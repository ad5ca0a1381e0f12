"""Iterable datasets, of which each rank and each worker takes its own part without knowing of the others.

The invariant: with b samples in a rank's batches, worker w of W makes the batches w, w + W, w + 2W, ..., which torch's
loader asks for in that order. So a rank's batches are the same for any number of workers, and after k of them all ranks
together have consumed exactly the first part of the stream.

[Note: everybody reads everything]
A stream can't be entered in the middle, so every worker of every rank reads all of it and gives what is its own. In
return the position in the stream is one number for all, and so is the dataset's own state at that position. What costs
much for each sample, decoding say, belongs into ``collate_fn`` or a map over the loader, behind the sharding.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from paceline.data.order import UNKNOWN, Drawn
from paceline.data.permutation import mix
from paceline.data.progress import Pass, Progress, check_state
from paceline.data.shares import Portion, Shares, Tail
from paceline.data.wrapping import length_of


class Stamped:
    """A sample, or the batch that it completes, with the dataset's state after all samples of that global batch."""

    def __init__(self, value: Any, state: Any) -> None:
        self.value = value
        self.state = state

    def pin_memory(self) -> "Stamped":
        return Stamped(pin_memory(self.value), self.state)  # type: ignore[no-untyped-call]


class ShardedStream(IterableDataset[Any]):
    """A rank's part of an iterable dataset, dealt again to its workers. To a loader it is what a sampler is elsewhere.

    Args:
        dataset: yields the same samples in the same order on all ranks and in all workers; it draws from a random state
            that is seeded alike for all of them by ``seed`` and the epoch. If it has ``set_epoch``, that is called
            before each pass; if it has ``state_dict`` and ``load_state_dict``, they serve to resume.
        shares, rank, tail: which part of each round is this rank's.
        batch_size: samples in this rank's batches, a multiple of its part of a round.
    """

    def __init__(
        self, dataset: IterableDataset[Any], shares: Shares, rank: int, *, tail: Tail, batch_size: int, seed: int
    ) -> None:
        self.dataset = dataset
        self.rank = rank
        self.num_replicas = len(shares.weights)
        self.progress = Progress()
        self._tail: Tail = tail
        self._seed = seed
        has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._initial: Any = copy.deepcopy(dataset.state_dict()) if has_state else None  # type: ignore[attr-defined]
        # Epoch and start, in memory that workers who live on from one epoch to the next share with the loader.
        self._place = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self.deal(shares, batch_size // shares.sizes[rank])

    @property
    def length(self) -> int | None:
        """Samples in an epoch, as the dataset tells it; None where it doesn't."""
        return length_of(self.dataset)

    def deal(self, shares: Shares, rounds_a_batch: int = 1) -> None:
        """Take another share of every round. Workers must be started after."""
        self.shares = shares
        self._rounds_a_batch = rounds_a_batch

    def begin_pass(self, *, counts_samples: bool = True) -> Pass:
        """Begin a pass; iterations, in whichever process, are of its epoch then, from where it begins."""
        assert counts_samples
        current = self.progress.begin()
        self._place[0], self._place[1] = current.epoch, current.start
        return current

    def portion_of(self, rank: int, start: int = 0) -> Portion:
        """What a rank takes of an epoch from the position ``start`` on."""
        length = self.length
        return Portion(self.shares, rank, start, UNKNOWN if length is None else length, self._tail)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the samples consumed of it, and the dataset's state there, if it has one."""
        epoch, consumed, snapshot = self.progress.place()
        return {"epoch": epoch, "consumed": consumed, **self._order_in_words(), "dataset": snapshot}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken. Workers must be started after.

        Raises:
            DataError: the state is of another form, dataset or seed.
        """
        epoch, consumed = check_state(state, self._order_in_words(), "loader")
        self.progress.move(epoch, consumed, state.get("dataset"))

    def _order_in_words(self) -> dict[str, Any]:
        return {"stream": type(self.dataset).__name__, "seed": self._seed}

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        for number, block in enumerate(self._blocks(worker, num_workers)):
            if number % num_workers == worker:
                yield from block

    def _blocks(self, worker: int, num_workers: int) -> Iterator[list[Any]]:
        """This rank's batches, as lists of samples; the last one of a worker's own carries the dataset's state."""
        epoch, start = self._place.tolist()
        skipped, snapshot = start, self.progress.snapshot
        if snapshot is not None and start > 0:
            skipped = 0
        order = Drawn(self.dataset, [], seed=mix(self._seed, start - skipped), epoch=epoch)
        portion = Portion(self.shares, self.rank, skipped, UNKNOWN, self._tail)
        with order.randomness:
            if self._initial is not None:
                # A pass that was given up may have left the dataset anywhere.
                self.dataset.load_state_dict(copy.deepcopy(self._initial))  # type: ignore[attr-defined]
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            if skipped < start:
                self.dataset.load_state_dict(copy.deepcopy(snapshot))  # type: ignore[attr-defined]
        rounds = order.rounds(portion)
        for number in itertools.count():
            block: list[Any] = []
            with order.randomness, _as_if_alone():
                num_read = 0
                for part in rounds:
                    block += part
                    num_read += 1
                    if num_read == self._rounds_a_batch:
                        break
                is_own = number % num_workers == worker
                if block and is_own and self._initial is not None and num_read == self._rounds_a_batch:
                    block[-1] = Stamped(block[-1], copy.deepcopy(self.dataset.state_dict()))  # type: ignore[attr-defined]
            if not block:
                return
            yield block


@contextlib.contextmanager
def _as_if_alone() -> Iterator[None]:
    """Let a dataset find no worker info: by torch's recipe for streams it would share out by it what is shared here."""
    worker: Any = torch.utils.data._utils.worker
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


class CollateStamped:
    """A collate function behind which a stamp moves from the last sample to the batch."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, is_batched: bool) -> None:
        self._collate_fn = collate_fn
        self._is_batched = is_batched

    def __call__(self, data: Any) -> Any:
        last = data[-1] if self._is_batched else data
        if not isinstance(last, Stamped):
            return self._collate_fn(data)
        plain = [*data[:-1], last.value] if self._is_batched else last.value
        return Stamped(self._collate_fn(plain), last.state)


class InitWorker:
    """What a worker runs first: ``get_worker_info().dataset`` is to be the user's dataset, as torch has it."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        # Past the guard of torch's class.
        object.__setattr__(info, "dataset", cast(ShardedStream, info.dataset).dataset)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)
