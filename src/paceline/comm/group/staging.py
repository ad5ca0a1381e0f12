"""Between a caller's tensors and the flat, contiguous ones that transports move.

The invariant: what cannot be moved or filled is refused here, before any other rank is involved.
"""

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paceline.comm.group.checks import check_dtype
from paceline.comm.transport import Steps

_T = TypeVar("_T")
_movable: set[torch.dtype] = set()  # that are known to be


def flat(tensor: Tensor) -> Tensor:
    """``tensor`` in one dimension, without history: the same memory where it is contiguous, else a copy.

    Raises:
        ValueError: it is not strided, or torch cannot copy its dtype.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in _movable:
        _check_movable(tensor)
    # Through .data: what a graph has saved stays valid when a collective fills it, as with torch's own backends.
    tensor = tensor.data
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.dim() != 1:
        tensor = tensor.view(-1)
    # Of one element or none, any stride is contiguous, but only 1 can be viewed as bytes.
    return tensor if tensor.stride(0) == 1 else tensor.as_strided((tensor.numel(),), (1,))


def _check_movable(tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(
            f"a tensor of the layout {tensor.layout} cannot be sent. Use to_dense(); of sparse tensors, all_reduce "
            "alone takes those in COO."
        )
    try:
        bits = torch.zeros(tensor.dtype.itemsize, dtype=torch.uint8, device="cpu").view(tensor.dtype)
        bits.copy_(bits.clone())
    except RuntimeError as error:
        raise ValueError(f"a tensor of {tensor.dtype} cannot be sent: {error}. Send it in another dtype.") from None
    _movable.add(tensor.dtype)


class Staged:
    """Tensors that a collective fills.

    Attributes:
        flat: each of them, flat; where it is a copy, ``then_back`` brings the result home.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.flat = []
        self._copied: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            whole = flat(tensor)
            self.flat.append(whole)
            if whole.data_ptr() != tensor.data_ptr():
                _check_distinct(tensor)
                self._copied.append((tensor, whole))

    def then_back(self, steps: Generator[None, None, _T]) -> Generator[None, None, _T]:
        """``steps``, and then what ``flat`` holds goes where it belongs."""
        return self._then_back(steps) if self._copied else steps

    def _then_back(self, steps: Generator[None, None, _T]) -> Generator[None, None, _T]:
        result = yield from steps
        for tensor, copy in self._copied:
            tensor.data.copy_(copy.view(tensor.shape))
        return result


def _check_distinct(tensor: Tensor) -> None:
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}, as expand() makes them, has "
            "elements that share memory, and cannot be filled. Use contiguous()."
        )


class Joined:
    """Tensors of one dtype that a collective changes in place, in one message.

    Attributes:
        flat: all of them, one after another.
    """

    def __init__(self, what: str, tensors: Sequence[Tensor]) -> None:
        self._staged = Staged(tensors)
        self.flat = self._staged.flat[0]
        if len(tensors) > 1:
            for tensor in tensors:
                check_dtype(what, tensor, tensors[0])
            self.flat = torch.cat(self._staged.flat)

    def then_back(self, steps: Steps) -> Steps:
        """``steps``, and then what ``flat`` holds goes where it belongs."""
        return self._staged.then_back(self._then_apart(steps) if len(self._staged.flat) > 1 else steps)

    def _then_apart(self, steps: Steps) -> Steps:
        yield from steps
        pieces = torch.split(self.flat, [piece.numel() for piece in self._staged.flat])
        for piece, part in zip(self._staged.flat, pieces, strict=True):
            piece.copy_(part)


def then_copy(steps: Steps, source: Tensor, target: Tensor) -> Steps:
    """``steps``, and then ``source`` into ``target``."""
    yield from steps
    target.copy_(source)
