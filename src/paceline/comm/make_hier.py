"""How a process group over several hosts comes to be; apart, so that groups of one host load nothing of it.

The invariant: where one rank cannot take part, all are told whose fault it is, and nothing stays.
"""

import contextlib
import json
import time
from typing import Any

import torch.distributed as dist

from paceline.comm.engine import Engine
from paceline.comm.explain import system_refuses
from paceline.comm.group import CollectiveGroup
from paceline.comm.group.companion import make_companion
from paceline.comm.hosts.across import AveragesOverHosts
from paceline.comm.hosts.post import Post
from paceline.comm.hosts.transport import BUFFER_BYTES, Hierarchical
from paceline.comm.make import meet_in_store, shared_group
from paceline.comm.memory.averages import Averages
from paceline.comm.memory.opening import myself, open_arena
from paceline.comm.memory.transport import SharedMemory
from paceline.errors import CommunicationError, PeerError, RendezvousError
from paceline.rendezvous import Meeting


def make_hier(options: Any) -> CollectiveGroup:
    """What c10d calls for ``backend="hier"``. A collective call.

    Args:
        options: c10d's ``DistributedBackendOptions``.
    """
    meeting, deadline, ranks = meet_in_store(options)
    nodes = [peer.node for peer in meeting.peers]
    hosts = [[rank for rank, node in enumerate(nodes) if node == one] for one in dict.fromkeys(nodes)]
    rank = options.group_rank
    if len(hosts) == 1:
        transport = SharedMemory(open_arena(meeting, deadline), rank, ranks)
        transport.name = Hierarchical.name
        return shared_group(transport, ranks, options)
    members = next(members for members in hosts if rank in members)
    near = Meeting(members.index(rank), len(members), dist.PrefixStore(f"host of {members[0]}/", options.store))
    with contextlib.ExitStack() as undo:  # where one rank cannot, the others are told, and nothing stays
        undo.push(lambda _kind, error, _trace: _tell_failure(meeting, error))
        near.join(myself())
        near.await_all(deadline)
        arena = open_arena(near, deadline, BUFFER_BYTES)
        undo.callback(arena.close)
        try:
            post = Post(rank)
        except OSError as error:
            raise system_refuses(rank, "open sockets for other hosts", error) from None
        undo.callback(post.close)
        told = _introduce(meeting, post.whereabouts() | {"buffer_bytes": arena.layout.buffer_bytes}, deadline)
        undo.pop_all()
    for other, each in enumerate(told):  # what this rank has told stays: the others look for whose fault it is
        if "error" in each:
            post.close()
            arena.close()
            raise CommunicationError(f"rank {rank}: rank {other} cannot take part: {each['error']}")
    post.learn(told)
    local = SharedMemory(arena, near.rank, [ranks[member] for member in members])
    block_bytes = min(each["buffer_bytes"] for each in told)
    try:
        hierarchical = Hierarchical(local, post, hosts, rank, ranks, block_bytes)
    except OSError as error:
        failure = system_refuses(rank, "connect to other hosts", error)
        local.give_up(str(failure))
        post.close()
        local.close()
        raise failure from None
    timeout_s = options.timeout.total_seconds()

    def averages(engine: Engine) -> Averages:
        engine.check_own()
        across = hierarchical.open_across(dist.PrefixStore("averages/", options.store), timeout_s)
        return AveragesOverHosts(
            local, engine, members=members, num_shares=hierarchical.num_lanes, size=len(ranks), across=across
        )

    return CollectiveGroup(hierarchical, ranks, timeout_s, make_companion(options), averages)


def _introduce(meeting: Meeting, mine: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
    """What each rank has to tell of itself, by rank; of one that cannot take part, its error.

    Raises:
        RendezvousError, PeerError: some rank did not come.
    """
    meeting.announce("post", json.dumps(mine))

    def late(names: str) -> Exception:
        return RendezvousError(f"rank {meeting.rank}: {names} did not say where to reach it before the deadline.")

    everyone = range(meeting.world_size)
    meeting.await_ranks(everyone, "post", deadline - time.monotonic(), late=late)
    return [json.loads(text) for text in meeting.read_all("post")]


def _tell_failure(meeting: Meeting, error: BaseException | None) -> None:
    """In place of ``_introduce``."""
    if error is not None:
        with contextlib.suppress(PeerError):  # nobody is left to be told
            meeting.announce("post", json.dumps({"error": str(error) or type(error).__name__}))
