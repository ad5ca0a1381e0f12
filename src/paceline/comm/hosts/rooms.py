"""Memory for blocks, used again and again: fresh pages cost more than what is done in them.

The invariant: what is kept is bounded, whatever sizes come.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_MOST_ROOMS = 32


class Rooms:
    """The rooms of one rank."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}  # by size, as bytes
        self._num_free = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor, uninitialised."""
        num_bytes = numel * dtype.itemsize
        if self._free.get(num_bytes):
            self._num_free -= 1
            return self._free[num_bytes].pop().view(dtype)
        return torch.empty(numel, dtype=dtype, device="cpu")

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Nobody reads or writes these any more."""
        for tensor in tensors:
            if self._num_free >= _MOST_ROOMS:  # of sizes that do not come again, perhaps
                self._free.clear()
                self._num_free = 0
            self._free.setdefault(tensor.nbytes, []).append(tensor.view(torch.uint8))
            self._num_free += 1
