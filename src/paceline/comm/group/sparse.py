"""Sums of sparse tensors: ranks hold different rows, in different numbers, so they are gathered and added."""

import torch
from torch import Tensor

from paceline.comm.group.reducing import Reducing
from paceline.comm.group.staging import flat
from paceline.comm.reductions import divide
from paceline.comm.transport import Call, Steps, Transport


def check_sparse(tensor: Tensor, reducing: Reducing) -> None:
    """Raise unless ``sum_sparse`` can do it."""
    if tensor.layout != torch.sparse_coo or reducing.name not in ("sum", "avg"):
        raise ValueError(
            f"all_reduce of a tensor of the layout {tensor.layout} with {reducing.name.upper()}: of sparse tensors, "
            "only those in COO can be reduced, and only with SUM or AVG. Use to_dense()."
        )


def spell_sparse(tensor: Tensor, reducing: Reducing) -> str:
    """What all ranks must have alike."""
    return f"{reducing.name}, sparse, shape {tuple(tensor.shape)}, {tensor.dense_dim()} dimensions dense"


def sum_sparse(transport: Transport, call: Call, tensor: Tensor, reducing: Reducing) -> Steps:
    """Replace the COO tensor ``tensor`` by the sum over all ranks, coalesced."""
    mine = tensor.detach().coalesce()
    count = torch.tensor([mine._nnz()], device="cpu")
    counts = [torch.empty_like(count) for _ in range(transport.size)]
    yield from transport.all_gather(call, counts, count)
    gathered = []
    for part in (mine.indices().t().contiguous(), mine.values()):
        everyones = [part.new_empty((int(number), *part.shape[1:])) for number in counts]
        each = call._replace(dtype=part.dtype)
        yield from transport.all_gather(each, [flat(theirs) for theirs in everyones], flat(part))
        gathered.append(everyones)
    # What the caller's tensor is made of from now on must be what it was: see [Note: inference mode] in operation.py.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        indices, values = (torch.cat(everyones) for everyones in gathered)
        total = torch.sparse_coo_tensor(
            indices.t(), values, mine.shape, check_invariants=False, device="cpu"
        ).coalesce()
        if reducing.name == "avg":
            divide(total.values(), transport.size)
        tensor.copy_(total)
