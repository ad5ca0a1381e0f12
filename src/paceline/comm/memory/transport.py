"""The backend ``shm``: collectives among ranks of one host, through memory that they share.

A tensor streams through the arena block by block. A rank writes a block into its part of a buffer, tells the others,
and reads theirs when all have come.

The invariant: nothing is read before the meeting at which it was given, nor written to a result before the first
meeting of its collective, at which all ranks see a mismatch alike. [Note: three buffers] in ``meetings``.
"""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from paceline.comm.memory.arena import Arena
from paceline.comm.memory.liveness import Liveness
from paceline.comm.memory.meetings import Meetings
from paceline.comm.memory.messages import Messages
from paceline.comm.memory.signals import Signals
from paceline.comm.reductions import reduce_into
from paceline.comm.shares import shares_of
from paceline.comm.transport import Call, Reduction, Steps, Transport

# More ranks than two reduce what is larger in shares: each a part of it for all.
_SHARED_REDUCTION_BYTES = 1 << 16


class SharedMemory(Transport):
    """See ``Transport``.

    Args:
        ranks: the global rank of each rank in the group, for errors.

    Attributes:
        meetings, messages: through which all that goes; other transports may have these ranks meet in between.
    """

    name = "shm"

    def __init__(self, arena: Arena, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(rank, len(ranks))
        self.arena = arena
        self.signals = Signals(arena.memory, [arena.layout.signals(r) for r in range(self.size)], rank)
        self.ranks = ranks
        self._peers = [peer for peer in range(self.size) if peer != rank]
        self._liveness = Liveness(arena, self.signals, rank, ranks)
        self.meetings = Meetings(arena, self.signals, rank, ranks)
        self.messages = Messages(arena, self.signals, rank, ranks)

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, call: Call, tensor: Tensor, reduction: Reduction) -> Steps:
        if self.size > 2 and tensor.nbytes > _SHARED_REDUCTION_BYTES:
            return self._all_reduce_in_shares(call, tensor, reduction)

        def drain(block: Tensor, parts: list[Tensor]) -> None:
            parts[self.rank] = block
            reduce_into(block, parts, reduction)

        return self._stream(call, tensor, drain)

    def _all_reduce_in_shares(self, call: Call, tensor: Tensor, reduction: Reduction) -> Steps:
        """Each rank reduces one share of a block, and all gather the shares.

        A block's last meeting is the next one's first: its shares are reduced, and the next block is written.
        """
        blocks = self._blocks(tensor)
        parts = self._fill_for_others(blocks[0])
        yield from self.meetings.meet(call)
        for index, block in enumerate(blocks):  # [Note: three buffers]
            current = parts
            shares = shares_of(block.numel(), self.size)
            mine = slice(*shares[self.rank])
            pieces = [part[mine] for part in current]
            result, pieces[self.rank] = pieces[self.rank], block[mine]
            reduce_into(result, pieces, reduction)
            block[mine].copy_(result)  # while it is in the cache
            if index + 1 < len(blocks):
                parts = self._fill_for_others(blocks[index + 1])
            yield from self.meetings.meet()
            for peer in self._peers:
                share = slice(*shares[peer])
                block[share].copy_(current[peer][share])

    def _fill_for_others(self, block: Tensor) -> list[Tensor]:
        """Write all of ``block`` but the share that this rank reduces itself."""
        parts = self.meetings.next_buffer(block.dtype, block.numel())
        first, last = shares_of(block.numel(), self.size)[self.rank]
        for others in (slice(None, first), slice(last, None)):
            parts[self.rank][others].copy_(block[others])
        return parts

    def reduce(self, call: Call, tensor: Tensor, reduction: Reduction, root: int) -> Steps:
        def drain(block: Tensor, parts: list[Tensor]) -> None:
            if self.rank == root:
                parts[root] = block
                reduce_into(block, parts, reduction)

        return self._stream(call, tensor, drain)

    def broadcast(self, call: Call, tensor: Tensor, root: int) -> Steps:
        def drain(block: Tensor, parts: list[Tensor]) -> None:
            if self.rank != root:
                block.copy_(parts[root])

        return self._stream(call, tensor, drain, gives=self.rank == root)

    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> Steps:
        if call.numel < 0:
            return self._stream_unevenly(call, [mine] * self.size, outputs)
        start = 0

        def drain(block: Tensor, parts: list[Tensor]) -> None:
            nonlocal start
            for part, output in zip(parts, outputs, strict=True):
                (output if output.numel() == block.numel() else output[start : start + block.numel()]).copy_(part)
            start += block.numel()

        return self._stream(call, mine, drain)

    def gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor, root: int) -> Steps:
        yield from self._stream_unevenly(
            call,
            [mine if peer == root else mine[:0] for peer in range(self.size)],
            outputs if self.rank == root else [mine[:0]] * self.size,
        )

    def scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
        yield from self._stream_unevenly(
            call,
            inputs if self.rank == root else [output[:0]] * self.size,
            [output if peer == root else output[:0] for peer in range(self.size)],
        )

    def all_to_all(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        yield from self._stream_unevenly(call, inputs, outputs)

    def reduce_scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Steps:
        window = max(1, self._block_numel(output.dtype) // self.size)
        mine = self.rank * window
        for start in range(0, max(1, *(piece.numel() for piece in inputs)), window):
            parts = self.meetings.next_buffer(output.dtype)
            for peer, piece in enumerate(inputs):
                block = piece[start : start + window]
                if peer != self.rank:
                    parts[self.rank][peer * window :][: block.numel()].copy_(block)
            yield from self.meetings.meet(call if start == 0 else None)
            block = output[start : start + window]
            pieces = [part[mine : mine + block.numel()] for part in parts]
            pieces[self.rank] = inputs[self.rank][start : start + window]
            reduce_into(block, pieces, reduction)

    def barrier(self, call: Call) -> Steps:
        self.meetings.skip_buffer()
        yield from self.meetings.meet(call)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int) -> Steps:
        return self.messages.send(tensor, to, tag)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Generator[None, None, int]:
        return self.messages.receive(tensor, source, tag)

    # -- waiting -------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        return self.signals.poll()

    def is_settled(self) -> bool:
        return self.signals.is_settled()

    def pause(self, timeout_s: float) -> bool:
        return self.signals.sleep(timeout_s)

    def heard(self) -> None:
        self.signals.record_token()

    def nudge(self) -> None:
        self.signals.wake_myself()

    def check_peers(self, awaited: Sequence[int]) -> None:
        self._liveness.check(awaited)

    def absent(self) -> list[int]:
        return self.meetings.absent()

    def give_up(self, reason: str) -> None:
        self._liveness.announce_failure(reason)

    def depart(self, last_words: str) -> None:
        self._liveness.announce_departure(last_words)

    def close(self) -> None:
        self._liveness.announce_departure("")
        self._liveness.close()
        self.arena.close()

    # -- block by block ------------------------------------------------------------------------------------------

    def _stream(
        self, call: Call, tensor: Tensor, drain: Callable[[Tensor, list[Tensor]], None], *, gives: bool = True
    ) -> Steps:
        """Block by block: write it into this rank's half, meet, and ``drain(block, all ranks' parts)``.

        Args:
            gives: whether this rank's tensor is to be written.
        """
        blocks = self._blocks(tensor)
        parts = self._fill(blocks[0], gives)
        self.meetings.come(call)
        yield from self.meetings.await_all(call)
        for index, block in enumerate(blocks):  # [Note: three buffers]
            current = parts
            is_last = index + 1 == len(blocks)
            if not is_last:
                parts = self._fill(blocks[index + 1], gives)
                self.meetings.come()
            drain(block, current)
            if not is_last:
                yield from self.meetings.await_all()

    def _fill(self, block: Tensor, gives: bool) -> list[Tensor]:
        parts = self.meetings.next_buffer(block.dtype, block.numel())
        if gives:
            parts[self.rank].copy_(block)
        return parts

    def _stream_unevenly(self, call: Call, gives: Sequence[Tensor], takes: Sequence[Tensor]) -> Steps:
        """Block by block: write into a window for each rank what it is given, meet, and take what others give."""
        dtype = gives[0].dtype
        window = max(1, self._block_numel(dtype) // self.size)
        mine, longest, start = self.rank * window, 1, 0
        while start < longest:
            parts = self.meetings.next_buffer(dtype)
            for peer, tensor in enumerate(gives):
                block = tensor[start : start + window]
                parts[self.rank][peer * window :][: block.numel()].copy_(block)
            if start == 0:
                self.meetings.write_sizes([tensor.numel() for tensor in gives], [tensor.numel() for tensor in takes])
            yield from self.meetings.meet(call if start == 0 else None)
            if start == 0:
                longest = self.meetings.compare_sizes(call)
            for part, tensor in zip(parts, takes, strict=True):
                block = tensor[start : start + window]
                block.copy_(part[mine : mine + block.numel()])
            start += window

    def _block_numel(self, dtype: torch.dtype) -> int:
        return self.arena.layout.buffer_bytes // dtype.itemsize

    def _blocks(self, tensor: Tensor) -> Sequence[Tensor]:
        """What fits into a buffer, in turn; one block, empty, for an empty tensor: ranks meet all the same."""
        numel = self._block_numel(tensor.dtype)
        return [tensor] if tensor.numel() <= numel else torch.split(tensor, numel)
