"""``Checkpointer``: all that a run consists of, saved now and then, and gone on from.

The invariant: a run that goes on from a checkpoint does what it would have done without an interruption. So the state
of everything, random generators included, is of one moment, between two steps.
"""

import functools
import logging
import math
import os
from typing import Literal

import torch.distributed as dist

from paceline import world
from paceline.checkpoint import rng, shards
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.packing import pack
from paceline.checkpoint.parts import Parts, Stateful, check_nothing_is_lost
from paceline.checkpoint.placing import outline_of, placed
from paceline.checkpoint.ranks import Ranks, beside_of, on_all, on_first, ranks_of
from paceline.checkpoint.saving import save
from paceline.checkpoint.snapshot import HostMemory, Snapshot
from paceline.checkpoint.writer import Writer
from paceline.errors import CheckpointError

logger = logging.getLogger("paceline.checkpoint")


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
            ``module.``. Where one holds sharded tensors (DTensor), each rank saves and loads its own part.
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
        self._parts = Parts(parts)
        self.directory = os.path.abspath(os.fsdecode(directory))  # wherever the script goes meanwhile
        self.num_steps = 0
        self._folder = Folder(self.directory, keep=keep, weights_only=weights_only)
        self._every, self._is_async = every, async_
        self._sign = {"max": 1, "min": -1, None: 0}[best]
        self._stop, self._weights_only = stop, weights_only
        self._ranks = ranks_of(group, alone=False)
        self._memory = HostMemory()
        self._writer = Writer()
        self._best: tuple[int, float] | None = None
        self._has_saved_at_stop = False
        self._beside: Ranks | None = None
        on_first(self._ranks, self._folder.make)

    @property
    def best(self) -> str | None:
        """On the first rank, the file of the best checkpoint; None where no metric has come with any."""
        return None if self._best is None else self._folder.path_of(self._best[0])

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
        state = on_first(self._ranks, self._folder.newest_good, tell=False)
        parted = self._ranks.told(state if isinstance(state, shards.Shards) else None)
        if parted is not None:
            target = self._parts.target()
            state = on_all(self._ranks, lambda: parted.read(target, weights_only=self._weights_only))
        elif self._ranks.world_size > 1:
            packed = self._ranks.broadcast(pack(state) if self._ranks.rank == 0 else None)
            state = state if self._ranks.rank == 0 else packed.unpack()
        if state is None:
            return self.num_steps
        found = placed({"parts": state["parts"]}, self._parts.target()) if parted is None else state
        self._parts.load(found["parts"], f"the checkpoint of step {state['step']} in {self.directory}")
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
        is_end = is_over and not self._has_saved_at_stop
        if is_end or self.num_steps % self._every == 0:
            self.save(metric)
        if is_end:
            self._has_saved_at_stop = True
            self.wait()
        self._writer.check()
        return is_over

    def save(self, metric: float | None = None) -> None:
        """Save now. With ``async_``, it returns once the state is copied.

        Raises:
            CheckpointError: on all ranks alike: the checkpoint before could not be written, or a rank has what would
                not be saved.
        """
        self.wait()
        parts = on_all(self._ranks, self._parts.states)
        answers = self._ranks.all((rng.states(), shards.is_sharded(parts), outline_of(parts)))
        is_sharded = any(has_shards for _, has_shards, _ in answers)
        if not is_sharded:
            check_nothing_is_lost([outline for *_, outline in answers])
        step, best = self.num_steps, self._better(metric)
        if is_sharded or self._ranks.rank == 0:
            state = {"step": step, "parts": parts, "rng": [states for states, *_ in answers], "best": best}
            snapshot = self._memory.take(state)
            if is_sharded:
                self._beside = self._beside or beside_of(self._ranks)
            self._writer.start(
                functools.partial(self._write, snapshot, step, best, self._beside if is_sharded else None)
            )
        if not self._is_async:
            self.wait()

    def wait(self) -> None:
        """Return once what has been saved is durable.

        Raises:
            CheckpointError: on all ranks alike: it could not be written.
        """
        on_all(self._ranks, self._writer.wait)

    def export(self, path: str | os.PathLike[str], part: str = "model") -> None:
        """Save the weights of a model alone, under plain names: as safetensors, where ``path`` ends in that.

        Raises:
            CheckpointError: there is no such part; or as ``paceline.save`` does.
        """
        save(self._parts.state_of(part), path, group=self._ranks.group)

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

    def _better(self, metric: float | None) -> tuple[int, float] | None:
        value = math.nan if metric is None else float(metric)
        if math.isnan(value) or self._sign == 0:
            return self._best
        is_better = self._best is None or self._sign * value > self._sign * self._best[1]
        return (self.num_steps, value) if is_better else self._best

    def _write(self, snapshot: Snapshot, step: int, best: tuple[int, float] | None, ranks: Ranks | None) -> None:
        """Beside training. ``ranks``: who each have a part, where they have."""
        state = snapshot.unpack()
        best_step = None if best is None else best[0]
        if ranks is None:
            self._folder.write(state, step, best_step)
        else:
            self._folder.write_shards(state, step, best_step, ranks)
        self._best = best
