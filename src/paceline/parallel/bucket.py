"""A bucket: gradients that travel in one all_reduce, and the memory in which they do.

The invariant: autograd never accumulates into memory that a reduction is writing. When a gradient has been copied into
its bucket, ``param.grad`` becomes None; what autograd brings after that is *late*, arrives alone in fresh memory, and
is averaged by itself and added, since averaging is linear. When the round ends, ``param.grad`` is the bucket's memory.

[Note: at once] A huge gradient is copied as soon as it arrives, while the cache still has it, and its memory serves
for the next. Were they kept until the bucket is complete, the C library would give that memory back to the system in
each step and fetch it again, which took a tenth of the step of an MLP over Gloo. A small one waits: to be told of each
costs more.

[Note: whose gradient] Two kinds of tensor may be ``param.grad`` when a bucket is packed. One that autograd has just
made belongs to nobody else and is dropped. One that was there before the backward is somebody's: it may be held by a
list, or lie in a buffer that an optimizer made. It gets the average too and stays ``param.grad``, as in torch. Likewise
a gradient of the last round that somebody still holds is left to them, and the bucket takes fresh memory.
"""

import functools
import operator
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.memory.averages import Averages, SharedTensor

# Over many small parameters, a loop that runs in C is worth a line.
_grad_of, _layout_of = operator.attrgetter("grad"), operator.attrgetter("layout")
_is_none = functools.partial(operator.is_, None)
# What sys.getrefcount(views[i]) gives when nobody else has the view: the list, and the argument.
_OWN_REFERENCES = 2
_LARGE_NUMEL = 1 << 14
_HUGE_NUMEL = 1 << 16


@dataclass
class Member:
    """A parameter in a bucket, as it was when the bucket was planned.

    Attributes:
        index: its number in the agreed order.
        stride: the first rank's.
    """

    index: int
    param: torch.nn.Parameter
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        self.shape, self.dtype, self.device = self.param.shape, self.param.dtype, self.param.device
        self.numel = self.param.numel()

    def fits(self) -> bool:
        """Whether the parameter is still of that shape and dtype, and on that device."""
        param = self.param
        return (param.shape, param.dtype, param.device) == (self.shape, self.dtype, self.device)


class Bucket(ABC):
    """Gradients that travel together, as the reducer handles them: prepared, packed, sent, waited for, given."""

    kind: ClassVar[str]  # what a report calls it

    def __init__(self, number: int, members: Sequence[Member], world_size: int) -> None:
        self.number = number
        self.members = list(members)
        self.indices = [member.index for member in members]
        self._params = [member.param for member in members]
        self.world_size = world_size
        self.num_missing = 0  # expected members that have not arrived in this round
        self.is_launched = False
        self.contributors: set[int] = set()  # members whose gradient this rank has put in
        self.misfits: set[int] = (
            set()
        )  # positions of members that are not what they were: none of this bucket's any more
        self._streams: set[torch.cuda.Stream] = set()

    def prepare(self, expected: Sequence[bool]) -> None:
        """Begin a round."""
        self.num_missing = sum(map(expected.__getitem__, self.indices))
        self.is_launched = False
        self.contributors.clear()

    def note_misfits(self) -> None:
        """Leave out members that were cast, moved or resized since. Their gradients are left where they are."""
        self.misfits = {position for position, member in enumerate(self.members) if not member.fits()}

    def note_stream(self, param: Tensor) -> None:
        """Remember the CUDA stream on which a gradient came, if it is one."""
        if param.is_cuda:
            self._streams.add(torch.cuda.current_stream(param.device))

    def at_once(self) -> list[torch.nn.Parameter]:
        """The members whose gradients are best taken as soon as they arrive."""
        return []

    def take(self, index: int, preexisting: Collection[int]) -> None:  # noqa: B027
        """Take the gradient of one member that has just arrived, if it is one of those."""

    def give_back(self) -> None:  # noqa: B027
        """A backward has failed before this was packed: what was taken is this rank's gradient again."""

    @abstractmethod
    def pack(self, preexisting: Collection[int]) -> None:
        """Take the members' gradients; those that have not arrived count as zero.

        Args:
            preexisting: parameters that had a gradient before the backward.
        """

    @abstractmethod
    def send(self, group: dist.ProcessGroup) -> None:
        """Start averaging what was packed."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for what was sent."""

    def when_ended(self, tell: Callable[[object], None]) -> None:  # noqa: B027
        """Have ``tell`` called when what was sent is the average, in any thread, where the backend can do that."""

    def has_ended(self) -> bool:
        """Whether what was sent is known to be the average; never waits."""
        return False

    def is_late(self) -> bool:
        """Whether a member's gradient came after the launch."""
        if self.misfits:
            return any(param.grad is not None for at, param in enumerate(self._params) if at not in self.misfits)
        return not all(map(_is_none, map(_grad_of, self._params)))

    @abstractmethod
    def reduce_late(self, group: dist.ProcessGroup) -> None:
        """Average the late gradients of all ranks and add them. A collective call, after ``wait``."""

    @abstractmethod
    def rescale(self, factor: float) -> None:
        """Multiply the average, after ``wait``."""

    @abstractmethod
    def give(self, used: Sequence[bool]) -> None:
        """End the round: the average becomes ``param.grad`` of the parameters that some rank used.

        Where a gradient is there already, another wrapper of the same parameter has given it, of what it had taken. On
        another rank the two may have shared the parameter's gradient otherwise; the sum is the same on all.
        """

    def _join_streams(self) -> None:
        """Let the current CUDA stream wait for those on which gradients came."""
        if not self._streams:
            return
        current = torch.cuda.current_stream(self.members[0].param.device)
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)
                for member in self.members:
                    if member.param.grad is not None:
                        member.param.grad.record_stream(current)
        self._streams.clear()


