"""How a process group comes to be: its ranks meet in c10d's store, and share what the transport needs."""

import time
from typing import Any

from paceline.comm.arena import myself, open_arena
from paceline.comm.averages import Averages
from paceline.comm.companion import make_companion
from paceline.comm.engine import Engine
from paceline.comm.group import CollectiveGroup
from paceline.comm.shm import SharedMemory
from paceline.rendezvous import Meeting


def make_shm(options: Any) -> CollectiveGroup:
    """What c10d calls for ``backend="shm"``. A collective call.

    Args:
        options: c10d's ``DistributedBackendOptions``.
    """
    timeout_s = options.timeout.total_seconds()
    deadline = time.monotonic() + timeout_s
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    meeting = Meeting(options.group_rank, options.group_size, options.store)
    meeting.join(myself())
    meeting.await_all(deadline)
    transport = SharedMemory(open_arena(meeting, deadline), options.group_rank, ranks)

    def averages(engine: Engine) -> Averages:
        return Averages(transport, engine, num_shares=transport.size, size=transport.size)

    return CollectiveGroup(transport, ranks, timeout_s, make_companion(options), averages)
