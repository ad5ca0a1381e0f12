"""What a process group tells of itself, for those who make another like it."""

from datetime import timedelta

import torch
import torch.distributed as dist


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
