"""Process groups: reducing over one at little cost, and what it tells of itself to those who make another like it.

The invariant: what c10d refuses is refused.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def start_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> dist.Work:
    """``dist.all_reduce(tensor, op, group, async_op=True)``, without what it looks up on the way, which takes 10 us."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    options.asyncOp = True
    return group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor], options)


def cpu_backend_of(parent: dist.ProcessGroup) -> str:
    """The backend that ``parent`` has for CPU tensors; Gloo where it has none."""
    try:
        name = str(parent._get_backend(torch.device("cpu")).name()).lower()
    except RuntimeError:
        return "gloo"
    return "cpu:mpi" if name == "mpi" else name  # for plain "mpi", c10d refuses what only the members call


def timeout_of(parent: dist.ProcessGroup) -> timedelta | None:
    """How long its collectives wait; None where it does not tell."""
    for device in ("cpu", "cuda"):
        try:
            options = parent._get_backend(torch.device(device)).options
            return options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None
