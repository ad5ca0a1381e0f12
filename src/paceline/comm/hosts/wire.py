"""The frames of collectives between hosts: named by the collective's number and the block, so that none is taken for
another's, and told where to go before they are read.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.hosts.frames import Parcel, memory_of
from paceline.comm.hosts.post import Post

_NOTE = -1  # in place of a block


class Wire:
    """What one rank sends to ranks of other hosts, and gets from them, for collectives.

    Args:
        channel: of ``post``, for these frames alone.
    """

    def __init__(self, post: Post, channel: int) -> None:
        self._post = post
        self._channel = channel
        self._noted: Callable[[int, int, list[int]], None] = _ignore
        self._expected: dict[tuple[int, int], Parcel] = {}  # by source and key
        post.open(channel, self._place, self._arrived)

    @property
    def is_expecting(self) -> bool:
        return bool(self._expected)

    def send(self, to: int, number: int, block: int, memory: memoryview | None, extra: int = 0) -> Parcel:
        return self._post.send(self._channel, to, _key(number, block), memory, extra)

    def expect(self, source: int, number: int, block: int, memory: memoryview | None = None) -> Parcel:
        """A frame that is to come; without ``memory``, of a size that is not known."""
        parcel = Parcel(source, memory)
        self._expected[source, _key(number, block)] = parcel
        self._post.resume(self._channel, source)
        return parcel

    def send_all(self, number: int, block: int, sends: "Sequence[tuple[int, Tensor]]") -> list[Parcel]:
        """Tensors to ranks; nothing is sent for an empty one."""
        return [self.send(to, number, block, memory_of(tensor)) for to, tensor in sends if tensor.numel()]

    def expect_all(self, number: int, block: int, rooms: "Sequence[tuple[int, Tensor]]") -> list[Parcel]:
        """Tensors from ranks, to be filled."""
        return [self.expect(source, number, block, memory_of(room)) for source, room in rooms if room.numel()]

    def on_note(self, noted: Callable[[int, int, list[int]], None]) -> None:
        """Call ``noted`` with the source, the collective's number and the numbers that a note tells."""
        self._noted = noted

    def note(self, to: int, number: int, values: Sequence[int]) -> None:
        """Tell something that nobody expects."""
        self.send(to, number, _NOTE, memory_of(torch.tensor(values, device="cpu")), number)

    def _place(self, source: int, key: int, num_bytes: int, extra: int) -> memoryview | None:
        parcel = self._expected.get((source, key))
        if parcel is None and _is_note(key):
            parcel = self._expected[source, key] = Parcel(source, None)
        if parcel is None:
            return None
        if parcel.memory is None:
            parcel.memory, parcel.extra = memoryview(bytearray(num_bytes)), extra
        assert len(parcel.memory) == num_bytes
        return parcel.memory

    def _arrived(self, source: int, key: int) -> None:
        parcel = self._expected.pop((source, key))
        parcel.is_done = True
        if _is_note(key):
            assert parcel.memory is not None
            self._noted(source, parcel.extra, parcel.memory.cast("q").tolist())


def _ignore(source: int, number: int, values: list[int]) -> None:
    """What nobody wants to know."""


def _key(number: int, block: int) -> int:
    return number << 32 | (block + 1)


def _is_note(key: int) -> bool:
    return key & 0xFFFFFFFF == 0
