"""The folder of a run's checkpoints: written, read and cleaned by one rank for all, or by each its part.

The invariant: the newest good checkpoint in it is the one that a run goes on from.
"""

import contextlib
import logging
import os
from typing import Any

from paceline.checkpoint import files, retention, shards
from paceline.checkpoint.atomic import remove_abandoned
from paceline.checkpoint.parts import check_needs_no_trust, unsafe_in_state
from paceline.checkpoint.ranks import Ranks, on_all, on_first
from paceline.errors import CheckpointDamagedError, CheckpointError

logger = logging.getLogger("paceline.checkpoint")


class Folder:
    """Checkpoints of a run, by the number of steps done.

    Args:
        path: an absolute one.
        keep: how many of the last ones stay.
        weights_only: whether a state that could not be loaded without trust is refused.
    """

    def __init__(self, path: str, *, keep: int, weights_only: bool) -> None:
        self._path, self._keep, self._weights_only = path, keep, weights_only

    def make(self) -> None:
        """Make it, if it is not there, and remove what a run that was killed had begun.

        Raises:
            CheckpointError: it cannot be made.
        """
        try:
            os.makedirs(self._path, exist_ok=True)
            remove_abandoned(self._path)
            shards.remove_all_unnamed(self._path)
        except OSError as error:
            raise CheckpointError(f"the folder {self._path} for checkpoints could not be made: {error}") from error

    def path_of(self, step: int) -> str:
        """The file of a step's checkpoint."""
        return os.path.join(self._path, retention.name_of(step))

    def write(self, state: Any, step: int, best_step: int | None) -> None:
        """Write a checkpoint, and remove those that are to stay no longer.

        Raises:
            CheckpointError: the disk refuses; the state would need trust; or there are later checkpoints.
        """
        self._check_is_newest(step)
        path = self.path_of(step)
        files.write(state, path)
        if self._weights_only:
            try:
                check_needs_no_trust(files.unsafe_in(path))
            except CheckpointError:
                os.unlink(path)
                raise
        self._retain(best_step)

    def write_shards(self, state: Any, step: int, best_step: int | None, ranks: Ranks) -> None:
        """``write``, where each rank has a part. A collective call; errors are raised on all ranks."""

        def check() -> None:
            self._check_is_newest(step)
            if self._weights_only:
                check_needs_no_trust(unsafe_in_state(state))

        on_all(ranks, check)
        shards.save(state, self.path_of(step), ranks)
        on_first(ranks, lambda: self._retain(best_step))

    def newest_good(self) -> Any:
        """The newest state, or its shards; None where there is none. Damaged checkpoints are renamed.

        Raises:
            CheckpointDamagedError: there are checkpoints, and none is good.
            CheckpointError: it cannot be read, or not without trust.
        """
        steps = self._steps()
        for step in steps:
            path = self.path_of(step)
            try:
                found = files.read(path, weights_only=self._weights_only)
                return shards.verified(path, found) if shards.is_index(found) else found
            except CheckpointDamagedError as error:
                logger.warning("%s It is renamed to %s.damaged.", error, path)
                os.replace(path, f"{path}.damaged")
        if steps:
            raise CheckpointDamagedError(
                f"none of the {len(steps)} checkpoints in {self._path} is good; they are renamed to *.damaged. To "
                "start anew, run once more."
            )
        return None

    def _check_is_newest(self, step: int) -> None:
        """Refuse what would be removed at once, as the oldest of them, and not be gone on from."""
        newest = max(self._steps() if os.path.isdir(self._path) else [], default=step)
        if newest > step:
            raise CheckpointError(
                f"step {step} cannot be saved in {self._path}, which has a checkpoint of step {newest}, of another "
                "run or of one that was not gone on from. Call resume() before the first step, or use another folder."
            )

    def _retain(self, best_step: int | None) -> None:
        for old in retention.surplus(self._steps(), keep=self._keep, best=best_step):
            with contextlib.suppress(FileNotFoundError):  # somebody has cleaned up
                os.unlink(self.path_of(old))
            shards.remove_unnamed(self.path_of(old))

    def _steps(self) -> list[int]:
        return retention.steps_among(os.listdir(self._path))
