"""Messages between two ranks, with any tags: those of MPI end at 2**31 or earlier.

A letter tells the tag, and brings its message where that is short. What is longer follows as a parcel, under a tag of
MPI's that the letter's number gives.

[Note: order of letters] Letters of a pair arrive in order, and are read only between two rounds in which all receives
look for theirs, in the order in which they were called. So none takes what an earlier one waits for.

The invariant: a message that does not fit is taken all the same, so the next receive finds the next one.
"""

import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.explain import different_messages
from paceline.comm.mpi.library import MPI
from paceline.comm.mpi.wire import FIRST_PARCEL_TAG, LETTER_TAG, Wire, bytes_of
from paceline.comm.transport import Steps

_LETTER_BYTES = 2048  # with its message; MPI keeps that much where nobody waits for it yet
_NUM_PARCELS = 1 << 14  # tags for what is too large for a letter


@dataclass(frozen=True)
class _Letter:
    """A message, or the announcement of one that is too large to come with it."""

    source: int
    tag: int
    num_bytes: int
    number: int
    dtype: str
    text: memoryview


class Letters:
    """What a rank sends to others and receives from them; see ``Transport``.

    Args:
        ranks: the global rank of each rank in the group, for errors.
    """

    _HEAD = struct.Struct("qqq24s")

    def __init__(self, wire: Wire, rank: int, ranks: Sequence[int]) -> None:
        self._wire = wire
        self._rank = rank
        self._ranks = ranks
        self._unread: list[_Letter] = []
        self._num_waiting = 0
        self._num_sent = [0] * len(ranks)

    def send(self, tensor: Tensor, to: int, tag: int) -> Steps:
        number = self._num_sent[to]
        self._num_sent[to] += 1
        text = self._HEAD.pack(tag, tensor.nbytes, number, _name(tensor.dtype).encode())
        is_small = len(text) + tensor.nbytes <= _LETTER_BYTES
        if is_small and tensor.nbytes:
            text += bytes_of(tensor).tobytes()
        requests = [self._wire.comm.Isend((text, MPI.BYTE), to, LETTER_TAG)]
        if not is_small:
            requests += self._wire.send(tensor, to, _parcel(number))
        yield from self._wire.finish(requests, text, tensor)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Generator[None, None, int]:
        self._num_waiting += 1
        try:
            while (letter := self._find(source, tag)) is None:
                yield
        finally:
            self._num_waiting -= 1
        fits = (letter.num_bytes, letter.dtype) == (tensor.nbytes, _name(tensor.dtype))
        memory = tensor if fits else torch.empty(letter.num_bytes, dtype=torch.uint8, device="cpu")
        if letter.text:
            bytes_of(memory)[:] = letter.text
        elif letter.num_bytes:
            parcels = self._wire.receive(memory, letter.source, _parcel(letter.number))
            yield from self._wire.finish(parcels, memory)
        if not fits:
            came = f"{letter.num_bytes // getattr(torch, letter.dtype).itemsize} elements of {letter.dtype}"
            wanted = f"{tensor.numel()} elements of {_name(tensor.dtype)}"
            raise different_messages(self._ranks[self._rank], wanted, tag, self._ranks[letter.source], came)
        return letter.source

    def poll(self) -> bool:
        """Read letters, if anybody waits for one; whether there were any."""
        if not self._num_waiting:
            return False
        num_unread, status = len(self._unread), MPI.Status()
        while (found := self._wire.comm.Improbe(MPI.ANY_SOURCE, LETTER_TAG, status)) is not None:
            text = bytearray(status.Get_count(MPI.BYTE))
            found.Recv((text, MPI.BYTE))  # it is short, so it came with its envelope
            tag, num_bytes, number, dtype = self._HEAD.unpack_from(text)
            inline = memoryview(text)[self._HEAD.size :]
            name = dtype.rstrip(b"\0").decode()
            self._unread.append(_Letter(status.Get_source(), tag, num_bytes, number, name, inline))
        return len(self._unread) > num_unread

    def _find(self, source: int | None, tag: int) -> _Letter | None:
        """[Note: order of letters]"""
        for index, letter in enumerate(self._unread):
            if letter.tag == tag and source in (None, letter.source):
                return self._unread.pop(index)
        return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parcel(number: int) -> int:
    return FIRST_PARCEL_TAG + number % _NUM_PARCELS
