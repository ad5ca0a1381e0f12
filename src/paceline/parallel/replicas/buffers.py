"""Buffers, such as batch normalisation's running means: one rank's are copied to all before a forward that trains.

The invariant: messages have one size on all ranks, whatever has become of a buffer on one of them.
"""

import torch.distributed as dist

from paceline.errors import ReductionError
from paceline.parallel.replicas.broadcast import broadcast_tensors
from paceline.parallel.replicas.registry import Registry


def copy_buffers(registry: Registry, group: dist.ProcessGroup, source: int) -> None:
    """Make the buffers of the group's rank ``source`` everybody's. A collective call.

    Raises:
        ReductionError: they could not be copied, most likely since ranks run unequal numbers of training forwards.
    """
    try:
        broadcast_tensors(registry.buffers(), group, source)
    except RuntimeError as error:
        names = registry.buffer_names
        raise ReductionError(
            f"rank {dist.get_rank()}: the buffers ({names[0]!r} to {names[-1]!r}) could not be copied from the "
            "first rank. Either another rank has ended, and its output says why, or the ranks run unequal numbers "
            "of training forwards: call eval(), or use no_grad(), where a rank evaluates. The backend reports: "
            f"{error}"
        ) from error