class DenseBucket(Bucket):
    """Dense gradients of one dtype on one device, in one piece of memory.

    Attributes:
        divides: whether gradients are divided when they are packed, so that the ranks' sum is the average.
    """

    kind = "dense"
    divides = True

    def __init__(self, number: int, members: Sequence[Member], world_size: int) -> None:
        super().__init__(number, members, world_size)
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._kept: dict[int, Tensor] = {}  # by position: gradients that are somebody's [Note: whose gradient]
        self._huge = {m.index: at for at, m in enumerate(members) if m.param.is_cpu and m.param.numel() >= _HUGE_NUMEL}
        self._taken: set[int] = set()  # positions of members taken since the round began
        self._work: dist.Work | None = None

    def prepare(self, expected: Sequence[bool]) -> None:
        super().prepare(expected)
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
            self._make_room()
        self._params[position].grad = None
        self._taken.add(position)
        self.contributors.add(index)
        self._fill([self._views[position]], [grad], [])

    def give_back(self) -> None:
        for position in self._taken if not self.is_launched else ():
            param, view = self._params[position], self._views[position]
            grad = view * self.world_size if self.divides else view.clone()
            param.grad = grad if param.grad is None else param.grad + grad
        self._taken.clear()

    def pack(self, preexisting: Collection[int]) -> None:
        self._join_streams()
        if not self._taken:
            self._make_room()
        grads = self._take_all()
        if not preexisting and not self._taken and self._are_fresh(grads):  # the common case, in one go
            self.contributors.update(self.indices)
            self._fill(self._views, grads, [])  # type: ignore[arg-type]
        else:
            self._pack_one_by_one(grads, preexisting)
        self.is_launched = True

    def _are_fresh(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether all are there, dense, and elsewhere than in this bucket."""
        if any(map(_is_none, grads)) or set(map(_layout_of, grads)) != {torch.strided}:
            return False
        return not any(map(operator.is_, grads, self._views))

    def _take_all(self) -> list[Tensor | None]:
        grads = list(map(_grad_of, self._params))
        for position in self.misfits:
            grads[position] = None
        for position, param in enumerate(self._params):
            if not self.misfits or position not in self.misfits:
                param.grad = None
        return grads

    def _pack_one_by_one(self, grads: list[Tensor | None], preexisting: Collection[int]) -> None:
        """``pack`` where some gradients have not arrived, or are sparse, or somebody's."""
        sources, targets, in_place, absent = [], [], [], []
        for position, (member, view, grad) in enumerate(zip(self.members, self._views, grads, strict=True)):
            if position in self._taken:
                if grad is not None:  # once more, since it was taken
                    view.add_(_dense(grad), alpha=1 / self.world_size if self.divides else 1)
                continue
            if grad is None:
                absent.append(view)
                continue
            self.contributors.add(member.index)
            if grad is view:
                in_place.append(view)
            else:
                sources.append(_dense(grad))
                targets.append(view)
                if member.index in preexisting and not grad.is_sparse:
                    self._kept[position] = grad
        self._fill(targets, sources, in_place)
        if absent:
            torch._foreach_zero_(absent)
        grads.clear()
        sources.clear()
        grad = None  # so that only others' references are left
        self._drop_unheld()

    def send(self, group: dist.ProcessGroup) -> None:
        assert self._flat is not None
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

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

    def _make_room(self) -> None:
        """See to memory for the round's gradients, in which nobody else holds any."""
        if self._flat is None or self._is_held():
            self._flat = self._allocate()
            self._views = self._carve(self._flat)

    def _allocate(self) -> Tensor:
        return torch.empty(self._numel(), device=self.members[0].device, dtype=self.members[0].dtype)

    def _numel(self) -> int:
        return sum(member.numel for member in self.members)

    def _fill(self, targets: Sequence[Tensor], sources: Sequence[Tensor], in_place: Sequence[Tensor]) -> None:
        """Write each source into its target; some are in place already."""
        if self.divides:
            _divide_into(targets, sources, self.world_size)
            if in_place:
                torch._foreach_mul_(list(in_place), 1 / self.world_size)
        elif targets:
            torch._foreach_copy_(list(targets), list(sources))

    def reduce_late(self, group: dist.ProcessGroup) -> None:
        assert self._flat is not None
        late = torch.zeros_like(self._flat)
        self._join_streams()
        for position, (member, view) in enumerate(zip(self.members, self._carve(late), strict=True)):
            if member.param.grad is not None and position not in self.misfits:
                _divide_into([view], [_dense(member.param.grad)], self.world_size)
                member.param.grad = None
        dist.all_reduce(late, group=group)
        self._flat.add_(late)

    def rescale(self, factor: float) -> None:
        assert self._flat is not None
        self._flat.mul_(factor)

    def give(self, used: Sequence[bool]) -> None:
        are_plain = not self._kept and not self.misfits
        if are_plain and not self.is_late() and all(map(used.__getitem__, self.indices)):  # in the common case
            for param, view in zip(self._params, self._views, strict=True):
                param.grad = view
            return
        for position, (member, view) in enumerate(zip(self.members, self._views, strict=True)):
            if not used[member.index] or position in self.misfits:
                continue
            kept, given = self._kept.get(position), member.param.grad
            value = view if kept is None else kept.copy_(view)
            member.param.grad = value if given is None else value.add_(given)
        self._kept.clear()

    def _drop_unheld(self) -> None:
        """Of the gradients that were there before, let go those that nobody else holds: they need no second copy."""
        for position in list(self._kept):
            if _num_storage_references(self._kept[position]) == 1:
                reference = weakref.ref(self._kept.pop(position))
                held = reference()
                if held is not None:
                    self._kept[position] = held

    def _is_held(self) -> bool:
        """Whether somebody has kept a gradient of the last round, or a view of one."""
        assert self._flat is not None
        if _num_storage_references(self._flat) > 1 + len(self._views):
            return True
        views = self._views
        if sum(map(sys.getrefcount, views)) == _OWN_REFERENCES * len(views):  # the common case, in one go
            return False
        return any(
            sys.getrefcount(views[position]) > _OWN_REFERENCES and member.param.grad is not views[position]
            for position, member in enumerate(self.members)
        )

    def _carve(self, flat: Tensor) -> list[Tensor]:
        """One view per member, laid out like the parameter."""
        views, start = [], 0
        for member in self.members:
            views.append(flat.as_strided(member.shape, member.stride, start))
            start += member.numel
        return views


class SharedBucket(DenseBucket):
    """Dense gradients in memory that all ranks of the host reach: averaged where they lie."""

    kind = "shared"
    divides = False

    def __init__(self, number: int, members: Sequence[Member], world_size: int, averages: Averages) -> None:
        super().__init__(number, members, world_size)
        self._averages = averages
        self._shared: SharedTensor | None = None
        self._launch: int | None = None

    def send(self, group: dist.ProcessGroup) -> None:  # noqa: ARG002
        assert self._shared is not None
        self._launch = self._averages.launch(self._shared)

    def wait(self) -> None:
        if self._launch is not None:
            self._averages.wait(self._launch)
            self._launch = None

    def has_ended(self) -> bool:
        return self._launch is not None and self._averages.has_ended(self._launch)

    def _allocate(self) -> Tensor:
        self._shared = self._averages.allocate(self._numel(), self.members[0].dtype)
        return self._shared.tensor


def _divide_into(targets: Sequence[Tensor], sources: Sequence[Tensor], divisor: int) -> None:
    """Write ``source / divisor`` into each target.

    Divided before it is summed: a sum of half-precision gradients could overflow. Large tensors take one pass over
    memory, small ones one call for all.
    """
    small_targets, small_sources = [], []
    for target, source in zip(targets, sources, strict=True):
        if source.numel() >= _LARGE_NUMEL:
            torch.mul(source, 1 / divisor, out=target)
        else:
            small_targets.append(target)
            small_sources.append(source)
    if small_targets:
        torch._foreach_copy_(small_targets, small_sources)
        torch._foreach_mul_(small_targets, 1 / divisor)


def layout_of(param: Tensor, stride: tuple[int, ...]) -> tuple[int, ...]:
    """``stride`` where it covers memory densely, as the optimizer's fast paths like it; else row by row."""
    if param.layout == torch.strided and len(stride) == param.dim():
        expected = 1
        for size, step in sorted(zip(param.shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
            if size != 1 and step != expected:
                break
            expected *= size
        else:
            return stride
    return torch.empty(param.shape, device="meta").stride()


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def _num_storage_references(tensor: Tensor) -> int:
    """How many tensors lie in ``tensor``'s memory."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
