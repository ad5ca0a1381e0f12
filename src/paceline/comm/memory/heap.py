"""Tensors in shared memory: allocated in this rank's part of the arena, where the others can reach them.

The invariant: memory is free again when the last tensor in it is gone, and not before, whoever holds that tensor.
"""

import math
import weakref

import torch
from torch import Tensor

from paceline.comm.memory.arena import Arena
from paceline.errors import CommunicationError

_ALIGNMENT = 4096  # pages: what is freed can go back to the kernel


class Heap:
    """The heap of one rank. It gives out what fits first."""

    def __init__(self, arena: Arena, rank: int) -> None:
        self._arena = arena
        start = arena.layout.start(rank) + arena.layout.heap
        self._end = start + arena.layout.heap_bytes
        self._free: list[tuple[int, int]] = [(start, self._end)]  # in order, none touching the next
        self._freed: list[tuple[int, int]] = []  # a tensor may die at any time, in any thread: it only leaves word

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """An uninitialised tensor, and where in the arena it begins, in bytes.

        Args:
            numel: elements, at least one.
        Raises:
            CommunicationError: memory is short; the message says how much was wanted.
        """
        while self._freed:
            self._take_back(*self._freed.pop())
        num_bytes = math.ceil(numel * dtype.itemsize / _ALIGNMENT) * _ALIGNMENT
        index = next((i for i, (start, end) in enumerate(self._free) if end - start >= num_bytes), None)
        if index is None:
            raise CommunicationError(
                f"{num_bytes >> 20} MiB of shared memory are wanted, and the address space that was set aside for them "
                "is used up. Is it limited by `ulimit -v`? Raise the limit."
            )
        start, end = self._free[index]
        self._arena.reserve(start, num_bytes)
        self._free[index : index + 1] = [(start + num_bytes, end)] if end - start > num_bytes else []
        region = self._arena.region(start, num_bytes)
        weakref.finalize(region, self._freed.append, (start, start + num_bytes)).atexit = False
        with torch.inference_mode(False):  # it outlives whoever asks for it. [Note: inference mode] in operation.py
            return torch.frombuffer(region, dtype=dtype, count=numel), start

    def _take_back(self, start: int, end: int) -> None:
        self._arena.release(start, end - start)
        touching = [piece for piece in self._free if piece[0] == end or piece[1] == start]
        self._free = [piece for piece in self._free if piece not in touching]
        edges = [start, end, *(edge for piece in touching for edge in piece)]
        self._free.append((min(edges), max(edges)))
        self._free.sort()
