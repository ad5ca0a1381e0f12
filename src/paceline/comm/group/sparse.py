"""Sums of sparse tensors: ranks hold different rows, in different numbers, so they are gathered and added."""

import torch
from torch import Tensor

from paceline.comm.group.staging import flat
from paceline.comm.reductions import divide
from paceline.comm.transport import Call, Reduction, Steps, Transport
from paceline.errors import CommunicationError


def sum_sparse(transport: Transport, call: Call, tensor: Tensor, reduction: Reduction) -> Steps:
    """Replace the COO tensor ``tensor`` by the sum over all ranks, coalesced."""
    if tensor.layout != torch.sparse_coo or reduction.name not in ("sum", "avg"):
        raise CommunicationError(
            f"{call}: of sparse tensors, only COO tensors can be reduced, and only with SUM or AVG. Use to_dense()."
        )
    mine = tensor.detach().coalesce()
    count = torch.tensor([mine._nnz()])
    counts = [torch.empty_like(count) for _ in range(transport.size)]
    yield from transport.all_gather(Call(call.kind, count.dtype, 1, call.detail, call.where), counts, count)
    gathered = []
    for part in (mine.indices().t().contiguous(), mine.values()):
        everyones = [part.new_empty((int(number), *part.shape[1:])) for number in counts]
        each = Call(call.kind, part.dtype, -1, call.detail, call.where)
        yield from transport.all_gather(each, [flat(theirs) for theirs in everyones], flat(part))
        gathered.append(torch.cat(everyones))
    total = torch.sparse_coo_tensor(gathered[0].t(), gathered[1], mine.shape, check_invariants=False).coalesce()
    if reduction.name == "avg":
        divide(total.values(), transport.size)
    with torch.no_grad():
        tensor.copy_(total)
