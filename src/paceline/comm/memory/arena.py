"""The memory that the ranks of one host share: one file without a name, in which each rank has a part.

    part of rank r:  signals | state, last words | calls, sizes, buckets | stream, three buffers | message slots | heap

The file is a memfd: it never had a name, nothing of it lies in /dev/shm, whose size (64 MB in a container) does not
bound it, and the kernel frees it when the last rank that has mapped it is gone, however that came. The others open it
through the first rank's /proc entry, which the kernel allows to the same user only, and check a random token in it.

The invariant: memory that is touched is memory that was reserved before, so that a machine which runs out of it gives
an error that says how much was wanted, and not a SIGBUS.
"""

import json
import mmap
import os
import secrets
import time
from dataclasses import asdict, dataclass

import psutil
import torch
from torch import Tensor

from paceline.comm.memory.signals import make_bells, signals_bytes
from paceline.environment import Placement, read_placement
from paceline.errors import CommunicationError, EnvironmentVariableError, RendezvousError
from paceline.rendezvous import Meeting, Peer

_PAGE = 4096
_TOKEN_BYTES = 64
LAST_WORDS_BYTES = 8192
CALL_BYTES = 512
NUM_BUCKET_SLOTS = 1024
NUM_MESSAGE_SLOTS = 4
NUM_BUFFERS = 3
# Two ranks do best with what stays in a core's cache; more with fewer meetings, within what a group may take.
_BUFFER_BYTES_OF_TWO, _BUFFER_BYTES, _SMALLEST_BUFFER_BYTES = 1 << 20, 1 << 21, 1 << 14
_MOST_BUFFERS_BYTES = 1 << 25
_SMALLEST_HEAP_BYTES = 1 << 26


