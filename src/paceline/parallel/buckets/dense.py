"""A bucket of dense gradients: one piece of memory, one all_reduce.

When a round ends, ``param.grad`` is the bucket's memory. So with fresh gradients nothing is stored twice.

[Note: at once] A huge gradient is copied as soon as it arrives, while the cache still has it, and its memory serves
for the next. Were they kept until the bucket is complete, the C library would give that memory back to the system in
each step and fetch it again, which took a tenth of the step of an MLP over Gloo. A small one waits: to be told of each
costs more.

[Note: whose gradient] Two kinds of tensor may be ``param.grad`` when a bucket is packed. One that autograd has just
made belongs to nobody else and is dropped. One that was there before the backward is somebody's: it may be held by a
list, or lie in a buffer that an optimizer made. It gets the average too and stays ``param.grad``, as in torch. Likewise
a gradient of the last round that somebody still holds is left to them, and the bucket takes fresh memory.

[Note: divided first] Where ranks' gradients are summed they are divided before: a sum of half-precision gradients could
overflow. Large ones are divided as they are copied, in one pass over memory. Small ones are copied in one call and
divided together, run by run, since a call for each would take longer than it.
"""

import operator
import weakref
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.buckets.bucket import Bucket, Member
from paceline.parallel.buckets.memory import Memory, num_storage_references
from paceline.parallel.fields import are_dense, grads_of
from paceline.parallel.groups import start_all_reduce

_LARGE_NUMEL = 1 << 14
_HUGE_NUMEL = 1 << 16


