"""Averages of tensors that lie in shared memory: nothing is copied in or out.

Every rank has its copy of a tensor in its own part of the arena. When all have launched theirs, rank r averages the
r-th share of it, straight into all copies, block by block, so that a block is still in the cache when it is written.

    launch (all)  ->  average my share into all copies (each)  ->  finished (all)

The invariant: between its launch and the end of ``wait``, a rank's copy belongs to the group; at all other times no
other rank touches it. Shares are averaged in the order of launches, which is the same on all ranks.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.engine import Engine, Operation
from paceline.comm.memory.arena import NUM_BUCKET_SLOTS
from paceline.comm.memory.heap import Heap
from paceline.comm.memory.signals import FINISHED, LAUNCHED
from paceline.comm.memory.transport import SharedMemory
from paceline.comm.reductions import divide, reduce_into
from paceline.comm.shares import shares_of
from paceline.comm.transport import Call, Reduction, Steps
from paceline.errors import CollectiveMismatchError, PacelineError

_BLOCK_BYTES = 1 << 18
_AVERAGE, _SUM = Reduction("avg"), Reduction("sum")
_CALL = Call("average in shared memory")
_MOST_COPIES = 4096


def _nothing() -> Steps:
    yield from ()


@dataclass(frozen=True)
class SharedTensor:
    """A flat tensor in shared memory, and where in the arena it begins, in bytes."""

    tensor: Tensor
    start: int


class Averages:
    """Averages among the ranks of a group.

    Args:
        num_shares: among how many of the host's ranks a tensor is shared out.
        size: the number of ranks on all hosts.
        across: starts the sum over the hosts of this rank's share, in place; None where all ranks are on one host.
    """

    def __init__(
        self,
        shared: SharedMemory,
        engine: Engine,
        *,
        num_shares: int,
        size: int,
        across: Callable[[Tensor], dist.Work] | None = None,
    ) -> None:
        self._shared = shared
        self._engine = engine
        self._num_shares = num_shares
        self._across = across
        self._size = size
        self._heap = Heap(shared.arena, shared.rank)
        self._copies: dict[tuple[int, int, torch.dtype], Tensor] = {}  # of all ranks, by where they begin
        self._launched: deque[SharedTensor] = deque()  # whose share is not begun
        self._crossing: deque[tuple[dist.Work, Tensor, list[Tensor]]] = deque()  # shares under way between hosts
        self._num_launched = 0
        self._num_begun = 0
        self._num_finished = 0
        engine.also_advance(self._advance)

    def allocate(self, numel: int, dtype: torch.dtype) -> SharedTensor:
        """This rank's copy of a tensor of ``numel`` elements, uninitialised. The others need one of the same size.

        Raises:
            CommunicationError: memory is short, or the group is a parent's.
        """
        self._engine.check_own()  # the child's heap would give out what the parent's does
        return SharedTensor(*self._heap.allocate(numel, dtype))

    def launch(self, mine: SharedTensor) -> int:
        """Begin to average; all ranks launch tensors of equal sizes in the same order. Never waits for their launch.

        Returns:
            What to ``wait`` for.
        Raises:
            CommunicationError: the group is a parent's.
        """
        self._engine.check_own()
        number = self._num_launched
        if number - self._num_ended() >= NUM_BUCKET_SLOTS:
            self.wait(number - NUM_BUCKET_SLOTS)
        slot = self._slot(self._shared.rank, number)
        words = self._shared.arena.words
        words[slot], words[slot + 1] = mine.start, mine.tensor.nbytes
        self._launched.append(mine)
        self._num_launched += 1
        try:
            self._shared.signals.tell_all(LAUNCHED)
            self._engine.drive()
        except PacelineError:
            raise
        except BaseException as interruption:  # some of the others may have been told
            self._engine.abort(f"a launch was interrupted by {type(interruption).__name__}")
            raise
        return number

    def wait(self, number: int) -> None:
        """Until the tensor of that launch is the average on all ranks.

        Raises:
            PeerError, CollectiveTimeoutError, CommunicationError, CollectiveMismatchError: it will not be.
        """
        if self._num_ended() > number:
            return
        timeout_s = self._engine.timeout_s
        operation = Operation(_CALL, _nothing(), timeout_s=timeout_s, awaited=lambda: self._unfinished(number))
        self._engine.wait_until(lambda: self._num_ended() > number, operation)

    def has_ended(self, number: int) -> bool:
        """Whether the tensor of that launch is the average on all ranks; never waits."""
        return self._num_ended() > number

    # -- with the engine's lock ----------------------------------------------------------------------------------

    def _num_ended(self) -> int:
        """How many launches all ranks have finished."""
        counts = self._shared.signals.counts
        others = [counts[peer][FINISHED] for peer in range(self._shared.size) if peer != self._shared.rank]
        return min([self._num_finished, *others])

    def _unfinished(self, number: int) -> list[int]:
        counts, rank = self._shared.signals.counts, self._shared.rank
        return [peer for peer in range(self._shared.size) if peer != rank and counts[peer][FINISHED] <= number]

    def _advance(self) -> bool:
        """Average what all have launched; whether there was anything."""
        before = self._num_finished
        counts, rank = self._shared.signals.counts, self._shared.rank
        while self._launched:
            if any(counts[peer][LAUNCHED] <= self._num_begun for peer in range(self._shared.size) if peer != rank):
                break
            self._begin(self._launched.popleft())
        while self._crossing and self._crossing[0][0].is_completed():
            work, share, copies = self._crossing.popleft()
            work.wait()  # raises if it failed
            divide(share, self._size)
            for copy in copies:
                copy.copy_(share)
            self._finish()
        return self._num_finished > before

    @torch.no_grad()
    def _begin(self, mine: SharedTensor) -> None:
        """This rank's share of the next launch."""
        number, rank = self._num_begun, self._shared.rank
        self._num_begun += 1
        copies = self._copies_of(number, mine)
        if rank >= self._num_shares:
            self._finish()
            return
        first, last = shares_of(mine.tensor.numel(), self._num_shares)[rank]
        reduction = _AVERAGE if self._across is None else _SUM
        block_numel = _BLOCK_BYTES // mine.tensor.dtype.itemsize
        for start in range(first, last, block_numel):
            blocks = [copy[start : min(start + block_numel, last)] for copy in copies]
            reduce_into(blocks[rank], blocks, reduction)
            if self._across is None:
                for peer, block in enumerate(blocks):
                    if peer != rank:
                        block.copy_(blocks[rank])
        if self._across is None or first == last:
            self._finish()
            return
        work = self._across(mine.tensor[first:last])
        others = [copy[first:last] for peer, copy in enumerate(copies) if peer != rank]
        self._crossing.append((work, mine.tensor[first:last], others))
        work.get_future().add_done_callback(lambda _: self._engine.nudge())

    def _finish(self) -> None:
        self._num_finished += 1
        self._shared.signals.tell_all(FINISHED)

    def _copies_of(self, number: int, mine: SharedTensor) -> list[Tensor]:
        """All ranks' copies of a launch."""
        numel, dtype = mine.tensor.numel(), mine.tensor.dtype
        copies = []
        for peer in range(self._shared.size):
            if peer == self._shared.rank:
                copies.append(mine.tensor)
                continue
            slot = self._slot(peer, number)
            start, their_nbytes = self._shared.arena.words[slot : slot + 2].tolist()
            if their_nbytes != mine.tensor.nbytes:
                raise CollectiveMismatchError(
                    f"rank {self._shared.ranks[self._shared.rank]} averages {mine.tensor.nbytes} bytes, but rank "
                    f"{self._shared.ranks[peer]} {their_nbytes}. All ranks must average the same in the same order."
                )
            key = start, numel, dtype
            if key not in self._copies:
                if len(self._copies) >= _MOST_COPIES:
                    self._copies.clear()
                with torch.inference_mode(False):  # the next to need it may not be in it
                    self._copies[key] = self._shared.arena.tensor(start, numel * dtype.itemsize).view(dtype)
            copies.append(self._copies[key])
        return copies

    def _slot(self, rank: int, number: int) -> int:
        """In words."""
        layout = self._shared.arena.layout
        return (layout.start(rank) + layout.buckets) // 8 + 2 * (number % NUM_BUCKET_SLOTS)
