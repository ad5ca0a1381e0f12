"""Iterable datasets, of which each rank and each worker takes its own part without knowing of the others.

The invariant: with b samples in a rank's batches, worker w of W makes the batches w, w + W, w + 2W, ..., which torch's
loader asks for in that order. So a rank's batches are the same for any number of workers, and after k of them all ranks
together have consumed exactly the first part of the stream.

[Note: everybody reads everything]
A stream can't be entered in the middle, so every worker of every rank reads all of it and gives what is its own. In
return the position in the stream is one number for all, and so is the dataset's own state at that position. What costs
much for each sample, decoding say, belongs into ``collate_fn``, behind the sharding.
"""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data.order import UNKNOWN, Drawn
from paceline.data.permutation import mix
from paceline.data.progress import Pass, Progress, check_state
from paceline.data.ranks import Place, as_integer
from paceline.data.seeds import seed_at
from paceline.data.shares import Portion, Shares, Tail
from paceline.data.stamps import Opened, Stamped
from paceline.data.wrapping import length_of


class ShardedStream(IterableDataset[Any]):
    """A rank's part of an iterable dataset, dealt again to its workers. To a loader it is what a sampler is elsewhere.

    Args:
        dataset: yields the same samples in the same order on all ranks and in all workers; it draws from a random state
            that is seeded alike for all of them by ``seed`` and the epoch. If it has ``set_epoch``, that is called
            before each pass; if it has ``state_dict`` and ``load_state_dict``, they serve to resume.
        shares, rank, tail: which part of each round is this rank's.
        batch_size: samples in this rank's batches, a multiple of its part of a round.
        seed: of what the dataset draws; alike on all ranks.
        key: of what is drawn when batches are collated; one for each rank.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        shares: Shares,
        place: Place,
        *,
        tail: Tail,
        batch_size: int,
        seed: int,
        key: int,
    ) -> None:
        self.dataset = dataset
        self.rank = place.rank
        self.num_replicas = place.num_replicas
        self.seed = as_integer("seed", seed)
        self.key = key
        self.progress = Progress()
        self._placed = place
        self._tail: Tail = tail
        self._has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._initial: Any = copy.deepcopy(self._state()) if self._has_state else None
        self._here = torch.zeros(2, dtype=torch.int64)
        self.deal(shares, batch_size // shares.sizes[self.rank])

    @property
    def length(self) -> int | None:
        """Samples in an epoch, as the dataset tells it; None where it doesn't."""
        return length_of(self.dataset)

    exact_length = None

    def deal(self, shares: Shares, rounds_a_batch: int = 1) -> None:
        """Take another share of every round. Workers must be started after."""
        self.shares = shares
        self._rounds_a_batch = rounds_a_batch

    def begin_pass(self, *, counts_samples: bool = True, in_running_workers: bool = False) -> Pass:
        """Begin a pass; iterations, in whichever process, are of its epoch then, from where it begins.

        Args:
            in_running_workers: workers that have made an earlier pass make this one too.
        Raises:
            DataError: this process was taken for the only one, and it is not.
        """
        assert counts_samples
        self._placed.check("loader")
        current = self.progress.begin()
        if not in_running_workers:
            # Memory of its own for each pass, since an earlier one's workers may not have looked yet; shared, since
            # these may live on for later passes.
            self._here = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._here[0], self._here[1] = current.epoch, current.start
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
        return {"stream": type(self.dataset).__name__, "length": self.length, "seed": self.seed}

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        # Looked up now, and not when the first sample is asked for: by then another pass may have begun.
        epoch, start = self._here.tolist()
        return itertools.chain.from_iterable(self._blocks(epoch, start, worker, num_workers))

    def look(self) -> Iterator[Any]:
        """This rank's samples of the epoch in use, read here and now; the dataset is left in the state it was in."""
        before = copy.deepcopy(self._state()) if self._has_state else None
        for block in self._blocks(self.progress.epoch, self.progress.start, 0, 1):
            *others, last = block
            yield from (*others, last.value)
        if before is not None:
            self.dataset.load_state_dict(before)  # type: ignore[attr-defined]

    def _state(self) -> Any:
        return self.dataset.state_dict()  # type: ignore[attr-defined]

    def _blocks(self, epoch: int, start: int, worker: int, num_workers: int) -> Iterator[list[Any]]:
        """A worker's batches, as lists of samples, of which the last is stamped. It reads those of the others too."""
        has_snapshot = self.progress.snapshot is not None and start > 0
        skipped = 0 if has_snapshot else start
        opened = Opened(self.dataset)
        order = Drawn(opened, [], seed=mix(self.seed, start - skipped), epoch=epoch)
        with order.randomness:
            self._enter(epoch, self.progress.snapshot if has_snapshot else None)
        portion = Portion(self.shares, self.rank, skipped, UNKNOWN, self._tail)
        rounds = order.rounds(portion, self._rounds_a_batch)
        key = mix(self.key, epoch)
        for number in itertools.count():
            with order.randomness, _as_if_alone():
                block = next(rounds, [])
                is_own = number % num_workers == worker
                # At its end a stream's state may be that of its start again.
                has_place = is_own and self._has_state and not opened.is_through
                state = copy.deepcopy(self._state()) if has_place else None
            if not block:
                return
            if is_own:
                seed = seed_at(key, start + number * self._rounds_a_batch * self.shares.total)
                block[-1] = Stamped(block[-1], seed, state, opened.take_digest())
                yield block

    def _enter(self, epoch: int, snapshot: Any) -> None:
        """Bring the dataset to the start of an epoch, or to a place in it."""
        if self._initial is not None:
            # A pass that was given up may have left the dataset anywhere.
            self.dataset.load_state_dict(copy.deepcopy(self._initial))  # type: ignore[attr-defined]
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if snapshot is not None:
            self.dataset.load_state_dict(copy.deepcopy(snapshot))  # type: ignore[attr-defined]


@contextlib.contextmanager
def _as_if_alone() -> Iterator[None]:
    """Let a dataset find no worker info: by torch's recipe for streams it would share out by it what is shared here."""
    worker: Any = torch.utils.data._utils.worker
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
