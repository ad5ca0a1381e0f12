"""Calls in which one rank differs from the others: what every backend must refuse on all ranks, and write nothing.

Rank 1 differs. A case yields what is called and the tensors that must stay as they are.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import CollectiveMismatchError

Case = tuple[Callable[[], Any], list[torch.Tensor]]

# Words of what both sides have called, which the error of each rank must name.
SIDES = {
    "sparse shape": ["(3, 4)", "(6, 2)"],
    "sparse and dense dimensions": ["0 dimensions dense", "1 dimensions dense"],
    "sparse and dense": ["sum, sparse", "of 12 elements"],
    "second tensor of an all_gather": ["2 at once: 3 float32, 4 float32", "2 at once: 3 float32, 5 float32"],
    "second dtype of an all_gather": ["3 float32, 4 float32", "3 float32, 4 int32"],
    "number of an all_gather": ["of 3 elements", "2 at once: 3 float32, 4 float32"],
    "order of an all_reduce": ["2 at once: 3 float32, 5 float32", "2 at once: 5 float32, 3 float32"],
    "number of an all_reduce": ["of 8 elements", "2 at once: 3 float32, 5 float32"],
    "second tensor of a reduce_scatter": ["2 at once: 3 float32, 4 float32", "2 at once: 3 float32, 5 float32"],
    "second of unequal sizes": ["sizes 1, 2", "sizes 2, 1"],
}


def cases(rank: int, size: int) -> Iterator[tuple[str, Case]]:
    odd, group = rank == 1, dist.group.WORLD
    assert group is not None

    def given(*lengths: int) -> list[torch.Tensor]:
        return [torch.full((n,), rank + 1.0) for n in lengths]

    def sparse(shape: tuple[int, int], num_sparse: int) -> Case:
        t = torch.zeros(shape).index_put_((torch.tensor([rank % 2]), torch.tensor([0])), torch.tensor(2.0))
        t = t.to_sparse(num_sparse)
        return lambda: dist.all_reduce(t), [t]

    def gathered(inputs: list[torch.Tensor]) -> Case:
        outs = [torch.full((t.numel() * size,), -1.0).to(t.dtype) for t in inputs]
        return lambda: group.allgather_into_tensor_coalesced(outs, inputs).wait(), outs

    def summed(tensors: list[torch.Tensor]) -> Case:
        return lambda: group.allreduce_coalesced(tensors).wait(), tensors

    def scattered(*lengths: int) -> Case:
        outs = [torch.full((n,), -1.0) for n in lengths]
        inputs = given(*(n * size for n in lengths))
        return lambda: group.reduce_scatter_tensor_coalesced(outs, inputs).wait(), outs

    def of_unequal_sizes() -> Case:
        sizes = [2, 1, *[1] * (size - 2)] if odd else [1, 2, *[1] * (size - 2)]
        outs = [[torch.full((3,), -1.0) for _ in range(size)], [torch.full((n,), -1.0) for n in sizes]]
        return lambda: group.allgather(outs, given(3, sizes[rank])).wait(), [*outs[0], *outs[1]]

    yield "sparse shape", sparse((6, 2) if odd else (3, 4), 2)
    yield "sparse and dense dimensions", sparse((3, 4), 1 if odd else 2)
    dense = torch.full((12,), 2.0)
    yield "sparse and dense", (lambda: dist.all_reduce(dense), [dense]) if odd else sparse((3, 4), 2)
    yield "second tensor of an all_gather", gathered(given(3, 5 if odd else 4))
    first, second = given(3, 4)
    yield "second dtype of an all_gather", gathered([first, second.int() if odd else second])
    yield "number of an all_gather", gathered(given(3) if odd else given(3, 4))
    yield "order of an all_reduce", summed(given(5, 3) if odd else given(3, 5))
    yield "number of an all_reduce", summed(given(8) if odd else given(3, 5))
    yield "second tensor of a reduce_scatter", scattered(3, 5 if odd else 4)
    yield "second of unequal sizes", of_unequal_sizes()


def mismatches(rank: int, size: int) -> list[str]:
    """What was wrong: what was not refused, an error that lacks a side, a tensor that was written, a lost group."""
    wrong = []
    for name, (call, tensors) in cases(rank, size):
        before = [t.clone() for t in tensors]
        try:
            call()
            wrong.append(f"{name}: not refused")
        except CollectiveMismatchError as error:
            wrong += [f"{name}: no {side!r} in: {error}" for side in SIDES[name] if side not in str(error)]
        for t, was in zip(tensors, before, strict=True):
            if not torch.equal(t.to_dense(), was.to_dense()):
                wrong.append(f"{name}: {was} has become {t}")
        t = torch.tensor([rank])
        dist.all_reduce(t)
        if t.item() != size * (size - 1) // 2:
            wrong.append(f"{name}: the sum after it is {t.item()}")
    return wrong


def messages_of_another_dtype(rank: int) -> tuple[str, list[float]]:
    """Rank 0 sends rank 1 four int32, which waits for four float32: the error there, and what has become of these."""
    t = torch.full((4,), -1.0)
    dist.barrier()
    if rank == 0:
        dist.send(torch.tensor([1, 2, 3, 4], dtype=torch.int32), 1)
    error = ""
    if rank == 1:
        try:
            dist.recv(t, 0)
        except CollectiveMismatchError as raised:
            error = str(raised)
    dist.barrier()
    return error, t.tolist()