class DenseBucket(Bucket):
    """Dense gradients of one dtype on one device.

    Attributes:
        divides: whether gradients are divided when they are packed, so that the ranks' sum is the average.
    """

    kind = "dense"
    divides = True

    def __init__(self, number: int, members: Sequence[Member], world_size: int) -> None:
        super().__init__(number, members, world_size)
        self._memory = Memory(self.members)
        self._kept: dict[int, Tensor] = {}  # by position: gradients that are somebody's [Note: whose gradient]
        self._huge = {m.index: at for at, m in enumerate(members) if m.param.is_cpu and m.param.numel() >= _HUGE_NUMEL}
        self._large: set[int] = set()  # positions of members that are divided as they are copied
        self._runs: list[tuple[int, int]] = []  # of elements, that are divided together
        if self.divides:
            large = {at for at, member in enumerate(members) if member.numel >= _LARGE_NUMEL}
            self._large = large.union(self._huge.values())
            self._runs = _runs_of([member.numel for member in members], self._large)
        self._taken: set[int] = set()  # positions of members taken since the round began
        self._work: dist.Work | None = None

    def prepare(self, used: bytes) -> None:
        super().prepare(used)
        self._taken.clear()

    def at_once(self) -> list[torch.nn.Parameter]:
        return [self._params[position] for position in self._huge.values()]

    def take(self, index: int, preexisting: Collection[int]) -> None:
        position = self._huge.get(index)
        if position is None or index in preexisting or position in self.misfits:
            return
        grad = self._params[position].grad
        if grad is None or grad.layout != torch.strided:
            return
        if not self._taken:
            self._memory.make_room(self._allocate)
        self._params[position].grad = None
        self._taken.add(position)
        self._fill([position], [grad])

    def give_back(self) -> None:
        for position in self._taken if not self.is_launched else ():
            param, view = self._params[position], self._memory.views[position]
            grad = view * self.world_size if self.divides else view.clone()
            param.grad = grad if param.grad is None else param.grad + grad
        self._taken.clear()

    # -- packing -------------------------------------------------------------------------------------------------

    def pack(self, preexisting: Collection[int]) -> None:
        self._join_streams()
        if not self._taken:
            self._memory.make_room(self._allocate)
        grads = self._take_all()
        if not preexisting and not self._taken and self._are_fresh(grads):  # the common case, in one go
            self.contributors = self.indices
            self._fill(range(len(grads)), grads)  # type: ignore[arg-type]
        else:
            self._pack_one_by_one(grads, preexisting)
        for start, end in self._runs:
            self._memory.flat[start:end].mul_(1 / self.world_size)
        self.is_launched = True

    def _take_all(self) -> list[Tensor | None]:
        grads = grads_of(self._params)
        for position in self.misfits:
            grads[position] = None
        for position, param in enumerate(self._params):
            if not self.misfits or position not in self.misfits:
                param.grad = None
        return grads

    def _are_fresh(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether all are there, dense, and elsewhere than in this bucket."""
        return are_dense(grads) and not any(map(operator.is_, grads, self._memory.views))

    def _pack_one_by_one(self, grads: list[Tensor | None], preexisting: Collection[int]) -> None:
        """``pack`` where some gradients have not arrived, or are sparse, or somebody's."""
        positions, sources, absent, contributors = [], [], [], []
        for position, (member, view, grad) in enumerate(zip(self.members, self._memory.views, grads, strict=True)):
            if position in self._taken:
                contributors.append(member.index)
                if grad is not None:  # once more, since it was taken
                    view.add_(_dense(grad), alpha=1 / self.world_size if self.divides else 1)
                continue
            if grad is None:
                absent.append(view)
                continue
            contributors.append(member.index)
            if grad is not view:
                positions.append(position)
                sources.append(_dense(grad))
                if member.index in preexisting and not grad.is_sparse:
                    self._kept[position] = grad
            elif position in self._large:
                view.mul_(1 / self.world_size)
        self.contributors = contributors
        self._fill(positions, sources)
        if absent:
            torch._foreach_zero_(absent)
        grads.clear()
        sources.clear()
        grad = None  # so that only others' references are left
        self._drop_unheld()

    def _fill(self, positions: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Write gradients into their places. [Note: divided first]"""
        targets = list(map(self._memory.views.__getitem__, positions))
        if self._large:
            small_targets, small_grads = [], []
            for position, target, grad in zip(positions, targets, grads, strict=True):
                if position in self._large:
                    torch.mul(grad, 1 / self.world_size, out=target)
                else:
                    small_targets.append(target)
                    small_grads.append(grad)
            targets, grads = small_targets, small_grads
        if targets:
            torch._foreach_copy_(targets, list(grads))

    def _drop_unheld(self) -> None:
        """Of the gradients that were there before, let go those that nobody else holds: they need no second copy."""
        for position in list(self._kept):
            if num_storage_references(self._kept[position]) == 1:
                reference = weakref.ref(self._kept.pop(position))
                held = reference()
                if held is not None:
                    self._kept[position] = held

    def _allocate(self, numel: int) -> Tensor:
        return torch.empty(numel, device=self.members[0].device, dtype=self.members[0].dtype)

    # -- averaging -----------------------------------------------------------------------------------------------

    def send(self, group: dist.ProcessGroup) -> None:
        self._work = start_all_reduce(self._memory.flat, group)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def when_ended(self, tell: Callable[[object], None]) -> None:
        if self._work is not None:
            try:
                future = self._work.get_future()
            except RuntimeError:  # c10d's own MPI has none
                return
            future.add_done_callback(tell)

    def reduce_late(self, group: dist.ProcessGroup) -> None:
        late = self._take_late(1 / self.world_size)
        dist.all_reduce(late, group=group)
        self._memory.flat.add_(late)

    def _take_late(self, factor: float) -> Tensor:
        """This rank's late gradients, times ``factor``, in memory like the bucket's; zero where there are none."""
        late = torch.zeros_like(self._memory.flat)
        self._join_streams()
        for position, (member, view) in enumerate(zip(self.members, self._memory.carve(late), strict=True)):
            if member.param.grad is not None and position not in self.misfits:
                torch.mul(_dense(member.param.grad), factor, out=view)
                member.param.grad = None
        return late

    def rescale(self, factor: float) -> None:
        self._memory.flat.mul_(factor)

    def give(self, used: bytes) -> None:
        are_plain = not self._kept and not self.misfits
        if are_plain and not self.is_late() and all(map(used.__getitem__, self.indices)):  # in the common case
            for param, view in zip(self._params, self._memory.views, strict=True):
                param.grad = view
            return
        for position, (member, view) in enumerate(zip(self.members, self._memory.views, strict=True)):
            if not used[member.index] or position in self.misfits:
                continue
            kept, given = self._kept.get(position), member.param.grad
            value = view if kept is None else kept.copy_(view)
            member.param.grad = value if given is None else value.add_(given)
        self._kept.clear()


def _runs_of(sizes: Sequence[int], without: Collection[int]) -> list[tuple[int, int]]:
    """Where consecutive members begin and end, in elements, leaving out the positions ``without``."""
    runs: list[tuple[int, int]] = []
    start = 0
    for position, size in enumerate(sizes):
        end = start + size
        if position not in without and size:
            if runs and runs[-1][1] == start:
                runs[-1] = runs[-1][0], end
            else:
                runs.append((start, end))
        start = end
    return runs


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad
