"""Messages between two ranks of one host: ``send`` and ``receive``, with tags.

For each ordered pair the sender has a few slots in its part of the arena, through which its messages pass one after
another, in chunks. The receiver empties them whenever it waits for any message: what nobody has asked for yet is kept
in private memory. So tags may be asked for in any order, and a message never blocks another.

The invariant: between one pair, messages of one tag are received in the order in which they were sent.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.memory.arena import NUM_MESSAGE_SLOTS, Arena
from paceline.comm.memory.signals import CONSUMED, WRITTEN, Signals
from paceline.comm.transport import Steps
from paceline.errors import CollectiveMismatchError

_HEADER_WORDS = 8
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@dataclass
class _Message:
    """One that has begun to arrive."""

    source: int
    tag: int
    dtype: torch.dtype
    num_bytes: int
    memory: Tensor  # where it goes, as bytes
    is_direct: bool  # whether that is the tensor of a request
    num_arrived: int = 0

    @property
    def is_complete(self) -> bool:
        return self.num_arrived == self.num_bytes


@dataclass(eq=False)
class _Request:
    """A receive that has been called."""

    tensor: Tensor
    source: int | None
    tag: int
    message: _Message | None = None

    def wants(self, source: int, tag: int) -> bool:
        return self.message is None and self.source in (None, source) and self.tag == tag


class Messages:
    """The messages of one rank."""

    def __init__(self, arena: Arena, signals: Signals, rank: int, ranks: Sequence[int]) -> None:
        self._arena = arena
        self._signals = signals
        self._rank = rank
        self._ranks = ranks
        self._peers = [peer for peer in range(len(ranks)) if peer != rank]
        self._sending: list[deque[object]] = [deque() for _ in ranks]
        self._requests: list[_Request] = []
        self._unasked: list[_Message] = []
        self._arriving: dict[int, _Message] = {}  # by source
        self._payload_bytes = arena.layout.slot_bytes - _HEADER_WORDS * 8

    def send(self, tensor: Tensor, to: int, tag: int) -> Steps:
        """Done when the last chunk is in a slot."""
        ticket, queue = object(), self._sending[to]
        queue.append(ticket)
        signals, data = self._signals, tensor.view(torch.uint8)
        try:
            while queue[0] is not ticket:
                yield
            for start in range(0, max(1, data.numel()), self._payload_bytes):
                while signals.told(to, WRITTEN) - signals.counts[to][CONSUMED] >= NUM_MESSAGE_SLOTS:
                    yield
                chunk = data[start : start + self._payload_bytes]
                slot = self._slot(self._rank, to, signals.told(to, WRITTEN))
                header = (tag, data.numel(), chunk.numel(), _DTYPES.index(tensor.dtype))
                for offset, value in enumerate(header):
                    self._arena.words[slot // 8 + offset] = value
                if chunk.numel():
                    self._payload(slot, chunk.numel()).copy_(chunk)
                signals.tell(to, WRITTEN)
        finally:
            queue.remove(ticket)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Generator[None, None, int]:
        request = _Request(tensor, source, tag)
        self._requests.append(request)
        try:
            for message in self._unasked:
                if request.wants(message.source, message.tag):
                    self._unasked.remove(message)
                    request.message = message
                    break
            while request.message is None or not request.message.is_complete:
                if not self._empty_slots():
                    yield
        finally:
            self._requests.remove(request)
        message = request.message
        if (message.num_bytes, message.dtype) != (tensor.nbytes, tensor.dtype):
            raise CollectiveMismatchError(
                f"rank {self._ranks[self._rank]} waits for {_spell(tensor.nbytes, tensor.dtype)} with tag {tag}, but "
                f"rank {self._ranks[message.source]} sent {_spell(message.num_bytes, message.dtype)}. Send and receive "
                "tensors of the same size and dtype."
            )
        if not message.is_direct:
            tensor.view(torch.uint8).copy_(message.memory)
        return message.source

    def _empty_slots(self) -> bool:
        """Take what has arrived; whether there was anything."""
        has_any = False
        for peer in self._peers:
            while self._signals.counts[peer][WRITTEN] > self._signals.told(peer, CONSUMED):
                self._take_chunk(peer)
                has_any = True
        return has_any

    def _take_chunk(self, peer: int) -> None:
        slot = self._slot(peer, self._rank, self._signals.told(peer, CONSUMED))
        tag, num_bytes, chunk_bytes, dtype = self._arena.words[slot // 8 : slot // 8 + 4].tolist()
        message = self._arriving.get(peer)
        if message is None:
            message = self._begin(peer, tag, num_bytes, _DTYPES[dtype])
        end = message.num_arrived + chunk_bytes
        if chunk_bytes:
            message.memory[message.num_arrived : end].copy_(self._payload(slot, chunk_bytes))
        message.num_arrived = end
        if message.is_complete:
            self._arriving.pop(peer, None)
        self._signals.tell(peer, CONSUMED)

    def _begin(self, peer: int, tag: int, num_bytes: int, dtype: torch.dtype) -> _Message:
        request = next((request for request in self._requests if request.wants(peer, tag)), None)
        if request is not None and request.tensor.nbytes == num_bytes:
            message = _Message(peer, tag, dtype, num_bytes, request.tensor.view(torch.uint8), is_direct=True)
        else:
            memory = torch.empty(num_bytes, dtype=torch.uint8)
            message = _Message(peer, tag, dtype, num_bytes, memory, is_direct=False)
        if request is None:
            self._unasked.append(message)
        else:
            request.message = message
        self._arriving[peer] = message
        return message

    def _slot(self, source: int, to: int, number: int) -> int:
        layout = self._arena.layout
        index = to * NUM_MESSAGE_SLOTS + number % NUM_MESSAGE_SLOTS
        return layout.start(source) + layout.messages + index * layout.slot_bytes

    def _payload(self, slot: int, num_bytes: int) -> Tensor:
        return self._arena.tensor(slot + _HEADER_WORDS * 8, num_bytes)


def _spell(num_bytes: int, dtype: torch.dtype) -> str:
    return f"{num_bytes // dtype.itemsize} elements of {str(dtype).removeprefix('torch.')}"
