"""The memory that the ranks of one host share: one file without a name, in which each rank has a part.

    part of rank r:  signals | state, last words | calls, sizes, buckets | stream, three buffers | message slots | heap

The file is a memfd: it never had a name, nothing of it lies in /dev/shm, whose size (64 MB in a container) does not
bound it, and the kernel frees it when the last rank that has mapped it is gone, however that came.

The invariant: memory that is touched is memory that was reserved before, so that a machine which runs out of it gives
an error that says how much was wanted, and not a SIGBUS.
"""

import contextlib
import mmap
import os
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from paceline.comm.memory.signals import signals_bytes
from paceline.errors import CommunicationError
from paceline.rendezvous import Peer

_PAGE = 4096
TOKEN_BYTES = 64
LAST_WORDS_BYTES = 8192
CALL_BYTES = 512
NUM_BUCKET_SLOTS = 1024
NUM_MESSAGE_SLOTS = 4
NUM_BUFFERS = 3


def pages(num_bytes: int) -> int:
    """As many bytes, or as many more as fill the last page."""
    return -(-num_bytes // _PAGE) * _PAGE


@dataclass(frozen=True)
class Layout:
    """Where things lie in each rank's part, in bytes; the same on all ranks.

    Attributes:
        size: the number of ranks.
        buffer_bytes: of each of the buffers through which tensors stream.
        slot_bytes: of each slot through which a message streams.
        heap_bytes: of address space; it takes memory only where something has been allocated.
    """

    size: int
    buffer_bytes: int
    slot_bytes: int
    heap_bytes: int

    @property
    def state(self) -> int:
        """One word, then the last words."""
        return pages(TOKEN_BYTES + signals_bytes(self.size))

    @property
    def calls(self) -> int:
        """For each buffer, a slot for a call."""
        return self.state + pages(8 + LAST_WORDS_BYTES)

    @property
    def sizes(self) -> int:
        """For each buffer, two tables of sizes by rank: what is given and what is taken."""
        return self.calls + NUM_BUFFERS * CALL_BYTES

    @property
    def buckets(self) -> int:
        """Where in the heap the buckets lie that have been launched."""
        return self.sizes + NUM_BUFFERS * 2 * self.size * 8

    @property
    def stream(self) -> int:
        return pages(self.buckets + NUM_BUCKET_SLOTS * 16)

    @property
    def messages(self) -> int:
        return self.stream + NUM_BUFFERS * self.buffer_bytes

    @property
    def heap(self) -> int:
        return self.messages + self.size * NUM_MESSAGE_SLOTS * self.slot_bytes

    @property
    def part_bytes(self) -> int:
        return self.heap + self.heap_bytes

    def start(self, rank: int) -> int:
        """Where ``rank``'s part begins."""
        return rank * self.part_bytes

    def signals(self, rank: int) -> int:
        return self.start(rank) + TOKEN_BYTES


class Arena:
    """The shared memory, mapped.

    Attributes:
        peers: who the ranks are.
        memory: all of it, as bytes.
        words: all of it, as signed words of eight bytes.
    """

    def __init__(self, layout: Layout, fd: int, peers: list[Peer]) -> None:
        self.layout = layout
        self.peers = peers
        self._fd = fd
        self._held_through: list[int] = []  # by rank: its descriptor of the memory
        stat = os.fstat(fd)
        self._identity = stat.st_dev, stat.st_ino
        self._mapping = mmap.mmap(fd, layout.size * layout.part_bytes)
        if hasattr(mmap, "MADV_DONTDUMP"):  # most of it is address space alone
            self._mapping.madvise(mmap.MADV_DONTDUMP)
        self.memory = memoryview(self._mapping)
        self.words = self.memory.cast("q")

    def whereabouts(self) -> dict[str, int]:
        """What the other ranks must know of how this one holds the memory."""
        return {"fd": self._fd}

    def learn(self, whereabouts: list[dict[str, int]]) -> None:
        """What they have told, by rank."""
        self._held_through = [told["fd"] for told in whereabouts]

    def is_held_by(self, rank: int) -> bool:
        """Whether a rank has the memory open, where this process can tell; else true. It takes no descriptor."""
        if not self._held_through:
            return True
        try:
            stat = os.stat(f"/proc/{self.peers[rank].pid}/fd/{self._held_through[rank]}")
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return (stat.st_dev, stat.st_ino) == self._identity

    def tensor(self, start: int, num_bytes: int) -> Tensor:
        """Bytes of the memory as a tensor, which keeps the memory mapped."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8, offset=start, count=num_bytes)

    def region(self, start: int, num_bytes: int) -> memoryview:
        """Bytes of the memory as an object of its own, which lives as long as the tensors that are made from it."""
        return memoryview(self._mapping)[start : start + num_bytes]

    def reserve(self, start: int, num_bytes: int) -> None:
        """Have the kernel set memory aside for what will be written there.

        Raises:
            CommunicationError: there is not enough; the message says how much was wanted.
        """
        try:
            os.posix_fallocate(self._fd, start, num_bytes)
        except OSError as error:
            raise CommunicationError(shortage(num_bytes, error)) from None

    def release(self, start: int, num_bytes: int) -> None:
        """Give memory back to the kernel; read again, it holds zeros."""
        first, end = pages(start), (start + num_bytes) // _PAGE * _PAGE
        if end > first:
            self._mapping.madvise(mmap.MADV_REMOVE, first, end - first)

    def close(self) -> None:
        """Let go of the file. The memory goes when the last tensor in it does."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def shortage(num_bytes: int, error: OSError) -> str:
    """What is said where the system refuses memory."""
    free = ""
    with contextlib.suppress(OSError):  # as when this process may open no more files
        free = f"; {psutil.virtual_memory().available >> 20} MiB are available"
    return (
        f"{max(1, num_bytes >> 20)} MiB of shared memory are needed, and the system refuses them ({error.strerror}"
        f"{free}). Raise the memory limit of the job or container, or run fewer ranks on this host."
    )
