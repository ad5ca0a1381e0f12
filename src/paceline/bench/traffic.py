"""How many bytes a rank sends in a step.

[Note: what is sent] This is counted from what is reduced, not by the network. To reduce S bytes over n ranks, each must
send at least 2 (n - 1) / n of S, which is what rings send (Gloo's and NCCL's), and what passes between ranks in shared
memory. To copy the buffers of the first rank to all takes (n - 1) / n of their size, in the mean over the ranks. Sparse
gradients count as if they were dense. Headers are left out.

The invariant: it is a function of the model and the events of one step, so that it is the same in each run.
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from paceline.bench.results import OURS
from paceline.bench.ways import Trainee, is_on_every_rank
from paceline.timeline import Event

_REDUCED = {"launched", "late", "unplanned", "control"}


def bytes_sent(trainee: Trainee, events: Iterable[Event]) -> int | None:
    """By one rank in the step of which ``events`` tell; None where there are no ranks. [Note: what is sent]"""
    if not is_on_every_rank(trainee.way):
        return None
    model = trainee.model
    if trainee.way == OURS:
        reduced = sum(event.size_bytes for event in events if event.kind in _REDUCED)
    else:
        reduced = _size(param for param in model.parameters() if param.requires_grad)
    copied = _size(model.buffers()) if model.will_sync_module_buffers() else 0  # type: ignore[operator]
    world_size = dist.get_world_size(model.process_group)  # type: ignore[arg-type]
    return round((2 * reduced + copied) * (world_size - 1) / world_size)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