def _pages(num_bytes: int) -> int:
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
        return _pages(_TOKEN_BYTES + signals_bytes(self.size))

    @property
    def calls(self) -> int:
        """For each buffer, a slot for a call."""
        return self.state + _pages(8 + LAST_WORDS_BYTES)

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
        return _pages(self.buckets + NUM_BUCKET_SLOTS * 16)

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
        return self.start(rank) + _TOKEN_BYTES


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
        self._mapping = mmap.mmap(fd, layout.size * layout.part_bytes)
        if hasattr(mmap, "MADV_DONTDUMP"):  # most of it is address space alone
            self._mapping.madvise(mmap.MADV_DONTDUMP)
        self.memory = memoryview(self._mapping)
        self.words = self.memory.cast("q")

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
            raise CommunicationError(_shortage(num_bytes, error)) from None

    def release(self, start: int, num_bytes: int) -> None:
        """Give memory back to the kernel; read again, it holds zeros."""
        first, end = _pages(start), (start + num_bytes) // _PAGE * _PAGE
        if end > first:
            self._mapping.madvise(mmap.MADV_REMOVE, first, end - first)

    def close(self) -> None:
        """Let go of the file. The memory goes when the last tensor in it does."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_arena(meeting: Meeting, deadline: float, buffer_bytes: int | None = None) -> Arena:
    """Make the arena, or map the one that the first rank has made. A collective call of the ranks of one host.

    Args:
        meeting: of these ranks; all have joined it.
        buffer_bytes: of each of the buffers through which tensors stream, if there is as much memory.
    Raises:
        CommunicationError: the ranks do not share one host's memory, or it is short.
        RendezvousError, PeerError: some rank did not come.
    """
    _check_one_host(meeting)
    buffer_bytes = buffer_bytes or choose_buffer_bytes(meeting.world_size)
    arena = _make(meeting, buffer_bytes) if meeting.rank == 0 else _find(meeting, deadline)
    meeting.announce("mapped")

    def late(names: str) -> Exception:
        return RendezvousError(f"rank {meeting.rank}: {names} did not map the shared memory before the deadline.")

    meeting.await_ranks(range(meeting.world_size), "mapped", deadline - time.monotonic(), late=late)
    return arena


def choose_buffer_bytes(size: int) -> int:
    """Of each buffer, in a group of ``size`` ranks."""
    if size <= 2:
        return _BUFFER_BYTES_OF_TWO
    most = _MOST_BUFFERS_BYTES // (NUM_BUFFERS * size)
    return max(_SMALLEST_BUFFER_BYTES, min(_BUFFER_BYTES, 1 << (most.bit_length() - 1)))


def _check_one_host(meeting: Meeting) -> None:
    """Raise on all ranks alike if some could not share memory with the first."""
    first = meeting.peers[0]
    for rank, peer in enumerate(meeting.peers):
        if peer.node != first.node:
            raise CommunicationError(
                f"rank {rank} runs on another host ({peer.node}) than rank 0 ({first.node}): there is no memory that "
                "they could share. Use the backend 'hier', which talks over the network between hosts."
            )
        if peer.pid_namespace != first.pid_namespace:
            raise CommunicationError(
                f"rank {rank} and rank 0 are in different containers (pid namespaces), which hide their memory from "
                "each other. Start both in one container, or use the backend 'gloo'."
            )


def _make(meeting: Meeting, buffer_bytes: int) -> Arena:
    """On the first rank: make the file, map it, and say where it is; or say why not."""
    size = meeting.world_size
    token = secrets.token_hex(_TOKEN_BYTES // 2)
    fd = os.memfd_create("paceline", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        heap_bytes = _pages(psutil.virtual_memory().total)
        while True:
            layout = Layout(size, buffer_bytes, buffer_bytes // NUM_MESSAGE_SLOTS, heap_bytes)
            os.ftruncate(fd, size * layout.part_bytes)
            try:
                for rank in range(size):
                    os.posix_fallocate(fd, layout.start(rank), layout.messages)
            except OSError as error:
                if buffer_bytes <= _SMALLEST_BUFFER_BYTES:
                    raise CommunicationError(_shortage(size * layout.messages, error)) from None
                buffer_bytes //= 2
                os.ftruncate(fd, 0)
                continue
            try:
                arena = Arena(layout, fd, meeting.peers)
                break
            except OSError as error:
                if heap_bytes <= _SMALLEST_HEAP_BYTES:
                    raise _cannot_map(meeting.rank, layout, error) from None
                heap_bytes //= 4
        make_bells(arena.memory, [layout.signals(rank) for rank in range(size)])
        arena.memory[: len(token)] = token.encode()
    except BaseException as error:
        os.close(fd)
        meeting.announce("arena", json.dumps({"error": str(error)}))
        raise
    where = {"layout": asdict(layout), "path": f"/proc/{os.getpid()}/fd/{fd}", "token": token}
    meeting.announce("arena", json.dumps(where))
    return arena


def _find(meeting: Meeting, deadline: float) -> Arena:
    """On the others: map what the first rank has made."""

    def late(name: str) -> Exception:
        return RendezvousError(f"rank {meeting.rank}: {name} did not make the shared memory before the deadline.")

    meeting.await_ranks([0], "arena", deadline - time.monotonic(), late=late)
    told = json.loads(meeting.read("arena", 0))
    if "error" in told:
        raise CommunicationError(f"rank {meeting.rank}: rank 0 could not make the shared memory: {told['error']}")
    layout = Layout(**told["layout"])
    try:
        fd = os.open(told["path"], os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CommunicationError(
            f"rank {meeting.rank}: cannot open the memory that rank 0 shares, {told['path']} ({error.strerror}). Run "
            "all ranks as one user in one container, or use the backend 'gloo'."
        ) from None
    try:
        arena = Arena(layout, fd, meeting.peers)
    except OSError as error:
        os.close(fd)
        raise _cannot_map(meeting.rank, layout, error) from None
    if bytes(arena.memory[:_TOKEN_BYTES]) != told["token"].encode():
        os.close(fd)
        raise CommunicationError(f"rank {meeting.rank}: {told['path']} is not the memory that rank 0 has made.")
    return arena


def _shortage(num_bytes: int, error: OSError) -> str:
    free = psutil.virtual_memory().available >> 20
    return (
        f"{max(1, num_bytes >> 20)} MiB of shared memory are needed, and the system refuses them ({error.strerror}; "
        f"{free} MiB are available). Raise the memory limit of the job or container, or run fewer ranks on this host."
    )


def _cannot_map(rank: int, layout: Layout, error: OSError) -> CommunicationError:
    return CommunicationError(
        f"rank {rank}: cannot map {layout.size * layout.part_bytes >> 20} MiB of address space ({error.strerror}). "
        "Is it limited by `ulimit -v`? Raise the limit."
    )


def myself() -> Peer:
    """This process, as the others of a group are told of it."""
    try:
        placement = read_placement(os.environ)
    except EnvironmentVariableError:
        placement = Placement()
    return Peer.myself(placement)
