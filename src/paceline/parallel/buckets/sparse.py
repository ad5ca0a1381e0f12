"""A gradient that is sparse, in a bucket of its own.

The invariant: it is never made dense on the way, and all ranks add the same rows in the same order.
"""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.buckets.bucket import Bucket, Member


class SparseBucket(Bucket):
    """One parameter whose gradient is sparse, and stays so.

    Ranks hold different rows, in different numbers, so the rows are gathered and added. That needs messages in turn,
    and happens in ``wait``, when all other buckets are under way.
    """

    kind = "sparse"
    _group: dist.ProcessGroup | None = None
    _mine: Tensor | None = None
    _sum: Tensor | None = None
    _was_dense = False  # as where a table is tied to a layer that uses all of it

    def pack(self, preexisting: Collection[int]) -> None:  # noqa: ARG002
        self._join_streams()
        self._was_dense = False
        self._mine = self._take()
        self.is_launched = True

    def send(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def wait(self) -> None:
        if self._mine is not None:
            assert self._group is not None
            self._sum, self._mine = _sum_of_rows(self._mine, self._group, self.world_size), None

    def reduce_late(self, group: dist.ProcessGroup) -> None:
        assert self._sum is not None
        self._sum = (self._sum + _sum_of_rows(self._take(), group, self.world_size)).coalesce()

    def rescale(self, factor: float) -> None:
        assert self._sum is not None
        self._sum = self._sum * factor

    def give(self, used: bytes) -> None:
        assert self._sum is not None
        param = self.members[0].param
        if used[self.members[0].index] and not self.misfits:
            average = self._sum / self.world_size
            grad = average.to_dense() if self._was_dense else average
            param.grad = grad if param.grad is None else param.grad + grad
        self._sum = None

    def _take(self) -> Tensor:
        """This rank's gradient in sparse form; empty where it has none."""
        member = self.members[0]
        grad = None if self.misfits else member.param.grad
        if grad is None:
            return _no_rows(member)
        member.param.grad = None
        self.contributors = self.indices
        self._was_dense = self._was_dense or not grad.is_sparse
        return (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()


def _no_rows(member: Member) -> Tensor:
    values = torch.empty((0, *member.shape[1:]), dtype=member.dtype, device=member.device)
    rows = torch.empty((1, 0), dtype=torch.int64, device=member.device)
    return torch.sparse_coo_tensor(rows, values, member.shape, check_invariants=False).coalesce()


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
