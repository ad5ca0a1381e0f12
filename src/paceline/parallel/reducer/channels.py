"""The process groups over which a reducer talks.

[Note: a group of its own] A bucket starts when its gradients have arrived, which may be earlier on one rank than on
another, while the model's own collectives (those of SyncBatchNorm, say) come in between. c10d pairs collectives by
their order within a group. So that no two ranks ever pair a bucket with something else, a reducer of CPU tensors has
a group to itself. On GPUs two NCCL communicators at once may deadlock, so gradients use the caller's group there, as
torch's do, with torch's condition: collectives of the model's own backward, and several wrappers, must come in the same
order on all ranks. Only the control message, which the host reads, gets a group for CPU tensors there: reading it never
waits for a CUDA stream.

[Note: control in memory] Every rank waits for the control message at the end of each backward, and a round trip of
Gloo's may take a millisecond or two where cores are busy. So where the ranks share a host's memory, control goes there,
whatever gradients travel over.

A group cannot be closed by one rank while another still listens to it, and garbage is collected on each rank in its
own time. So a wrapper that is gone only retires its groups; the next wrapper takes those that *all* ranks have retired.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from paceline.comm.group import CollectiveGroup
from paceline.comm.memory.averages import Averages
from paceline.comm.memory.opening import myself
from paceline.parallel.groups import cpu_backend_of, timeout_of
from paceline.rendezvous import Peer
from paceline.world.placing import choose_cpu_backend


@dataclass(frozen=True)
class _Groups:
    """What a wrapper of CPU tensors talks over; the same group twice where one does for both."""

    gradients: dist.ProcessGroup
    control: dist.ProcessGroup


# Those whose reducer is gone, by the group they belong to and their control's own name.
_retired: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _Groups]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Offer:
    """What a rank brings when channels are opened.

    Attributes:
        retired: the names of the groups that it could use again.
        peer: where it runs.
    """

    retired: tuple[str, ...]
    peer: Peer


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


def make_offer(parent: dist.ProcessGroup) -> Offer:
    """What this rank brings to ``open_channels``."""
    return Offer(tuple(_retired.get(parent, {})), myself())


def open_channels(parent: dist.ProcessGroup, device_type: str, offers: Sequence[Offer], owner: object) -> Channels:
    """A collective call of all ranks in ``parent``.

    Args:
        offers: each rank's.
        owner: the channels are retired when it is gone.
    """
    is_on_cpu = device_type == "cpu"
    common = set(offers[0].retired).intersection(*(offer.retired for offer in offers[1:]))
    if common:
        groups = _retired[parent].pop(min(common))
    else:
        groups = _new_groups(parent, is_on_cpu, [offer.peer for offer in offers])
    channels = Channels(
        groups.gradients if is_on_cpu else parent,
        groups.control,
        groups.gradients.averages() if is_on_cpu and isinstance(groups.gradients, CollectiveGroup) else None,
    )
    weakref.finalize(owner, _retire, weakref.ref(parent), groups, channels)
    return channels


def _new_groups(parent: dist.ProcessGroup, is_on_cpu: bool, peers: Sequence[Peer]) -> _Groups:
    ranks = dist.get_process_group_ranks(parent)

    def new_group(backend: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout_of(parent), backend=backend, use_local_synchronization=True
        )
        return group

    backend = cpu_backend_of(parent)
    control_backend = "shm" if backend == "gloo" and choose_cpu_backend(peers) == "shm" else backend
    control = new_group(control_backend)
    return _Groups(new_group(backend) if is_on_cpu and control_backend != backend else control, control)


def _retire(parent: "weakref.ref[dist.ProcessGroup]", groups: _Groups, channels: Channels) -> None:
    owner = parent()
    if owner is not None and channels.is_idle:
        _retired.setdefault(owner, {})[groups.control.group_name] = groups
