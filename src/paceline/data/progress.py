"""How far a run has come: which epoch, and how much of it all ranks together have consumed.

The invariant: what has been consumed is always the start of the epoch's order, so two numbers tell it, and they mean
the same for any number of ranks and any size of batch.

[Note: what counts as an epoch]
The epoch advances by itself, yet a look at the data must not: ``next(iter(loader))`` on rank 0 alone, to log a few
images, would put rank 0 an epoch ahead of the others, and from then on the ranks would see some samples twice and
others never. So a pass must go far enough to count. Our DataLoader knows its batches and counts a pass from the second
one on. A bare sampler does not know how many indices make a batch, nor how many a foreign loader fetches ahead, and
counts a pass once it has given more than half of its indices.

[Note: resuming]
A state that was saved within a pass continues that pass: the next one begins where it stood, with nothing left if its
last batch had been taken. One that was saved after the end is the start of the next epoch. Where a pass begins belongs
to the epoch, so a look at the data does not lose it, nor does ``set_epoch`` with the epoch that was loaded, which is
what scripts for torch's sampler call.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.data.ranks import as_integer
from paceline.data.shares import Portion
from paceline.errors import DataError


@dataclass
class Pass:
    """One way through an epoch, from ``start`` on.

    What it has consumed is told by whoever drives it: a loader sets ``consumed`` after each batch; a sampler lets its
    chunks be followed, so that it costs nothing an index. ``snapshot`` is the state of an iterable dataset there.
    """

    epoch: int
    start: int
    consumed: int
    snapshot: Any = None
    is_counted: bool = False
    is_ended: bool = False
    _portion: Portion | None = None
    _chunk: Iterator[Any] | None = None
    _num_before: int = 0
    _num_begun: int = 0

    def follow(self, chunk: Sequence[Any], portion: Portion) -> Iterator[Any]:
        """Iterate over a chunk of this rank's samples, which begins where the one before it ended."""
        self._portion = portion
        self._num_before, self._num_begun = self._num_begun, self._num_begun + len(chunk)
        self._chunk = iter(chunk)
        return self._chunk

    def consumed_now(self) -> int:
        """The number of samples of this epoch that all ranks together have taken, if they keep pace."""
        if self._portion is None or self._chunk is None:
            return self.consumed
        # Iterators over lists and arrays tell how far they are to pickle, as long as they are not through.
        told: Any = self._chunk.__reduce__()
        is_through = len(told) < 3
        return self._portion.consumed_after(self._num_begun if is_through else self._num_before + told[2])


@dataclass
class Progress:
    """The epoch in use, where its passes begin, and the latest pass.

    ``num_looks`` is how many passes before it, one after another, gave something and did not count.
    """

    epoch: int = 0
    start: int = 0
    snapshot: Any = None
    num_looks: int = 0
    _latest: Pass | None = field(default=None)

    def begin(self) -> Pass:
        """Begin a pass: of the next epoch, if the latest one counted."""
        latest = self._latest
        was_look = latest is not None and not latest.is_counted and latest.consumed > latest.start
        self.num_looks = self.num_looks + 1 if was_look else 0
        if latest is not None and latest.is_counted:
            self.move(self.epoch + 1, 0)
        self._latest = Pass(self.epoch, self.start, self.start, self.snapshot)
        return self._latest

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of ``epoch``; what passes are under way no longer matter."""
        epoch = as_integer("epoch", epoch)
        is_other = epoch != self.epoch or (self._latest is not None and self._latest.is_counted)
        self.move(epoch, 0 if is_other else self.start, None if is_other else self.snapshot)

    def place(self) -> tuple[int, int, Any]:
        """The epoch, how much of it is consumed, and the snapshot there; as another run is to continue."""
        if self._latest is None:
            return self.epoch, self.start, self.snapshot
        if self._latest.is_ended:
            return self.epoch + 1, 0, None
        return self.epoch, self._latest.consumed_now(), self._latest.snapshot

    def move(self, epoch: int, consumed: int, snapshot: Any = None) -> None:
        """Let the next pass be of ``epoch``, from ``consumed`` on."""
        self.epoch, self.start, self.snapshot, self._latest = epoch, consumed, snapshot, None


def check_state(state: Any, expected: Mapping[str, Any], owner: str) -> tuple[int, int]:
    """What a state says of epoch and consumed samples, once it is known to be of the same order.

    Args:
        state: as ``state_dict`` gave it.
        expected: what else it must say; differing would be another order of samples.
        owner: who loads it, for errors.
    Raises:
        DataError: the state is of another form, or of another order.
    """
    if not isinstance(state, Mapping) or not {"epoch", "consumed"} <= set(state):
        given = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise DataError(f"a {owner}'s state should be what its state_dict() gave, with epoch and consumed; got {given}")
    for key, value in expected.items():
        if state.get(key) != value:
            raise DataError(
                f"the state was saved with {key}={state.get(key)!r}, but this {owner} has {key}={value!r}: its order "
                "of samples is another, so some would come twice and others never. Make it as the one that was saved."
            )
    epoch, consumed = as_integer("epoch", state["epoch"]), as_integer("consumed", state["consumed"])
    most = expected.get("length")
    if consumed < 0 or (most is not None and consumed > most and "stream" not in expected):
        bounds = "0 or more" if most is None else f"from 0 to {most}"
        raise DataError(f"consumed should be {bounds}, got {consumed}; the state has been changed")
    return epoch, consumed
