"""The backend ``shm``: collectives among ranks of one host, through memory that they share.

A tensor streams through the arena block by block. A rank writes a block into its part of a buffer, tells the others,
and reads theirs when all have come:

    fill my part of a buffer  ->  meet  ->  read all ranks' parts          the next block uses the next buffer

[Note: three buffers] A rank tells that it has come to the meeting of block k only after it has read all that it wants
of block k-2. So when that meeting is over, all ranks have read block k-2, and its buffer may be filled with block k+1.
That is done before block k is read, so that the others have come to the next meeting by the time this rank wants them.

The invariant: the first meeting of every collective compares what the ranks have called, and all ranks see the same. So
on a mismatch all of them raise, none has written to a result, and the group goes on.
"""

import hashlib
import itertools
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from paceline.comm.memory.arena import CALL_BYTES, NUM_BUFFERS, Arena
from paceline.comm.memory.liveness import Liveness
from paceline.comm.memory.messages import Messages
from paceline.comm.memory.signals import PHASES, Signals
from paceline.comm.reductions import reduce_into
from paceline.comm.transport import Call, Reduction, Steps, Transport
from paceline.errors import CollectiveMismatchError

# More ranks than two reduce what is larger in shares: each a part of it for all.
_SHARED_REDUCTION_BYTES = 1 << 16
_MOST_REMEMBERED = 512  # sizes and calls that come again
_ALIGNED_NUMEL = 64  # where a share may begin: no cache line is written by two ranks


