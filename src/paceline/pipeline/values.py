"""What stages pass on, taken apart into tensors and the rest.

A stage may return whatever containers hold tensors: lists, tuples, dicts, dataclasses, nested. The rest, such as
numbers and None, passes as it is.

The invariant: ``put_together`` gives back what ``take_apart`` was given, with other tensors in the same places; a
tensor that is in two places is one tensor there, too.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from paceline.errors import PipelineError
from paceline.parallel.data_parallel.containers import parts_of, with_parts


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a shell."""

    index: int


def take_apart(value: Any) -> tuple[Any, list[Tensor]]:
    """A shell with slots, and the tensors that were in them."""
    tensors: list[Tensor] = []
    return _hollow(value, tensors, {}), tensors


def put_together(shell: Any, tensors: Sequence[Tensor]) -> Any:
    """A value of that shell with these tensors."""
    if isinstance(shell, Slot):
        return tensors[shell.index]
    parts = parts_of(shell)
    if not parts:
        return shell
    return with_parts(shell, [put_together(part, tensors) for _, part in parts])


def _hollow(value: Any, tensors: list[Tensor], places: dict[int, Slot]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in places:
            places[id(value)] = Slot(len(tensors))
            tensors.append(value)
        return places[id(value)]
    parts = parts_of(value)
    if not parts:
        return value
    return with_parts(value, [_hollow(part, tensors, places) for _, part in parts])


def moved(value: Any, device: torch.device) -> Any:
    """With all tensors on ``device``; autograd knows of it."""
    shell, tensors = take_apart(value)
    return put_together(shell, [tensor.to(device) for tensor in tensors])


_PLAIN = (bool, int, float, complex, str, bytes, type, Module, torch.dtype, torch.device, torch.Size, Slot, type(None))


def refuse_hidden(shell: Any) -> None:
    """Refuse objects that hold tensors of a graph, whose gradients would pass by the schedule.

    Raises:
        PipelineError: there is one.
    """
    if _holds_graph(shell, set()):
        raise _hidden()


def pickled(item: Any) -> bytes:
    """What can be sent to another rank.

    Raises:
        PipelineError: there is a tensor where none can be found, or what cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _WithoutTensors(buffer).dump(item)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PipelineError(f"a stage passes on what cannot be pickled for another rank: {error}") from error
    return buffer.getvalue()


class _WithoutTensors(pickle.Pickler):
    def persistent_id(self, item: object) -> None:
        if isinstance(item, Tensor):
            raise _hidden()


def _hidden() -> PipelineError:
    return PipelineError(
        "a stage passes on an object that holds a tensor, which would arrive without its gradient. Pass on tensors, or "
        "lists, tuples, dicts or dataclasses of them."
    )


def _holds_graph(item: Any, seen: set[int]) -> bool:
    if isinstance(item, Tensor):
        return item.grad_fn is not None
    if isinstance(item, _PLAIN) or id(item) in seen:
        return False
    seen.add(id(item))
    parts = parts_of(item)
    if parts is None:
        parts = list(enumerate(item)) if isinstance(item, (set, frozenset)) else []
        parts += getattr(item, "__dict__", {}).items()
    return any(_holds_graph(part, seen) for _, part in parts)
