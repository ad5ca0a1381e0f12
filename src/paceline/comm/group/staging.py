"""Between a caller's tensors and the flat, contiguous ones that transports move."""

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paceline.comm.transport import Steps

_T = TypeVar("_T")


def flat(tensor: Tensor) -> Tensor:
    """``tensor`` in one dimension, without history: the same memory where it is contiguous, else a copy."""
    # Through .data: what a graph has saved stays valid when a collective fills it, as with torch's own backends.
    tensor = tensor.data
    if not is_plain(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def is_plain(tensor: Tensor) -> bool:
    """Whether ``flat`` makes no copy of it."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class Staged:
    """Tensors that a collective fills.

    Attributes:
        flat: each of them, flat; where it is a copy, ``then_back`` brings the result home.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.flat = [flat(tensor) for tensor in tensors]
        self._copied = [(t, copy) for t, copy in zip(tensors, self.flat, strict=True) if not is_plain(t)]

    def then_back(self, steps: Generator[None, None, _T]) -> Generator[None, None, _T]:
        """``steps``, and then what ``flat`` holds goes where it belongs."""
        return self._then_back(steps) if self._copied else steps

    def _then_back(self, steps: Generator[None, None, _T]) -> Generator[None, None, _T]:
        result = yield from steps
        for tensor, copy in self._copied:
            tensor.data.copy_(copy.view(tensor.shape))
        return result


class Joined:
    """Tensors of one dtype that a collective changes in place, in one message.

    Attributes:
        flat: all of them, one after another.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._staged = Staged(tensors)
        self.flat = torch.cat(self._staged.flat) if len(tensors) > 1 else self._staged.flat[0]

    def then_back(self, steps: Steps) -> Steps:
        """``steps``, and then what ``flat`` holds goes where it belongs."""
        return self._staged.then_back(self._then_apart(steps) if len(self._staged.flat) > 1 else steps)

    def _then_apart(self, steps: Steps) -> Steps:
        yield from steps
        pieces = torch.split(self.flat, [piece.numel() for piece in self._staged.flat])
        for piece, part in zip(self._staged.flat, pieces, strict=True):
            piece.copy_(part)
