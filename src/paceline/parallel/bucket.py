"""A bucket: gradients that travel in one all_reduce, and the memory in which they do.

The invariant: autograd never accumulates into memory that a reduction is writing. When a gradient has been copied into
its bucket, ``param.grad`` becomes None; what autograd brings after that is *late*, arrives alone in fresh memory, and
is averaged by itself and added, since averaging is linear. When the round ends, ``param.grad`` is the bucket's memory.

[Note: whose gradient] Two kinds of tensor may be ``param.grad`` when a bucket is packed. One that autograd has just
made belongs to nobody else and is dropped. One that was there before the backward is somebody's: it may be held by a
list, or lie in a buffer that an optimizer made. It gets the average too and stays ``param.grad``, as in torch. Likewise
a gradient of the last round that somebody still holds is left to them, and the bucket takes fresh memory.
"""

import sys
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# What sys.getrefcount(views[i]) gives when nobody else has the view: the list, and the argument.
_OWN_REFERENCES = 2


@dataclass
class Member:
    """A parameter in a bucket. ``index`` is its number in the agreed order; strides are the first rank's."""

    index: int
    param: torch.nn.Parameter
    stride: tuple[int, ...]


class Bucket:
    """Dense gradients of one dtype on one device."""

    def __init__(self, number: int, members: Sequence[Member], world_size: int) -> None:
        self.number = number
        self.members = list(members)
        self.world_size = world_size
        self.missing = 0  # expected members that have not arrived in this round
        self.launched = False
        self.contributors: set[int] = set()  # members whose gradient this rank has put in
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._kept: dict[int, Tensor] = {}  # by position: gradients that are somebody's [Note: whose gradient]
        self._work: dist.Work | None = None
        self._streams: set[torch.cuda.Stream] = set()

    @property
    def indices(self) -> list[int]:
        return [member.index for member in self.members]

    def prepare(self, expected: Sequence[bool]) -> None:
        """Begin a round."""
        self.missing = sum(expected[member.index] for member in self.members)
        self.launched = False
        self.contributors.clear()

    def note_stream(self, param: Tensor) -> None:
        """Remember the CUDA stream on which a gradient came, if it is one."""
        if param.is_cuda:
            self._streams.add(torch.cuda.current_stream(param.device))

    def launch(self, group: dist.ProcessGroup, preexisting: Collection[int]) -> None:
        """Pack what has arrived and start averaging it; what has not counts as zero.

        Args:
            preexisting: parameters that had a gradient before the backward.
        """
        self._pack(preexisting)
        assert self._flat is not None
        self._work = average(self._flat, group, self.world_size)
        self.launched = True

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def is_late(self) -> bool:
        """Whether a member's gradient came after the launch."""
        return any(member.param.grad is not None for member in self.members)

    def reduce_late(self, group: dist.ProcessGroup) -> None:
        """Average the late gradients of all ranks and add them. A collective call, after ``wait``."""
        assert self._flat is not None
        late = torch.zeros_like(self._flat)
        self._streams_join()
        for member, view in zip(self.members, self._carve(late), strict=True):
            if member.param.grad is not None:
                view.copy_(_dense(member.param.grad))
                member.param.grad = None
                self.contributors.add(member.index)
        average(late, group, self.world_size).wait()
        self._flat.add_(late)

    def give(self, used: Sequence[bool]) -> None:
        """End the round: the average becomes ``param.grad`` of the parameters that some rank used."""
        for position, (member, view) in enumerate(zip(self.members, self._views, strict=True)):
            if used[member.index]:
                kept = self._kept.get(position)
                member.param.grad = view if kept is None else kept.copy_(view)
        self._kept.clear()

    def _pack(self, preexisting: Collection[int]) -> None:
        self._streams_join()
        if self._flat is None or self._is_held():
            device, dtype = self.members[0].param.device, self.members[0].param.dtype
            self._flat = torch.empty(sum(member.param.numel() for member in self.members), device=device, dtype=dtype)
            self._views = self._carve(self._flat)
        sources, targets, absent = [], [], []
        for position, (member, view) in enumerate(zip(self.members, self._views, strict=True)):
            grad = member.param.grad
            if grad is None:
                absent.append(view)
                continue
            self.contributors.add(member.index)
            if grad is not view:
                sources.append(_dense(grad))
                targets.append(view)
                if member.index in preexisting:
                    self._kept[position] = grad
            member.param.grad = None
        if sources:
            torch._foreach_copy_(targets, sources)
        if absent:
            torch._foreach_zero_(absent)
        self._keep_only_held()

    def _keep_only_held(self) -> None:
        """Of the gradients that were there before, let go those that nobody else holds."""
        for position in list(self._kept):
            storage_shared = _num_storage_references(self._kept[position]) > 1
            reference = weakref.ref(self._kept[position])
            if storage_shared:
                continue
            candidate = self._kept.pop(position)
            del candidate
            held = reference()
            if held is not None:
                self._kept[position] = held

    def _is_held(self) -> bool:
        """Whether somebody has kept a gradient of the last round, or a view of one."""
        assert self._flat is not None
        if _num_storage_references(self._flat) > 1 + len(self._views):
            return True
        views = self._views
        return any(
            sys.getrefcount(views[position]) > _OWN_REFERENCES and member.param.grad is not views[position]
            for position, member in enumerate(self.members)
        )

    def _carve(self, flat: Tensor) -> list[Tensor]:
        """One view per member, laid out like the parameter."""
        views, start = [], 0
        for member in self.members:
            views.append(flat.as_strided(member.param.shape, member.stride, start))
            start += member.param.numel()
        return views

    def _streams_join(self) -> None:
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


