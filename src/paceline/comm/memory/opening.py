"""How the ranks of one host come to share memory: the first one makes the file, and the others find it.

They open it through the first rank's /proc entry, which the kernel allows to the same user only, and check a random
token in it.

The invariant: where one rank cannot, it says why, and all raise at once; none waits for its timeout.
"""

import contextlib
import json
import os
import secrets
import time
from dataclasses import asdict
from typing import Any

import psutil

from paceline.comm.explain import is_for_descriptors, system_refuses
from paceline.comm.memory.arena import NUM_BUFFERS, NUM_MESSAGE_SLOTS, TOKEN_BYTES, Arena, Layout, pages, shortage
from paceline.comm.memory.signals import make_bells
from paceline.environment import Placement, read_placement
from paceline.errors import CommunicationError, EnvironmentVariableError, PeerError, RendezvousError
from paceline.rendezvous import Meeting, Peer

# Two ranks do best with what stays in a core's cache; more with fewer meetings, within what a group may take.
_BUFFER_BYTES_OF_TWO, _BUFFER_BYTES, _SMALLEST_BUFFER_BYTES = 1 << 20, 1 << 21, 1 << 14
_MOST_BUFFERS_BYTES = 1 << 25
_SMALLEST_HEAP_BYTES = 1 << 26


def open_arena(meeting: Meeting, deadline: float, buffer_bytes: int | None = None) -> Arena:
    """Make the arena, or map the one that the first rank has made. A collective call of the ranks of one host.

    Args:
        meeting: of these ranks; all have joined it.
        buffer_bytes: of each of the buffers through which tensors stream, if there is as much memory.
    Raises:
        CommunicationError: the ranks do not share one host's memory, or it is short, here or on another rank.
        RendezvousError, PeerError: some rank did not come.
    """
    _check_one_host(meeting)
    buffer_bytes = buffer_bytes or choose_buffer_bytes(meeting.world_size)
    arena = None
    try:
        arena = _make(meeting, buffer_bytes) if meeting.rank == 0 else _find(meeting, deadline)
        told = _see_others_map(meeting, deadline, arena)
    except BaseException as error:
        if arena is not None:
            arena.close()
        with contextlib.suppress(PeerError):  # nobody is left to be told
            meeting.announce("mapped", json.dumps({"error": str(error) or type(error).__name__}))
        raise
    for rank, each in enumerate(told):  # what this rank has told stays: the others look for whose fault it is
        if "error" in each:
            arena.close()
            raise CommunicationError(
                f"rank {meeting.rank}: rank {rank} could not map the shared memory: {each['error']}"
            )
    arena.learn(told)
    return arena


def _see_others_map(meeting: Meeting, deadline: float, arena: Arena) -> list[dict[str, Any]]:
    """Whether all have mapped ``arena``, and how, by rank."""
    meeting.announce("mapped", json.dumps(arena.whereabouts()))

    def late(names: str) -> Exception:
        return RendezvousError(f"rank {meeting.rank}: {names} did not map the shared memory before the deadline.")

    meeting.await_ranks(range(meeting.world_size), "mapped", deadline - time.monotonic(), late=late)
    return [json.loads(text) for text in meeting.read_all("mapped")]


def choose_buffer_bytes(size: int) -> int:
    """Of each buffer, in a group of ``size`` ranks."""
    if size <= 2:
        return _BUFFER_BYTES_OF_TWO
    most = _MOST_BUFFERS_BYTES // (NUM_BUFFERS * size)
    return max(_SMALLEST_BUFFER_BYTES, min(_BUFFER_BYTES, 1 << (most.bit_length() - 1)))


