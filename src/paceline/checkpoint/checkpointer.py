"""``Checkpointer``: all that a run consists of, saved now and then, and gone on from.

The invariant: a run that goes on from a checkpoint does what it would have done without an interruption. So the state
of everything, random generators included, is of one moment, between two steps.
"""

import logging
import os
from typing import Any, Literal, Protocol

import torch.distributed as dist
from torch import nn

from paceline import world
from paceline.checkpoint import files, retention, rng, shards
from paceline.checkpoint.atomic import remove_abandoned
from paceline.checkpoint.packing import pack
from paceline.checkpoint.prefixes import fitted, plainly_named
from paceline.checkpoint.ranks import on_first, ranks_of
from paceline.checkpoint.saving import save
from paceline.checkpoint.snapshot import HostMemory, Snapshot
from paceline.checkpoint.writer import Writer
from paceline.errors import CheckpointDamagedError, CheckpointError

logger = logging.getLogger("paceline.checkpoint")


class Stateful(Protocol):
    """Whatever a run consists of."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Checkpointer:
    """Saves a run every so many steps, keeps the last checkpoints and the best one, and goes on from the newest.

    ::

        with paceline.Checkpointer("runs/a", every=500, model=model, optimizer=optimizer, loader=loader) as checkpoints:
            checkpoints.resume()
            while checkpoints.num_steps < num_steps:
                for x, y in loader:
                    train(x, y)
                    if checkpoints.step():  # this job is to end: all is saved
                        return

    All ranks make the same calls. The first one's state is saved, with the random states of each.

    Args:
        directory: a folder, made if it is not there; ``step-0000000500.pt`` and its like are the checkpoints in it.
        every: steps from one checkpoint to the next.
        keep: how many of the last ones stay; the best one stays besides.
        async_: write beside training, which stops only while the state is copied to host memory. A checkpoint that is
            due while the one before is being written waits for it.
        best: whether a higher metric is better, or a lower one; without it no best one is kept.
        stop: let ``step`` ask ``World.should_stop``, so that SIGTERM or SIGUSR1 ends the run with a checkpoint.
        weights_only: as for ``load``. A state that would need False is refused when it is first saved.
        group: the ranks that save; by default all.
        parts: what the run consists of, by names of your choice: anything with ``state_dict`` and ``load_state_dict``,
            ``paceline.amp`` too. They are loaded in this order. Models are saved under their plain names, without
            ``module.``.
    Attributes:
        num_steps: how many steps the run has done; ``resume`` sets it.
    Raises:
        CheckpointError: an argument is out of range, or a part has no state; or the folder cannot be made.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int,
        keep: int = 3,
        async_: bool = True,
        best: Literal["max", "min"] | None = None,
        stop: bool = True,
        weights_only: bool = True,
        group: dist.ProcessGroup | None = None,
        **parts: Stateful,
    ) -> None:
        if every < 1 or keep < 1:
            raise CheckpointError(f"every={every} and keep={keep}: expected 1 or more of each.")
        if best not in ("max", "min", None):
            raise CheckpointError(f"best={best!r}: expected 'max' or 'min', as the metric is to be, or None.")
        stateless = [name for name, part in parts.items() if not _is_stateful(part)]
        if stateless or not parts:
            given = ", ".join(f"{name} is a {type(parts[name]).__name__}" for name in stateless) or "there is none"
            raise CheckpointError(f"a part needs state_dict() and load_state_dict(), and {given}.")
        self.directory = os.fspath(directory)
        self.num_steps = 0
        self._every, self._keep, self._is_async = every, keep, async_
        self._sign = {"max": 1, "min": -1, None: 0}[best]
        self._stop, self._weights_only = stop, weights_only
        self._parts = parts
        self._ranks = ranks_of(group, alone=False)
        self._memory = HostMemory()
        self._writer = Writer()
        self._best: tuple[int, float] | None = None
        self._is_stopped = False
        on_first(self._ranks, self._make_directory)

    @property
    def best(self) -> str | None:
        """On the first rank, the file of the best checkpoint; None where no metric has come with any."""
        return None if self._best is None else self._path_of(self._best[0])

    def resume(self) -> int:
        """Load the newest good checkpoint, on any number of ranks, if there is one.

        A damaged one is renamed, to a name that ends in ``.damaged``, and the one before it taken.

        Returns:
            The number of steps done, 0 at the start of a run.
        Raises:
            CheckpointDamagedError: there are checkpoints, and none is good.
            CheckpointError: it lacks a part that this run has, or holds objects that ``weights_only`` refuses.
            Exception: what a part's ``load_state_dict`` raises.
        """
        state = on_first(self._ranks, self._newest_good, tell=False)
        if self._ranks.world_size > 1:
            packed = self._ranks.broadcast(pack(state) if self._ranks.rank == 0 else None)
            state = state if self._ranks.rank == 0 else packed.unpack()
        if state is None:
            return self.num_steps
        missing = [name for name in self._parts if name not in state["parts"]]
        if missing:
            raise CheckpointError(
                f"the checkpoint of step {state['step']} in {self.directory} has no {', '.join(missing)}; it has "
                f"{', '.join(state['parts'])}. Name the parts as when it was saved."
            )
        for name, part in self._parts.items():
            own = state["parts"][name]
            part.load_state_dict(fitted(own, part) if isinstance(part, nn.Module) else own)
        rng.restore(state["rng"], self._ranks.rank)
        self.num_steps, self._best = state["step"], state["best"]
        return self.num_steps

    def step(self, metric: float | None = None) -> bool:
        """Count a step that is done, and save if it is time.

        Args:
            metric: how good the state is, for the best one; it counts where a checkpoint is written at this step.
        Returns:
            Whether to stop, the same on all ranks: this job has been told to end, and what it has is saved.
        Raises:
            CheckpointError: a checkpoint could not be written: on the first rank at its next step, on the others when
                the next one is due; or as ``save`` does.
        """
        self.num_steps += 1
        job = world.current() if self._stop else None
        is_over = job is not None and job.should_stop()
        if is_over and not self._is_stopped:
            self._is_stopped = True
            self.save(metric)
            self.wait()
        elif self.num_steps % self._every == 0 and not self._is_stopped:
            self.save(metric)
        self._writer.check()
        return is_over

    def save(self, metric: float | None = None) -> None:
        """Save now. With ``async_``, it returns once the state is copied.

        Raises:
            CheckpointError: on all ranks alike: this checkpoint, or the one before, could not be written; or a part is
                sharded.
        """
        self.wait()
        parts = {name: _state_of(part) for name, part in self._parts.items()}
        sharded = [name for name, state in parts.items() if shards.is_sharded(state)]
        answers = self._ranks.all((rng.states(), sharded))
        if any(names for _, names in answers):
            raise CheckpointError(
                f"the state of {', '.join(sharded)} is sharded, and a Checkpointer saves what one rank has. Save it "
                "with paceline.save."
            )
        if self._ranks.rank == 0:
            step, best = self.num_steps, self._better(metric)
            state = {"step": step, "parts": parts, "rng": [states for states, _ in answers], "best": best}
            snapshot = self._memory.take(state)
            self._writer.start(lambda: self._write(snapshot, step, best))
        if not self._is_async:
            self.wait()

    def wait(self) -> None:
        """Return once what has been saved is durable.

        Raises:
            CheckpointError: on all ranks alike: it could not be written.
        """
        on_first(self._ranks, self._writer.wait)

    def export(self, path: str | os.PathLike[str], part: str = "model") -> None:
        """Save the weights of a model alone, under plain names: as safetensors, where ``path`` ends in that.

        Raises:
            CheckpointError: there is no such part; or as ``paceline.save`` does.
        """
        if part not in self._parts:
            raise CheckpointError(f"there is no part {part!r} to export; there are {', '.join(self._parts)}.")
        save(_state_of(self._parts[part]), path, group=self._ranks.group)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
            return
        try:  # the other ranks may be gone: no word to them
            self._writer.wait()
        except Exception:
            logger.exception("a checkpoint in %s could not be written", self.directory)

    def _make_directory(self) -> None:
        try:
            os.makedirs(self.directory, exist_ok=True)
            remove_abandoned(self.directory)  # of a run that was killed
        except OSError as error:
            raise CheckpointError(f"the folder {self.directory} for checkpoints could not be made: {error}") from error

    def _path_of(self, step: int) -> str:
        return os.path.join(self.directory, retention.name_of(step))

    def _better(self, metric: float | None) -> tuple[int, float] | None:
        if metric is None or self._sign == 0:
            return self._best
        value = float(metric)
        is_better = self._best is None or self._sign * value > self._sign * self._best[1]
        return (self.num_steps, value) if is_better else self._best

    def _write(self, snapshot: Snapshot, step: int, best: tuple[int, float] | None) -> None:
        path = self._path_of(step)
        files.write(snapshot.unpack(), path)
        if self._weights_only and (names := files.unsafe_in(path)):
            os.unlink(path)
            raise CheckpointError(
                f"a part's state holds objects of {', '.join(names)}, which would not be loaded again without trust. "
                "Let state_dict() return tensors and plain values, or give Checkpointer weights_only=False."
            )
        self._best = best
        kept = retention.steps_among(os.listdir(self.directory))
        for old in retention.surplus(kept, keep=self._keep, best=None if best is None else best[0]):
            os.unlink(self._path_of(old))

    def _newest_good(self) -> dict[str, Any] | None:
        steps = retention.steps_among(os.listdir(self.directory))
        for step in steps:
            path = self._path_of(step)
            try:
                found: dict[str, Any] = files.read(path, weights_only=self._weights_only)
                return found
            except CheckpointDamagedError as error:
                logger.warning("%s It is renamed to %s.damaged.", error, path)
                os.replace(path, f"{path}.damaged")
        if steps:
            raise CheckpointDamagedError(
                f"none of the {len(steps)} checkpoints in {self.directory} is good; they are renamed to *.damaged. To "
                "start anew, run once more."
            )
        return None


def _is_stateful(part: Any) -> bool:
    return all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))


def _state_of(part: Stateful) -> dict[str, Any]:
    state = part.state_dict()
    return plainly_named(state) if isinstance(part, nn.Module) else state
