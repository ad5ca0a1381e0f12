"""Epochs that advance by themselves, or as a loader says, and a state to resume from: the sampler's side of it.

The invariant: who paces a sampler is settled once. Either iterating over it begins a pass, or a loader does, and
iterating only reads.
"""

import abc
import contextlib
from collections.abc import Iterator
from typing import Any

import torch.utils.data.distributed

from paceline.data.progress import Pass, Progress, check_state


class PacedSampler(torch.utils.data.distributed.DistributedSampler[Any]):
    """What a ``DistributedSampler`` is, but for its order: where it is, and how it goes on."""

    progress: Progress
    _paced_by_loader = False
    _drawn_by: Pass | None = None

    @property
    def epoch(self) -> int:
        return self.progress.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Use ``epoch`` for the next pass; passes after it go on from there.

        After ``load_state_dict``, the epoch that was loaded goes on where it stood, and any other begins at its start.

        Args:
            epoch: any integer; the same on all ranks.
        """
        self.progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the run is: the epoch, and how many samples of it all ranks together have consumed.

        Consumed is what has been taken from the sampler, or from the loader of ours that draws from it; torch's loader
        takes ahead for its workers. The ranks are taken to keep pace, so any rank's state is good for all.
        """
        epoch, consumed, _ = self.progress.place()
        return {"epoch": epoch, "consumed": consumed, **self._order_in_words()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken, on any number of ranks, with exactly the samples not yet consumed.

        Args:
            state: from ``state_dict`` of a sampler of the same dataset, seed and shuffle; the same on all ranks.
        Raises:
            DataError: it is not; or it is no such state.
        """
        epoch, consumed = check_state(state, self._order_in_words(), "sampler")
        self.progress.move(epoch, consumed)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within, iterating only reads the epoch in use."""
        before = self._paced_by_loader, self._drawn_by
        self._paced_by_loader, self._drawn_by = True, None
        try:
            yield
        finally:
            self._paced_by_loader, self._drawn_by = before

    def begin_pass(self, *, counts_samples: bool = True) -> Pass:
        """Begin a pass for a loader that decides itself when it counts; the loader then iterates over the sampler.

        From the first call on, iterating over the sampler only reads the epoch in use and never advances it.

        Args:
            counts_samples: whether the loader tells what is consumed. If not, it is what is drawn from the sampler.
        Raises:
            DataError: as iterating does.
        """
        self._check_unchanged()
        self._paced_by_loader = True
        current = self._begin()
        self._drawn_by = None if counts_samples else current
        return current

    def _begin(self) -> Pass:
        return self.progress.begin()

    @abc.abstractmethod
    def _check_unchanged(self) -> None:
        """Raise a DataError where samples must not be given out any more."""

    @abc.abstractmethod
    def _order_in_words(self) -> dict[str, Any]:
        """What another sampler must have in common for its order to be the same."""