def _check_one_host(meeting: Meeting) -> None:
    """Raise on all ranks alike if some could not share memory with the first."""
    first = meeting.peers[0]
    for rank, peer in enumerate(meeting.peers):
        if peer.node != first.node:
            raise CommunicationError(
                f"rank {rank} runs on another host ({peer.node}) than rank 0 ({first.node}): there is no memory that "
                "they could share. Use the backend 'hier', which talks over the network between hosts."
            )
        if peer.pid_namespace != first.pid_namespace:
            raise CommunicationError(
                f"rank {rank} and rank 0 are in different containers (pid namespaces), which hide their memory from "
                "each other. Start both in one container, or use the backend 'gloo'."
            )


def _make(meeting: Meeting, buffer_bytes: int) -> Arena:
    """On the first rank: make the file, map it, and say where it is; or say why not."""
    size = meeting.world_size
    token = secrets.token_hex(TOKEN_BYTES // 2)
    fd = -1
    try:
        fd = os.memfd_create("paceline", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        heap_bytes = pages(psutil.virtual_memory().total)
        while True:
            layout = Layout(size, buffer_bytes, buffer_bytes // NUM_MESSAGE_SLOTS, heap_bytes)
            os.ftruncate(fd, size * layout.part_bytes)
            try:
                for rank in range(size):
                    os.posix_fallocate(fd, layout.start(rank), layout.messages)
            except OSError as error:
                if buffer_bytes <= _SMALLEST_BUFFER_BYTES:
                    raise CommunicationError(shortage(size * layout.messages, error)) from None
                buffer_bytes //= 2
                os.ftruncate(fd, 0)
                continue
            try:
                arena = Arena(layout, fd, meeting.peers)
                break
            except OSError as error:
                if heap_bytes <= _SMALLEST_HEAP_BYTES or is_for_descriptors(error):
                    raise _cannot_map(meeting.rank, layout, error) from None
                heap_bytes //= 4
        make_bells(arena.memory, [layout.signals(rank) for rank in range(size)])
        arena.memory[: len(token)] = token.encode()
    except BaseException as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, OSError):
            error = system_refuses(meeting.rank, "make the shared memory", error)
        meeting.announce("arena", json.dumps({"error": str(error) or type(error).__name__}))
        raise error from None
    where = {"layout": asdict(layout), "path": f"/proc/{os.getpid()}/fd/{fd}", "token": token}
    meeting.announce("arena", json.dumps(where))
    return arena


def _find(meeting: Meeting, deadline: float) -> Arena:
    """On the others: map what the first rank has made."""

    def late(name: str) -> Exception:
        return RendezvousError(f"rank {meeting.rank}: {name} did not make the shared memory before the deadline.")

    meeting.await_ranks([0], "arena", deadline - time.monotonic(), late=late)
    told = json.loads(meeting.read("arena", 0))
    if "error" in told:
        raise CommunicationError(f"rank {meeting.rank}: rank 0 could not make the shared memory: {told['error']}")
    layout = Layout(**told["layout"])
    try:
        fd = os.open(told["path"], os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        hint = "Run all ranks as one user in one container, or use the backend 'gloo'."
        raise system_refuses(meeting.rank, f"open the memory that rank 0 shares, {told['path']}", error, hint) from None
    try:
        arena = Arena(layout, fd, meeting.peers)
    except OSError as error:
        os.close(fd)
        raise _cannot_map(meeting.rank, layout, error) from None
    if bytes(arena.memory[:TOKEN_BYTES]) != told["token"].encode():
        os.close(fd)
        raise CommunicationError(f"rank {meeting.rank}: {told['path']} is not the memory that rank 0 has made.")
    return arena


def _cannot_map(rank: int, layout: Layout, error: OSError) -> CommunicationError:
    mib = layout.size * layout.part_bytes >> 20
    hint = "Is it limited by `ulimit -v`? Raise the limit."
    return system_refuses(rank, f"map {mib} MiB of address space", error, hint)


def myself() -> Peer:
    """This process, as the others of a group are told of it."""
    try:
        placement = read_placement(os.environ)
    except EnvironmentVariableError:
        placement = Placement()
    return Peer.myself(placement)
