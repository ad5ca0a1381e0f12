"""How a process group comes to be: its ranks meet in c10d's store, and share what the transport needs."""

import time
from typing import Any

from paceline.comm.engine import Engine
from paceline.comm.group import CollectiveGroup
from paceline.comm.group.companion import make_companion
from paceline.comm.memory.averages import Averages
from paceline.comm.memory.opening import myself, open_arena
from paceline.comm.memory.transport import SharedMemory
from paceline.rendezvous import Meeting


def make_shm(options: Any) -> CollectiveGroup:
    """What c10d calls for ``backend="shm"``. A collective call.

    Args:
        options: c10d's ``DistributedBackendOptions``.
    """
    meeting, deadline, ranks = meet_in_store(options)
    transport = SharedMemory(open_arena(meeting, deadline), options.group_rank, ranks)
    return shared_group(transport, ranks, options)


def meet_in_store(options: Any) -> tuple[Meeting, float, list[int]]:
    """Wait until all ranks have come: where they have met, until when they may take, and their global ranks."""
    deadline = time.monotonic() + options.timeout.total_seconds()
    meeting = Meeting(options.group_rank, options.group_size, options.store)
    meeting.join(myself())
    meeting.await_all(deadline)
    return meeting, deadline, list(options.global_ranks_in_group) or list(range(options.group_size))


def shared_group(transport: SharedMemory, ranks: list[int], options: Any) -> CollectiveGroup:
    """A group whose ranks are all on one host."""

    def averages(engine: Engine) -> Averages:
        return Averages(transport, engine, num_shares=transport.size, size=transport.size)

    timeout_s = options.timeout.total_seconds()
    return CollectiveGroup(transport, ranks, timeout_s, make_companion(options), averages)
