"""What a run consists of, by names of the user's choice.

The invariant: whatever ``load`` is given was this run's own, of every part that the run has now.
"""

import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from paceline.checkpoint import files
from paceline.checkpoint.placing import like_parts, outline_of
from paceline.checkpoint.prefixes import fitted, unwrapped
from paceline.checkpoint.shards import leaves_of
from paceline.checkpoint.torch_folders import Target
from paceline.errors import CheckpointError

logger = logging.getLogger("paceline.checkpoint")


class Stateful(Protocol):
    """Whatever a run consists of."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Parts:
    """The parts of a run.

    Raises:
        CheckpointError: a part has no state, or there is none.
    """

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        stateless = [name for name, part in parts.items() if not _is_stateful(part)]
        if stateless or not parts:
            given = ", ".join(f"{name} is a {type(parts[name]).__name__}" for name in stateless) or "there is none"
            raise CheckpointError(f"a part needs state_dict() and load_state_dict(), and {given}.")
        self._parts = dict(parts)

    def state_of(self, name: str) -> dict[str, Any]:
        """One part's state; of a model, under plain names.

        Raises:
            CheckpointError: there is no such part.
        """
        if name not in self._parts:
            raise CheckpointError(f"there is no part {name!r} to export; there are {', '.join(self._parts)}.")
        part = self._parts[name]
        state = part.state_dict()
        return unwrapped(state, part) if isinstance(part, nn.Module) else state

    def states(self) -> dict[str, dict[str, Any]]:
        """All parts' states."""
        return {name: self.state_of(name) for name in self._parts}

    def target(self) -> Target:
        """Where this run has its tensors."""
        return like_parts(self.states(), self._parts)

    def load(self, states: Mapping[str, Any], where: str) -> None:
        """Give each part its state.

        Args:
            where: the checkpoint, for errors.
        Raises:
            CheckpointError: a part is missing.
            Exception: what a part's ``load_state_dict`` raises, with a note that names the part.
        """
        if missing := [name for name in self._parts if name not in states]:
            raise CheckpointError(
                f"{where} has no {', '.join(missing)}; it has {', '.join(states)}. Name the parts as when it was saved."
            )
        if unknown := [name for name in states if name not in self._parts]:
            logger.warning("%s has %s too, which this run does not load.", where, ", ".join(unknown))
        for name, part in self._parts.items():
            try:
                part.load_state_dict(fitted(states[name], part) if isinstance(part, nn.Module) else states[name])
            except Exception as error:
                error.add_note(f"This came up while the part {name!r} was loaded: {where}.")
                raise


def check_needs_no_trust(unsafe: list[str]) -> None:
    """Raise a CheckpointError if there is something in a state that could not be loaded again without trust."""
    if unsafe:
        raise CheckpointError(
            f"a part's state holds objects of {', '.join(unsafe)}, which would not be loaded again without trust. "
            "Let state_dict() return tensors and plain values, or give Checkpointer weights_only=False."
        )


def unsafe_in_state(state: Any) -> list[str]:
    """What ``weights_only`` would refuse of a state's keys and values, tensors aside, by its names in Python."""
    values = [leaf for leaf in leaves_of(state, set()) if not isinstance(leaf, torch.Tensor)]
    buffer = io.BytesIO()
    torch.save((outline_of(state), values), buffer)
    return files.unsafe_in(buffer)


def check_nothing_is_lost(outlines: Sequence[Any]) -> None:
    """Refuse that a rank has what the first, whose state is saved, has not.

    Args:
        outlines: of the state of all parts, by rank.
    Raises:
        CheckpointError: one has.
    """
    for rank, outline in enumerate(outlines):
        if (path := _first_beyond(outlines[0], outline)) is not None:
            part, *keys = path
            raise CheckpointError(
                f"rank {rank} has {''.join(f'[{key!r}]' for key in keys)} in the state of {part}, and the first rank, "
                "whose state is saved, has not. Give Checkpointer what is the same on all ranks; of a Pipeline over "
                "ranks and its optimizers, model.whole(optimizer)."
            )


def _first_beyond(firsts: Any, theirs: Any) -> list[Any] | None:
    """The way to what is in ``theirs`` alone."""
    if not isinstance(theirs, dict):
        return None
    for key, inner in theirs.items():
        if not isinstance(firsts, dict) or key not in firsts:
            return [key]
        if (path := _first_beyond(firsts[key], inner)) is not None:
            return [key, *path]
    return None


def _is_stateful(part: Any) -> bool:
    return all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))
