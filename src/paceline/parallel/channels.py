"""The process groups over which a reducer talks.

[Note: a group of its own] A bucket starts when its gradients have arrived, which may be earlier on one rank than on
another, while the model's own collectives (those of SyncBatchNorm, say) come in between. c10d pairs collectives by
their order within a group. So that no two ranks ever pair a bucket with something else, a reducer of CPU tensors has
a group to itself. On GPUs two NCCL communicators at once may deadlock, so gradients use the caller's group there, as
torch's do, with torch's condition: collectives of the model's own backward, and several wrappers, must come in the same
order on all ranks. Only the control message, which the host reads, gets a Gloo group of its own there: reading it never
waits for a CUDA stream.

A group cannot be closed by one rank while another still listens to it, and garbage is collected on each rank in its
own time. So a wrapper that is gone only retires its group; the next wrapper takes one that *all* ranks have retired.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.comm.group import CollectiveGroup
from paceline.comm.memory.averages import Averages

# Groups whose reducer is gone, by the group they belong to and their own name.
_retired: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]]" = weakref.WeakKeyDictionary()


@dataclass
class Channels:
    """Where gradients and where control messages travel.

    Attributes:
        averages: of gradients that lie in memory which the ranks share; None where they share none.
        is_idle: whether nothing is under way; groups that were left in the middle of something are never used again.
    """

    gradients: dist.ProcessGroup
    control: dist.ProcessGroup
    averages: "Averages | None" = None
    is_idle: bool = True


def retired_names(parent: dist.ProcessGroup) -> list[str]:
    """The names of the groups that this rank could use again."""
    return sorted(_retired.get(parent, {}))


def open_channels(
    parent: dist.ProcessGroup, device_type: str, offers: Sequence[Sequence[str]], owner: object
) -> Channels:
    """A collective call of all ranks in ``parent``.

    Args:
        offers: each rank's ``retired_names``.
        owner: the channels are retired when it is gone.
    """
    common = set(offers[0]).intersection(*offers[1:])
    if common:
        group = _retired[parent].pop(min(common))
    else:
        ranks = dist.get_process_group_ranks(parent)
        backend = _cpu_backend(parent)
        group = dist.new_group(ranks, timeout=_timeout(parent), backend=backend, use_local_synchronization=True)
    is_on_cpu = device_type == "cpu"
    channels = Channels(
        group if is_on_cpu else parent,
        group,
        group.averages() if is_on_cpu and isinstance(group, CollectiveGroup) else None,
    )
    weakref.finalize(owner, _retire, weakref.ref(parent), channels)
    return channels


def _retire(parent: "weakref.ref[dist.ProcessGroup]", channels: Channels) -> None:
    owner = parent()
    if owner is not None and channels.is_idle:
        _retired.setdefault(owner, {})[channels.control.group_name] = channels.control


def _cpu_backend(parent: dist.ProcessGroup) -> str:
    """The backend that ``parent`` has for CPU tensors; Gloo where it has none."""
    try:
        name = str(parent._get_backend(torch.device("cpu")).name()).lower()
    except RuntimeError:
        return "gloo"
    return "cpu:mpi" if name == "mpi" else name  # for plain "mpi", c10d refuses what only the members call


def _timeout(parent: dist.ProcessGroup) -> timedelta | None:
    for device in ("cpu", "cuda"):
        try:
            options = parent._get_backend(torch.device(device)).options
            return options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None
