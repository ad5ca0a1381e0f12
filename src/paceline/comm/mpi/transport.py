"""The transport over MPI: its collectives, and what the engine asks while it waits.

Every collective begins with a meeting, which takes small data along. What is larger follows in messages of its own once
all records are known to be alike.

[Note: own sums] MPI leaves open in which order its reductions add, and whether all ranks get the same bits. So each
rank is sent its share of all tensors, reduces it in the order of ranks, and all gather the shares. For large tensors on
one host that takes less time than Open MPI's Iallreduce, and it knows the same types and operations as shared memory.

The invariant: no result is written to before all ranks are known to have called alike. So on a mismatch all raise, and
the group goes on.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

from paceline.comm.explain import different_sizes, peer_failed, peer_left
from paceline.comm.mpi.leaving import leave
from paceline.comm.mpi.letters import Letters
from paceline.comm.mpi.library import MPI
from paceline.comm.mpi.meetings import Meetings
from paceline.comm.mpi.notices import Notices
from paceline.comm.mpi.wire import DATA_TAG, Wire, messages_of
from paceline.comm.reductions import reduce_into
from paceline.comm.transport import Call, Reduction, Steps, Transport

_BLOCK_BYTES = 1 << 23  # of a tensor that is reduced at a time: what ranks send then stays in caches

_P = ParamSpec("_P")


def _collective(method: "Callable[Concatenate[Mpi, _P], Steps]") -> "Callable[Concatenate[Mpi, _P], Steps]":
    """Note when a collective is under way."""

    def steps(self: "Mpi", /, *args: _P.args, **kwargs: _P.kwargs) -> Steps:
        self._is_under_way = True
        try:
            yield from method(self, *args, **kwargs)
        finally:
            self._is_under_way = False

    return steps


class Mpi(Transport):
    """See ``Transport``.

    Args:
        comm: of this group alone.
        ranks: the global rank of each rank in the group, for errors.
        num_local: how many of them are on this host.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], num_local: int) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.num_local = num_local
        self._ranks = ranks
        self._peers = [peer for peer in range(self.size) if peer != self.rank]
        self._comm = comm
        self._wire = Wire(comm)
        self._meetings = Meetings(self._wire, self.rank, ranks)
        self._letters = Letters(self._wire, self.rank, ranks)
        self._notices = Notices(self._wire, self.rank, self.size)
        self._scratch: Tensor | None = None
        self._is_under_way = False
        self._is_closed = False

    # -- collectives ---------------------------------------------------------------------------------------------

    @_collective
    def all_reduce(self, call: Call, tensor: Tensor, reduction: Reduction) -> Steps:
        yield from self._reduce(call, tensor, reduction, None)

    @_collective
    def reduce(self, call: Call, tensor: Tensor, reduction: Reduction, root: int) -> Steps:
        yield from self._reduce(call, tensor, reduction, root)

    def _reduce(self, call: Call, tensor: Tensor, reduction: Reduction, root: int | None) -> Steps:
        """[Note: own sums]

        Args:
            root: who gets the result; None stands for all.
        """
        gets_it = root in (None, self.rank)
        if tensor.nbytes <= self._meetings.inline_bytes:
            yield from self._meetings.meet(call, [tensor])
            if gets_it:
                parts = self._meetings.data(tensor.dtype, tensor.numel())
                parts[self.rank] = tensor
                reduce_into(tensor, parts, reduction)
            return
        yield from self._meetings.meet(call)
        nothing = [tensor[:0]] * self.size
        for block in torch.split(tensor, _BLOCK_BYTES // tensor.itemsize):
            shares = block.tensor_split(self.size)
            mine = shares[self.rank]
            parts = self._room(mine)
            yield from self._exchange(shares, parts)
            reduced = mine if gets_it else parts[self.rank]
            parts[self.rank] = mine
            reduce_into(reduced, parts, reduction)
            gives = [reduced if root in (None, peer) else reduced[:0] for peer in range(self.size)]
            yield from self._exchange(gives, shares if gets_it else nothing)

    @_collective
    def broadcast(self, call: Call, tensor: Tensor, root: int) -> Steps:
        is_small = tensor.nbytes <= self._meetings.inline_bytes
        yield from self._meetings.meet(call, [tensor] if is_small and self.rank == root else [])
        if not is_small:
            requests = [self._comm.Ibcast(message, root) for message in messages_of(tensor)]
            # Data pass from rank to rank: it may be any that is waited for.
            yield from self._wire.finish_collective(requests, [self._peers] * len(requests), tensor)
        elif self.rank != root:
            tensor.copy_(self._meetings.data(tensor.dtype, tensor.numel())[root])

    @_collective
    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> Steps:
        is_small = max(output.nbytes for output in outputs) <= self._meetings.inline_bytes
        yield from self._meetings.meet(call, [mine] if is_small else [])
        if is_small:
            sizes = [output.numel() for output in outputs]
            for output, part in zip(outputs, self._meetings.data(mine.dtype, max(sizes)), strict=True):
                output.copy_(part[: output.numel()])
        else:
            outputs[self.rank].copy_(mine)
            yield from self._exchange([mine] * self.size, outputs)

    @_collective
    def gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor, root: int) -> Steps:
        gives = [mine if peer == root else mine[:0] for peer in range(self.size)]
        yield from self._exchange_unevenly(call, gives, outputs or [mine[:0]] * self.size)

    @_collective
    def scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
        takes = [output if peer == root else output[:0] for peer in range(self.size)]
        yield from self._exchange_unevenly(call, inputs or [output[:0]] * self.size, takes)

    @_collective
    def all_to_all(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        yield from self._exchange_unevenly(call, inputs, outputs)

    @_collective
    def reduce_scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Steps:
        if sum(piece.nbytes for piece in inputs) <= self._meetings.inline_bytes:
            yield from self._meetings.meet(call, inputs)
            start = sum(piece.numel() for piece in inputs[: self.rank])
            parts = self._meetings.data(output.dtype, output.numel(), start)
            reduce_into(output, parts, reduction)
            return
        yield from self._meetings.meet(call)
        window = _BLOCK_BYTES // output.itemsize // self.size
        for start in range(0, max(piece.numel() for piece in inputs), window):
            pieces = [piece[start : start + window] for piece in inputs]
            parts = self._room(pieces[self.rank])
            yield from self._exchange(pieces, parts)
            parts[self.rank] = pieces[self.rank]
            reduce_into(output[start : start + window], parts, reduction)

    @_collective
    def barrier(self, call: Call) -> Steps:
        yield from self._meetings.meet(call)

    def _exchange(self, gives: Sequence[Tensor], takes: Sequence[Tensor]) -> Steps:
        """Send each peer what is given to it, and receive what is taken from it."""
        requests: list[MPI.Request] = []
        partners: list[Sequence[int]] = []
        for step in range(1, self.size):  # each rank begins with another one
            source, to = (self.rank - step) % self.size, (self.rank + step) % self.size
            receives = self._wire.receive(takes[source], source, DATA_TAG)
            sends = self._wire.send(gives[to], to, DATA_TAG)
            requests += receives + sends
            partners += [(source,)] * len(receives) + [(to,)] * len(sends)
        yield from self._wire.finish_collective(requests, partners, gives, takes)

    def _exchange_unevenly(self, call: Call, gives: Sequence[Tensor], takes: Sequence[Tensor]) -> Steps:
        """Agree on who has how much for whom, and exchange that."""
        numels = [piece.numel() for pieces in (gives, takes) for piece in pieces]
        mine = torch.tensor(numels, device="cpu")  # (2 * size,)
        yield from self._meetings.meet(call, [mine])
        tables = torch.stack(self._meetings.data(mine.dtype, mine.numel())).view(self.size, 2, self.size)
        given, taken = tables[:, 0], tables[:, 1].t()  # (giver, taker)
        for giver, taker in (given != taken).nonzero().tolist():
            counts = int(given[giver, taker]), int(taken[giver, taker])
            raise different_sizes(call, self._ranks[giver], counts[0], self._ranks[taker], counts[1])
        takes[self.rank].copy_(gives[self.rank])
        yield from self._exchange(gives, takes)

    def _room(self, part: Tensor) -> list[Tensor]:
        """For each rank, memory for a tensor such as ``part``, until the next call of this."""
        stride = -(-_BLOCK_BYTES // self.size // 64) * 64 + 64
        if self._scratch is None:
            self._scratch = torch.empty(self.size, stride, dtype=torch.uint8, device="cpu")
        return [row[: part.nbytes].view(part.dtype) for row in self._scratch]

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int) -> Steps:
        return self._letters.send(tensor, to, tag)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Generator[None, None, int]:
        return self._letters.receive(tensor, source, tag)

    # -- waiting -------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        return self._letters.poll()

    def pause(self, timeout_s: float) -> bool:
        self._wire.nap(timeout_s)
        return False

    def nudge(self) -> None:
        """Naps are short."""

    def is_settled(self) -> bool:
        return False  # what a rank has sent before it left may still be on its way

    def check_peers(self, awaited: Sequence[int]) -> None:
        if self._is_closed:
            return
        self._notices.read()
        gone = [peer for peer in self._notices.seen if peer in awaited]  # who left first is why others did
        if self._is_under_way:
            gone = [peer for peer in gone if self._notices.seen[peer].num_done < self._meetings.number]
        failed = [peer for peer in gone if self._notices.seen[peer].has_failed]
        if not self._is_under_way and len(gone) < len(awaited):
            gone = failed  # of several, any one may send what anybody may send
        if not gone:
            return
        notice = self._notices.seen[gone[0]]
        me, name = self._ranks[self.rank], f"rank {self._ranks[gone[0]]}"
        raise peer_failed(me, name, notice.words) if notice.has_failed else peer_left(me, name)

    def absent(self) -> list[int]:
        return self._wire.awaited()

    def give_up(self, reason: str) -> None:
        self._notices.announce(self._num_done(), has_failed=True, words=reason)

    def depart(self, last_words: str) -> None:
        self._notices.announce(self._num_done(), has_failed=bool(last_words), words=last_words)

    def close(self) -> None:
        if self._is_closed or MPI.Is_finalized():
            return
        self.depart("It left in the middle of a collective or a message." if self._wire.is_torn else "")
        self._is_closed = True
        leave(self.try_to_free)

    def try_to_free(self) -> bool:
        """After ``close``: free the communicator, if all ranks have left the group; whether they have."""
        if not self._notices.are_complete():
            return False
        if not self._wire.is_torn:
            self._meetings.close()
            self._comm.Free()
        return True

    def _num_done(self) -> int:
        """How many collectives this rank has finished. What is torn is the last one, or a message after it."""
        return self._meetings.number - (self._is_under_way or self._wire.is_torn)
