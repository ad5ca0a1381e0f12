"""What stages pass on, taken apart into tensors and the rest.

A stage may return whatever containers hold tensors: lists, tuples, dicts, dataclasses, nested. The rest, such as
numbers and None, passes as it is.

The invariant: ``put_together`` gives back what ``take_apart`` was given, with other tensors in the same places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.data_parallel.containers import parts_of, with_parts


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a shell."""

    index: int


def take_apart(value: Any) -> tuple[Any, list[Tensor]]:
    """A shell with slots, and the tensors that were in them."""
    tensors: list[Tensor] = []
    return _hollow(value, tensors), tensors


def put_together(shell: Any, tensors: Sequence[Tensor]) -> Any:
    """A value of that shell with these tensors."""
    if isinstance(shell, Slot):
        return tensors[shell.index]
    parts = parts_of(shell)
    if not parts:
        return shell
    return with_parts(shell, [put_together(part, tensors) for _, part in parts])


def _hollow(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return Slot(len(tensors) - 1)
    parts = parts_of(value)
    if not parts:
        return value
    return with_parts(value, [_hollow(part, tensors) for _, part in parts])


def moved(value: Any, device: torch.device) -> Any:
    """With all tensors on ``device``; autograd knows of it."""
    shell, tensors = take_apart(value)
    return put_together(shell, [tensor.to(device) for tensor in tensors])