class SparseBucket(Bucket):
    """One parameter whose gradient is sparse, and stays so.

    Ranks hold different rows, in different numbers, so the rows are gathered and added. That needs messages in turn,
    and happens in ``wait``, when all other buckets are under way.
    """

    _mine: Tensor | None = None
    _sum: Tensor | None = None

    def launch(self, group: dist.ProcessGroup, preexisting: Collection[int]) -> None:  # noqa: ARG002
        self._streams_join()
        self._group = group
        self._mine = self._take()
        self.launched = True

    def wait(self) -> None:
        if self._mine is not None:
            self._sum = _sum_of_rows(self._mine, self._group, self.world_size)
            self._mine = None

    def reduce_late(self, group: dist.ProcessGroup) -> None:
        assert self._sum is not None
        self._sum = (self._sum + _sum_of_rows(self._take(), group, self.world_size)).coalesce()

    def give(self, used: Sequence[bool]) -> None:
        assert self._sum is not None
        member = self.members[0]
        if used[member.index]:
            member.param.grad = self._sum / self.world_size
        self._sum = None

    def _take(self) -> Tensor:
        """This rank's gradient in sparse form; empty where it has none."""
        param = self.members[0].param
        grad, param.grad = param.grad, None
        if grad is None:
            return torch.zeros_like(param).to_sparse(1).coalesce()
        self.contributors.add(self.members[0].index)
        return (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()


def _sum_of_rows(mine: Tensor, group: dist.ProcessGroup, world_size: int) -> Tensor:
    """The sum of all ranks' sparse tensors, in the order of ranks. A collective call."""
    num_rows = torch.tensor([mine._nnz()], device=mine.device)
    counts = [torch.zeros_like(num_rows) for _ in range(world_size)]
    dist.all_gather(counts, num_rows, group=group)
    longest = int(torch.cat(counts).max())
    gathered = []
    for part in (mine.indices().t().contiguous(), mine.values()):
        padded = part.new_zeros((longest, *part.shape[1:]))
        padded[: len(part)] = part
        everyones = [torch.empty_like(padded) for _ in range(world_size)]
        dist.all_gather(everyones, padded, group=group)
        gathered.append(torch.cat([theirs[: int(count)] for theirs, count in zip(everyones, counts, strict=True)]))
    return torch.sparse_coo_tensor(gathered[0].t(), gathered[1], mine.shape, check_invariants=False).coalesce()


def average(flat: Tensor, group: dist.ProcessGroup, world_size: int) -> dist.Work:
    """Start to average ``flat`` over the ranks, in place.

    Divided before it is summed: a sum of half-precision gradients could overflow.
    """
    work: dist.Work = dist.all_reduce(flat.div_(world_size), group=group, async_op=True)
    return work


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
