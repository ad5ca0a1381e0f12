"""The backend ``shm``: collectives among ranks of one host, through memory that they share.

A tensor streams through the arena block by block. In each block a rank writes its half of the stream, tells the others,
and reads theirs when all have come:

    fill my half  ->  meet  ->  read all ranks' halves          the next block uses the other half

[Note: two halves are enough] A rank tells that it has come to a meeting only after it has read all that it wants of the
block before. So when a meeting is over, all ranks have read the block before it, and its half may be written again.

The invariant: the first meeting of every collective compares what the ranks have called, and all ranks see the same. So
on a mismatch all of them raise, none has written to a result, and the group goes on.
"""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from paceline.comm.arena import CALL_BYTES, Arena
from paceline.comm.liveness import Liveness
from paceline.comm.messages import Messages
from paceline.comm.reductions import reduce_into
from paceline.comm.signals import PHASES, Signals
from paceline.comm.transport import Call, Reduction, Steps, Transport
from paceline.errors import CollectiveMismatchError

# More ranks than two reduce what is larger in shares: each a part of it for all.
_SHARED_REDUCTION_BYTES = 1 << 16
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
        self._ranks = ranks
        self._peers = [peer for peer in range(self.size) if peer != rank]
        self._liveness = Liveness(arena, self.signals, rank, ranks)
        self._messages = Messages(arena, self.signals, rank, ranks)
        self._num_meetings = 0
        self._half = 0
        self._typed: dict[torch.dtype, list[list[Tensor]]] = {}
        self._spelled: dict[Call, bytes] = {}

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, call: Call, tensor: Tensor, reduction: Reduction) -> Steps:
        if self.size > 2 and tensor.nbytes > _SHARED_REDUCTION_BYTES:
            yield from self._all_reduce_in_shares(call, tensor, reduction)
            return

        def drain(start: int, end: int, parts: list[Tensor]) -> None:
            block = tensor[start:end]
            parts = [part[: end - start] for part in parts]
            parts[self.rank] = block
            reduce_into(block, parts, reduction)

        yield from self._stream(call, tensor, tensor.numel(), drain)

    def _all_reduce_in_shares(self, call: Call, tensor: Tensor, reduction: Reduction) -> Steps:
        """Each rank reduces one share of a block, and all gather the shares."""
        blocks = self._blocks(tensor.numel(), self._block_numel(tensor.dtype))
        for index, (start, end) in enumerate(blocks):
            parts = self._next_half(tensor.dtype)
            parts[self.rank][: end - start].copy_(tensor[start:end])
            yield from self._meet(call if index == 0 else None)
            shares = shares_of(end - start, self.size)
            mine = slice(*shares[self.rank])
            reduce_into(parts[self.rank][mine], [part[mine] for part in parts], reduction)
            yield from self._meet(None)
            for peer, (first, last) in enumerate(shares):
                tensor[start + first : start + last].copy_(parts[peer][first:last])

    def reduce(self, call: Call, tensor: Tensor, reduction: Reduction, root: int) -> Steps:
        def drain(start: int, end: int, parts: list[Tensor]) -> None:
            if self.rank == root:
                parts = [part[: end - start] for part in parts]
                parts[root] = tensor[start:end]
                reduce_into(parts[root], parts, reduction)

        yield from self._stream(call, tensor, tensor.numel(), drain)

    def broadcast(self, call: Call, tensor: Tensor, root: int) -> Steps:
        def drain(start: int, end: int, parts: list[Tensor]) -> None:
            if self.rank != root:
                tensor[start:end].copy_(parts[root][: end - start])

        yield from self._stream(call, tensor if self.rank == root else None, tensor.numel(), drain, tensor.dtype)

    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> Steps:
        def drain(start: int, end: int, parts: list[Tensor]) -> None:
            for part, output in zip(parts, outputs, strict=True):
                block = output[start:end]
                block.copy_(part[: block.numel()])

        yield from self._stream(call, mine, max(output.numel() for output in outputs), drain)

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
        for index, (start, end) in enumerate(self._blocks(max(piece.numel() for piece in inputs), window)):
            parts = self._next_half(output.dtype)
            for peer, piece in enumerate(inputs):
                block = piece[start:end]
                if peer != self.rank:
                    parts[self.rank][peer * window :][: block.numel()].copy_(block)
            yield from self._meet(call if index == 0 else None)
            block = output[start:end]
            pieces = [part[mine : mine + block.numel()] for part in parts]
            pieces[self.rank] = inputs[self.rank][start:end]
            reduce_into(block, pieces, reduction)

    def barrier(self, call: Call) -> Steps:
        self._half ^= 1
        yield from self._meet(call)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int) -> Steps:
        return self._messages.send(tensor, to, tag)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Generator[None, None, int]:
        return self._messages.receive(tensor, source, tag)

    # -- waiting -------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        return self.signals.poll()

    def pause(self, timeout_s: float) -> bool:
        return self.signals.sleep(timeout_s)

    def heard(self) -> None:
        self.signals.record_token()

    def nudge(self) -> None:
        self.signals.wake_myself()

    def check_peers(self, needed: Sequence[int] | None) -> None:
        self._liveness.check(self._peers if needed is None else needed)

    def absent(self) -> list[int]:
        counts = self.signals.counts
        return [self._ranks[peer] for peer in self._peers if counts[peer][PHASES] < self._num_meetings]

    def give_up(self, reason: str) -> None:
        self._liveness.announce_failure(reason)

    def close(self) -> None:
        self._liveness.announce_departure()
        self.arena.close()

    # -- blocks and meetings -------------------------------------------------------------------------------------

    def _stream(
        self,
        call: Call,
        mine: Tensor | None,
        numel: int,
        drain: Callable[[int, int, list[Tensor]], None],
        dtype: torch.dtype | None = None,
    ) -> Steps:
        """Block by block: write ``mine`` into this rank's half, meet, and ``drain(start, end, all ranks' halves)``."""
        dtype = dtype or (mine.dtype if mine is not None else torch.uint8)
        for index, (start, end) in enumerate(self._blocks(numel, self._block_numel(dtype))):
            parts = self._next_half(dtype)
            if mine is not None:
                block = mine[start:end]
                parts[self.rank][: block.numel()].copy_(block)
            yield from self._meet(call if index == 0 else None)
            drain(start, end, parts)

    def _stream_unevenly(self, call: Call, gives: Sequence[Tensor], takes: Sequence[Tensor]) -> Steps:
        """Block by block: write into a window for each rank what it is given, meet, and take what others give."""
        dtype = gives[0].dtype
        window = max(1, self._block_numel(dtype) // self.size)
        mine, longest, start = self.rank * window, 1, 0
        while start < longest:
            parts = self._next_half(dtype)
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
        return self.arena.layout.half_bytes // dtype.itemsize

    @staticmethod
    def _blocks(numel: int, block_numel: int) -> list[tuple[int, int]]:
        """(start, end) of each block; one, empty, for an empty tensor: ranks meet all the same."""
        starts = range(0, max(1, numel), block_numel)
        return [(start, min(start + block_numel, numel)) for start in starts]

    def _next_half(self, dtype: torch.dtype) -> list[Tensor]:
        """All ranks' parts of the half that is free now."""
        self._half ^= 1
        if dtype not in self._typed:
            layout = self.arena.layout
            self._typed[dtype] = [
                [
                    self.arena.tensor(
                        layout.start(r) + layout.stream + half * layout.half_bytes, layout.half_bytes
                    ).view(dtype)
                    for r in range(self.size)
                ]
                for half in range(2)
            ]
        return list(self._typed[dtype][self._half])

    def _meet(self, call: Call | None) -> Steps:
        """Tell all that this rank has come, wait until all have; compare ``call``, at the first of a collective."""
        if call is not None:
            self._write_call(call)
        self._num_meetings += 1
        self.signals.tell_all(PHASES)
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
            if len(self._spelled) > 1000:
                self._spelled.clear()
            text = f"{call.kind}|{call.dtype}|{call.numel}|{call.detail}".encode()
            spelled = b"\0".join((text, str(call).encode()))[: CALL_BYTES - 1] + b"\0"
            self._spelled[call] = spelled
        start = self._call_of(self.rank)
        self.arena.memory[start : start + len(spelled)] = spelled

    def _compare_calls(self, call: Call) -> None:
        spelled = self._spelled[call]
        length = spelled.index(b"\0") + 1
        mine = spelled[:length]
        for peer in self._peers:
            start = self._call_of(peer)
            if self.arena.memory[start : start + length] != mine:
                theirs = bytes(self.arena.memory[start : start + CALL_BYTES]).split(b"\0")[1].decode(errors="replace")
                raise CollectiveMismatchError(
                    f"rank {self._ranks[self.rank]} called {call}, but rank {self._ranks[peer]} called {theirs}. All "
                    "ranks must call the same collectives in the same order, with tensors of the same size and dtype."
                )

    def _call_of(self, rank: int) -> int:
        layout = self.arena.layout
        return layout.start(rank) + layout.calls + self._half * CALL_BYTES

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
                        f"{call.kind}: rank {self._ranks[giver]} has {given} elements for rank {self._ranks[taker]}, "
                        f"which expects {taken}. Sizes must be the same on both sides."
                        + (f" This rank's call is at {call.where}." if call.where else "")
                    )
        return max(1, max(max(table[:size]) for table in tables))

    def _sizes_of(self, rank: int) -> int:
        """In words."""
        layout = self.arena.layout
        return (layout.start(rank) + layout.sizes) // 8 + self._half * 2 * self.size


def shares_of(numel: int, num_shares: int) -> list[tuple[int, int]]:
    """Split ``numel`` elements into shares (start, end); equal but for the last ones, and aligned."""
    length = -(-numel // num_shares)
    length = -(-length // _ALIGNED_NUMEL) * _ALIGNED_NUMEL
    edges = [min(share * length, numel) for share in range(num_shares + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))