class SharedMemory(Transport):
    """See ``Transport``.

    Args:
        ranks: the global rank of each rank in the group, for errors.
    """

    name = "shm"

    def __init__(self, arena: Arena, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(rank, len(ranks))
        self.arena = arena
        self.signals = Signals(arena.memory, [arena.layout.signals(r) for r in range(self.size)], rank)
        self.ranks = ranks
        self._peers = [peer for peer in range(self.size) if peer != rank]
        self._liveness = Liveness(arena, self.signals, rank, ranks)
        self._messages = Messages(arena, self.signals, rank, ranks)
        self._num_meetings = 0
        self._buffer = 0
        self._parts: dict[tuple[int, torch.dtype, int | None], list[Tensor]] = {}  # slicing costs more than looking up
        self._spelled: dict[Call, tuple[bytes, bytes]] = {}  # what all must have in common, and all of it
        layout = arena.layout
        self._calls_at = [
            [layout.start(r) + layout.calls + buffer * CALL_BYTES for r in range(self.size)]
            for buffer in range(NUM_BUFFERS)
        ]

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
        yield from self._meet(call)
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
            yield from self._meet(None)
            for peer in self._peers:
                share = slice(*shares[peer])
                block[share].copy_(current[peer][share])

    def _fill_for_others(self, block: Tensor) -> list[Tensor]:
        """Write all of ``block`` but the share that this rank reduces itself."""
        parts = self._next_buffer(block.dtype, block.numel())
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
            parts = self._next_buffer(output.dtype)
            for peer, piece in enumerate(inputs):
                block = piece[start : start + window]
                if peer != self.rank:
                    parts[self.rank][peer * window :][: block.numel()].copy_(block)
            yield from self._meet(call if start == 0 else None)
            block = output[start : start + window]
            pieces = [part[mine : mine + block.numel()] for part in parts]
            pieces[self.rank] = inputs[self.rank][start : start + window]
            reduce_into(block, pieces, reduction)

    def barrier(self, call: Call) -> Steps:
        self._buffer = (self._buffer + 1) % NUM_BUFFERS
        yield from self._meet(call)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int) -> Steps:
        return self._messages.send(tensor, to, tag)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Generator[None, None, int]:
        return self._messages.receive(tensor, source, tag)

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
        counts = self.signals.counts
        return [peer for peer in self._peers if counts[peer][PHASES] < self._num_meetings]

    def give_up(self, reason: str) -> None:
        self._liveness.announce_failure(reason)

    def depart(self, last_words: str) -> None:
        self._liveness.announce_departure(last_words)

    def close(self) -> None:
        self._liveness.announce_departure("")
        self._liveness.close()
        self.arena.close()

    # -- blocks and meetings -------------------------------------------------------------------------------------

    def _stream(
        self, call: Call, tensor: Tensor, drain: Callable[[Tensor, list[Tensor]], None], *, gives: bool = True
    ) -> Steps:
        """Block by block: write it into this rank's half, meet, and ``drain(block, all ranks' parts)``.

        Args:
            gives: whether this rank's tensor is to be written.
        """
        blocks = self._blocks(tensor)
        parts = self._fill(blocks[0], gives)
        self._come(call)
        yield from self._await_all(call)
        for index, block in enumerate(blocks):  # [Note: three buffers]
            current = parts
            is_last = index + 1 == len(blocks)
            if not is_last:
                parts = self._fill(blocks[index + 1], gives)
                self._come()
            drain(block, current)
            if not is_last:
                yield from self._await_all()

    def _fill(self, block: Tensor, gives: bool) -> list[Tensor]:
        parts = self._next_buffer(block.dtype, block.numel())
        if gives:
            parts[self.rank].copy_(block)
        return parts

    def _stream_unevenly(self, call: Call, gives: Sequence[Tensor], takes: Sequence[Tensor]) -> Steps:
        """Block by block: write into a window for each rank what it is given, meet, and take what others give."""
        dtype = gives[0].dtype
        window = max(1, self._block_numel(dtype) // self.size)
        mine, longest, start = self.rank * window, 1, 0
        while start < longest:
            parts = self._next_buffer(dtype)
            for peer, tensor in enumerate(gives):
                block = tensor[start : start + window]
                parts[self.rank][peer * window :][: block.numel()].copy_(block)
            if start == 0:
                self._write_sizes([tensor.numel() for tensor in gives], [tensor.numel() for tensor in takes])
            yield from self._meet(call if start == 0 else None)
            if start == 0:
                longest = self._compare_sizes(call)
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

    def _next_buffer(self, dtype: torch.dtype, numel: int | None = None) -> list[Tensor]:
        """All ranks' parts of the buffer that is free now, or the first ``numel`` elements of them."""
        self._buffer = (self._buffer + 1) % NUM_BUFFERS
        key = self._buffer, dtype, numel
        parts = self._parts.get(key)
        if parts is None:
            if len(self._parts) >= _MOST_REMEMBERED:
                self._parts.clear()
            layout = self.arena.layout
            starts = [
                layout.start(rank) + layout.stream + self._buffer * layout.buffer_bytes for rank in range(self.size)
            ]
            parts = [self.arena.tensor(start, layout.buffer_bytes).view(dtype)[:numel] for start in starts]
            self._parts[key] = parts
        return list(parts)

    def _meet(self, call: Call | None) -> Steps:
        self._come(call)
        yield from self._await_all(call)

    def _come(self, call: Call | None = None) -> None:
        """Tell all that this rank has come to the next meeting, and with which ``call`` if a collective begins."""
        if call is not None:
            self._write_call(call)
        self._num_meetings += 1
        self.signals.tell_all(PHASES)

    def _await_all(self, call: Call | None = None) -> Steps:
        """Wait until all have come; compare their calls if a collective begins."""
        number, signals = self._num_meetings, self.signals
        for peer in self._peers:
            while signals.counts[peer][PHASES] < number:
                yield
        if call is not None:
            self._compare_calls(call)

    # -- what the ranks have called ------------------------------------------------------------------------------

    def _write_call(self, call: Call) -> None:
        spelled = self._spelled.get(call)
        if spelled is None:
            if len(self._spelled) >= _MOST_REMEMBERED:
                self._spelled.clear()
            common = f"{call.kind}|{call.dtype}|{call.numel}|{call.detail}\0".encode()
            if len(common) > CALL_BYTES // 2:  # the sizes of very many ranks
                common = hashlib.blake2b(common).hexdigest().encode() + b"\0"
            spelled = self._spelled[call] = common, (common + str(call).encode())[: CALL_BYTES - 1] + b"\0"
        start = self._calls_at[self._buffer][self.rank]
        self.arena.memory[start : start + len(spelled[1])] = spelled[1]

    def _compare_calls(self, call: Call) -> None:
        common, _ = self._spelled[call]
        starts, memory = self._calls_at[self._buffer], self.arena.memory
        for peer in self._peers:
            start = starts[peer]
            if memory[start : start + len(common)] != common:
                theirs = bytes(memory[start : start + CALL_BYTES]).split(b"\0")[1].decode(errors="replace")
                raise CollectiveMismatchError(
                    f"rank {self.ranks[self.rank]} called {call}, but rank {self.ranks[peer]} called {theirs}. All "
                    "ranks must call the same collectives in the same order, with tensors of the same size and dtype."
                )

    def _write_sizes(self, gives: list[int], takes: list[int]) -> None:
        start = self._sizes_of(self.rank)
        for offset, number in enumerate((*gives, *takes)):
            self.arena.words[start + offset] = number

    def _compare_sizes(self, call: Call) -> int:
        """The largest piece that any rank gives to any other, once what is given is known to be what is taken."""
        size = self.size
        tables = []
        for rank in range(size):
            start = self._sizes_of(rank)
            tables.append(self.arena.words[start : start + 2 * size].tolist())
        for giver in range(size):
            for taker in range(size):
                given, taken = tables[giver][taker], tables[taker][size + giver]
                if given != taken:
                    raise CollectiveMismatchError(
                        f"{call.kind}: rank {self.ranks[giver]} has {given} elements for rank {self.ranks[taker]}, "
                        f"which expects {taken}. Sizes must be the same on both sides."
                        + (f" This rank's call is at {call.where}." if call.where else "")
                    )
        return max(1, max(max(table[:size]) for table in tables))

    def _sizes_of(self, rank: int) -> int:
        """In words."""
        layout = self.arena.layout
        return (layout.start(rank) + layout.sizes) // 8 + self._buffer * 2 * self.size


def shares_of(numel: int, num_shares: int) -> list[tuple[int, int]]:
    """Split ``numel`` elements into shares (start, end); equal but for the last ones, and aligned."""
    length = -(-numel // num_shares)
    length = -(-length // _ALIGNED_NUMEL) * _ALIGNED_NUMEL
    edges = [min(share * length, numel) for share in range(num_shares + 1)]
    return list(itertools.pairwise(edges))
