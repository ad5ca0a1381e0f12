"""Messages between two ranks of one host: ``send`` and ``receive``, with tags.

For each ordered pair the sender has a few slots in its part of the arena, through which its messages pass one after
another, in chunks. The receiver empties them into its inbox whenever it waits for any message.

The invariant: a slot is written only after what was in it has been taken.
"""

from collections import deque
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from paceline.comm.memory.arena import NUM_MESSAGE_SLOTS, Arena
from paceline.comm.memory.inbox import DTYPES, Inbox
from paceline.comm.memory.signals import CONSUMED, WRITTEN, Signals
from paceline.comm.transport import Steps

_HEADER_WORDS = 8


class Messages:
    """The messages of one rank.

    Attributes:
        inbox: where they go. Messages that come by other ways may go there too.
    """

    def __init__(self, arena: Arena, signals: Signals, rank: int, ranks: Sequence[int]) -> None:
        self.inbox = Inbox(ranks[rank], ranks)
        self._arena = arena
        self._signals = signals
        self._rank = rank
        self._peers = [peer for peer in range(len(ranks)) if peer != rank]
        self._sending: list[deque[object]] = [deque() for _ in ranks]
        self._reserved: set[int] = set()  # to whom this rank has sent; most pairs never do
        self._payload_bytes = arena.layout.slot_bytes - _HEADER_WORDS * 8

    def send(self, tensor: Tensor, to: int, tag: int) -> Steps:
        """Done when the last chunk is in a slot."""
        ticket, queue = object(), self._sending[to]
        queue.append(ticket)
        signals, data = self._signals, tensor.view(torch.uint8)
        try:
            while queue[0] is not ticket:
                yield
            if to not in self._reserved:
                self._arena.reserve(self._slot(self._rank, to, 0), NUM_MESSAGE_SLOTS * self._arena.layout.slot_bytes)
                self._reserved.add(to)
            for start in range(0, max(1, data.numel()), self._payload_bytes):
                while signals.told(to, WRITTEN) - signals.counts[to][CONSUMED] >= NUM_MESSAGE_SLOTS:
                    yield
                chunk = data[start : start + self._payload_bytes]
                slot = self._slot(self._rank, to, signals.told(to, WRITTEN))
                header = (tag, data.numel(), chunk.numel(), DTYPES.index(tensor.dtype))
                for offset, value in enumerate(header):
                    self._arena.words[slot // 8 + offset] = value
                if chunk.numel():
                    self._payload(slot, chunk.numel()).copy_(chunk)
                signals.tell(to, WRITTEN)
        finally:
            queue.remove(ticket)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Generator[None, None, int]:
        request = self.inbox.ask(tensor, source, tag)
        try:
            while request.message is None or not request.message.is_complete:
                if not self._empty_slots():
                    yield
        finally:
            self.inbox.stop_asking(request)
        return self.inbox.deliver(request)

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
        message = self.inbox.arriving(peer) or self.inbox.begin(peer, tag, num_bytes, DTYPES[dtype])
        end = message.num_arrived + chunk_bytes
        if chunk_bytes:
            message.memory[message.num_arrived : end].copy_(self._payload(slot, chunk_bytes))
        message.num_arrived = end
        if message.is_complete:
            self.inbox.end(peer)
        self._signals.tell(peer, CONSUMED)

    def _slot(self, source: int, to: int, number: int) -> int:
        layout = self._arena.layout
        index = to * NUM_MESSAGE_SLOTS + number % NUM_MESSAGE_SLOTS
        return layout.start(source) + layout.messages + index * layout.slot_bytes

    def _payload(self, slot: int, num_bytes: int) -> Tensor:
        return self._arena.tensor(slot + _HEADER_WORDS * 8, num_bytes)
