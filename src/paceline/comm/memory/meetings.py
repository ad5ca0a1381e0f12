"""Where the ranks of one host meet, and the buffers that they fill for one another.

    fill my part of a buffer  ->  meet  ->  read all ranks' parts          the next block uses the next buffer

[Note: three buffers] A rank tells that it has come to the meeting of block k only after it has read all that it wants
of block k-2. So when that meeting is over, all ranks have read block k-2, and its buffer may be filled with block k+1.
That is done before block k is read, so that the others have come to the next meeting by the time this rank wants them.

The invariant: the first meeting of every collective compares what the ranks have called, and all ranks see the same. So
on a mismatch all of them raise, none has written to a result, and the group goes on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.calls import SpelledCalls, called
from paceline.comm.explain import different_calls, different_sizes
from paceline.comm.memory.arena import CALL_BYTES, NUM_BUFFERS, Arena
from paceline.comm.memory.signals import PHASES, Signals
from paceline.comm.transport import Call, Steps

_MOST_REMEMBERED = 512  # sizes that come again


class Meetings:
    """The meetings of one rank with the others of its host.

    Args:
        ranks: the global rank of each rank, for errors.

    Attributes:
        buffer: which of the buffers is filled now, or read.
    """

    def __init__(self, arena: Arena, signals: Signals, rank: int, ranks: Sequence[int]) -> None:
        self.buffer = 0
        self._arena = arena
        self._signals = signals
        self._rank = rank
        self._ranks = ranks
        self._size = len(ranks)
        self._peers = [peer for peer in range(self._size) if peer != rank]
        self._number = 0
        self._parts: dict[tuple[int, torch.dtype, int | None], list[Tensor]] = {}  # slicing costs more than looking up
        self._spelled = SpelledCalls(CALL_BYTES)
        layout = arena.layout
        self._calls_at = [
            [layout.start(r) + layout.calls + buffer * CALL_BYTES for r in range(self._size)]
            for buffer in range(NUM_BUFFERS)
        ]

    # -- buffers -------------------------------------------------------------------------------------------------

    def next_buffer(self, dtype: torch.dtype, numel: int | None = None) -> list[Tensor]:
        """All ranks' parts of the buffer that is free now, or the first ``numel`` elements of them."""
        self.buffer = (self.buffer + 1) % NUM_BUFFERS
        key = self.buffer, dtype, numel
        parts = self._parts.get(key)
        if parts is None:
            if len(self._parts) >= _MOST_REMEMBERED:
                self._parts.clear()
            num_bytes = self._arena.layout.buffer_bytes
            parts = [
                self._arena.tensor(self.start_of(rank), num_bytes).view(dtype)[:numel] for rank in range(self._size)
            ]
            self._parts[key] = parts
        return list(parts)

    def skip_buffer(self) -> None:
        """``next_buffer``, for a meeting at which nothing is given but calls."""
        self.buffer = (self.buffer + 1) % NUM_BUFFERS

    def start_of(self, rank: int) -> int:
        """Where in the arena ``rank``'s part of the buffer begins."""
        layout = self._arena.layout
        return layout.start(rank) + layout.stream + self.buffer * layout.buffer_bytes

    # -- meetings ------------------------------------------------------------------------------------------------

    def meet(self, call: Call | None = None) -> Steps:
        """``come``, and wait until all have."""
        self.come(call)
        yield from self.await_all(call)

    def come(self, call: Call | None = None) -> None:
        """Tell all that this rank has come to the next meeting, and with which ``call`` if a collective begins."""
        if call is not None:
            self._write_call(call)
        self._number += 1
        self._signals.tell_all(PHASES)

    def await_all(self, call: Call | None = None) -> Steps:
        """Wait until all have come; compare their calls if a collective begins."""
        number, signals = self._number, self._signals
        for peer in self._peers:
            while signals.counts[peer][PHASES] < number:
                yield
        if call is not None:
            self._compare_calls(call)

    def absent(self) -> list[int]:
        """Who has not come to the meeting to which this rank came last."""
        counts = self._signals.counts
        return [peer for peer in self._peers if counts[peer][PHASES] < self._number]

    # -- what the ranks have called ------------------------------------------------------------------------------

    def _write_call(self, call: Call) -> None:
        _, spelled = self._spelled[call]
        start = self._calls_at[self.buffer][self._rank]
        self._arena.memory[start : start + len(spelled)] = spelled

    def _compare_calls(self, call: Call) -> None:
        common, _ = self._spelled[call]
        starts, memory = self._calls_at[self.buffer], self._arena.memory
        for peer in self._peers:
            start = starts[peer]
            if memory[start : start + len(common)] != common:
                theirs = called(bytes(memory[start : start + CALL_BYTES]))
                raise different_calls(self._ranks[self._rank], call, self._ranks[peer], theirs)

    def write_sizes(self, gives: list[int], takes: list[int]) -> None:
        """Before a meeting: how many elements this rank gives to each, and takes from each."""
        start = self._sizes_at(self._rank)
        for offset, number in enumerate((*gives, *takes)):
            self._arena.words[start + offset] = number

    def compare_sizes(self, call: Call) -> int:
        """After it: the largest piece that any rank gives to any other.

        Raises:
            CollectiveMismatchError: on all ranks, if what one gives is not what the other takes.
        """
        size = self._size
        tables = []
        for rank in range(size):
            start = self._sizes_at(rank)
            tables.append(self._arena.words[start : start + 2 * size].tolist())
        for giver in range(size):
            for taker in range(size):
                given, taken = tables[giver][taker], tables[taker][size + giver]
                if given != taken:
                    raise different_sizes(call, self._ranks[giver], given, self._ranks[taker], taken)
        return max(1, max(max(table[:size]) for table in tables))

    def _sizes_at(self, rank: int) -> int:
        """In words."""
        layout = self._arena.layout
        return (layout.start(rank) + layout.sizes) // 8 + self.buffer * 2 * self._size
