"""The process groups over which a reducer talks.

[Note: a group of its own] A bucket starts when its gradients have arrived, which may be earlier on one rank than on
another, while the model's own collectives (those of SyncBatchNorm, say) come in between. c10d pairs collectives by
their order within a group. So that no two ranks ever pair a bucket with something else, a reducer of CPU tensors has
a group to itself. On GPUs two NCCL communicators at once may deadlock, so gradients use the caller's group there, as
torch's do, with torch's condition: collectives of the model's own backward, and several wrappers, must come in the same
order on all ranks. Only the control message, which the host reads, gets a group for CPU tensors there: reading it never
waits for a CUDA stream.

[Note: Gloo within a host] Where the caller's group is Gloo's and its ranks share a host's memory, a reducer talks
there, unless PACELINE_SHARED_MEMORY=0: it is several times as fast. The caller's own collectives stay on Gloo. A system
that refuses to share memory costs the speed, and a warning.

A group cannot be closed by one rank while another still listens to it, and garbage is collected on each rank in its
own time. So a wrapper that is gone only retires its groups; the next wrapper takes those that *all* ranks have retired.
"""

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from paceline.comm.group import CollectiveGroup
from paceline.comm.memory.averages import Averages
from paceline.comm.memory.opening import myself
from paceline.errors import CommunicationError
from paceline.parallel.groups import cpu_backend_of, timeout_of
from paceline.rendezvous import Peer
from paceline.world.placing import choose_cpu_backend

# Groups whose reducer is gone, by the one they belong to and their own name.
_retired: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]]" = weakref.WeakKeyDictionary()


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
    common = set(offers[0].retired).intersection(*(offer.retired for offer in offers[1:]))
    if common:
        group = _retired[parent].pop(min(common))
    else:
        group = _new_group(parent, [offer.peer for offer in offers])
    if device_type != "cpu":
        channels = Channels(parent, group)
    else:
        channels = Channels(group, group, group.averages() if isinstance(group, CollectiveGroup) else None)
    weakref.finalize(owner, _retire, weakref.ref(parent), channels)
    return channels


def _new_group(parent: dist.ProcessGroup, peers: Sequence[Peer]) -> dist.ProcessGroup:
    """For CPU tensors, among the ranks of ``parent``."""

    def new_group(backend: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            dist.get_process_group_ranks(parent),
            timeout=timeout_of(parent),
            backend=backend,
            use_local_synchronization=True,
        )
        return group

    backend = cpu_backend_of(parent)
    if backend == "gloo" and choose_cpu_backend(peers) == "shm":
        try:
            return new_group("shm")
        except CommunicationError as error:  # which all ranks raise
            warnings.warn(f"gradients are averaged over Gloo, since memory cannot be shared: {error}", stacklevel=2)
    return new_group(backend)


def _retire(parent: "weakref.ref[dist.ProcessGroup]", channels: Channels) -> None:
    owner = parent()
    if owner is not None and channels.is_idle:
        _retired.setdefault(owner, {})[channels.control.group_name] = channels.control
