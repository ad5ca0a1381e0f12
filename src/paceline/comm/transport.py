"""What a backend must be able to do: the contract between the c10d group and the ways in which bytes travel.

A transport moves flat, contiguous CPU tensors. What c10d adds to that (lists of lists, strides, coalescing, complex
numbers, futures, deadlines) is done once, for all transports, by ``group`` and ``engine``.

The invariant: a method of a transport returns *steps*, a generator that yields wherever it must wait for other ranks,
and never blocks. So one thread can keep any number of operations going, and a wait has one place, the engine, where
deadlines and the death of peers are looked after.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Yields where it must wait for other ranks.
Steps = Generator[None, None, None]


@dataclass(frozen=True)
class Reduction:
    """How values of several ranks become one.

    Attributes:
        name: ``sum``, ``avg``, ``product``, ``min``, ``max``, ``band``, ``bor`` or ``bxor``.
    """

    name: str


class Call(NamedTuple):
    """A collective as one rank has called it; what all ranks must have called alike.

    Attributes:
        kind: in c10d's spelling, such as ``all_reduce``.
        dtype, numel: of this rank's tensor; ``numel`` is -1 where ranks may differ in it.
        detail: the reduction or the root; empty where there is none.
        where: the line in the user's code.
    """

    kind: str
    dtype: torch.dtype | None = None
    numel: int = 0
    detail: str = ""
    where: str = ""

    def __str__(self) -> str:
        parts = [self.detail] if self.detail else []
        if self.dtype is not None:
            size = "of sizes that vary" if self.numel < 0 else f"of {self.numel} elements"
            parts.append(f"{size}, {str(self.dtype).removeprefix('torch.')}")
        return f"{self.kind}({', '.join(parts)})" + (f" at {self.where}" if self.where else "")


class Transport(ABC):
    """Collectives among ``size`` ranks, of which this process is ``rank``.

    Tensors are flat, contiguous and on the CPU. In every collective but ``all_to_all``, ``gather`` and ``scatter``,
    whose lists go by rank, all ranks pass equal sizes; those of ``all_gather``, ``gather``, ``scatter`` and
    ``reduce_scatter`` may differ between ranks as long as all agree on who has which.

    Attributes:
        name: of the backend, as c10d knows it.
        num_local: how many of the ranks are on this host.
    """

    name: str

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.num_local = size

    @abstractmethod
    def all_reduce(self, call: Call, tensor: Tensor, reduction: Reduction) -> Steps:
        """In place; the same bits on every rank."""

    @abstractmethod
    def reduce(self, call: Call, tensor: Tensor, reduction: Reduction, root: int) -> Steps:
        """In place on ``root``; the others' tensors stay as they are."""

    @abstractmethod
    def broadcast(self, call: Call, tensor: Tensor, root: int) -> Steps:
        """Overwrite ``tensor`` with that of ``root``."""

    @abstractmethod
    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> Steps:
        """``outputs[r]`` becomes rank r's ``mine``."""

    @abstractmethod
    def gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor, root: int) -> Steps:
        """On ``root``, ``outputs[r]`` becomes rank r's ``mine``; ``outputs`` is empty elsewhere."""

    @abstractmethod
    def scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
        """``output`` becomes ``inputs[rank]`` of ``root``; ``inputs`` is empty elsewhere."""

    @abstractmethod
    def reduce_scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Steps:
        """``output`` becomes the reduction of all ranks' ``inputs[rank]``."""

    @abstractmethod
    def all_to_all(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        """``outputs[r]`` becomes rank r's ``inputs[rank]``."""

    @abstractmethod
    def barrier(self, call: Call) -> Steps:
        """Return when all ranks have come."""

    @abstractmethod
    def send(self, tensor: Tensor, to: int, tag: int) -> Steps:
        """Done when ``tensor`` may be overwritten; messages to one rank under one tag arrive in order."""

    @abstractmethod
    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Generator[None, None, int]:
        """Fill ``tensor``; ``source`` None takes the first that comes. Returns who sent it."""

    @abstractmethod
    def poll(self) -> bool:
        """Look for news from other ranks, without waiting; whether there was any."""

    def is_settled(self) -> bool:
        """Whether all that peers have told is known, as far as can be seen; asked after ``poll``."""
        return True

    @abstractmethod
    def pause(self, timeout_s: float) -> bool:
        """Sleep until there may be news, or ``timeout_s`` has passed. Called without the engine's lock.

        Returns:
            Whether ``heard`` is to be called, with the lock.
        """

    def heard(self) -> None:  # noqa: B027
        """Take note of what ended a ``pause``."""

    @abstractmethod
    def nudge(self) -> None:
        """Wake the threads of this process that are in ``pause``."""

    @abstractmethod
    def check_peers(self, awaited: Sequence[int]) -> None:
        """Look whether ranks that are waited for still live.

        Args:
            awaited: their ranks in the group.
        Raises:
            PeerError: one has ended, or has given the group up.
        """

    @abstractmethod
    def absent(self) -> list[int]:
        """Which ranks in the group have not come to the collective in which this rank waits."""

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Tell the other ranks that this one will take part no more, and why."""

    def depart(self, last_words: str) -> None:  # noqa: B027
        """Tell the other ranks that this one will call nothing any more.

        Args:
            last_words: why, if it failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything; the others are told that this rank has left. Twice does no harm."""
