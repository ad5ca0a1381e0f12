"""``init``: joining a job, however its ranks find each other.

The invariant: where joining fails, nothing is left behind, and the other ranks are told why.
"""

import contextlib
import dataclasses
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.devices import check_backend, check_device
from paceline.environment import Placement, read_placement
from paceline.errors import EnvironmentVariableError, WorldError
from paceline.rendezvous import Meeting, Method, Peer, meet, parse_method
from paceline.rendezvous.forks import forget_group_of_parent
from paceline.rendezvous.peers import host_identity
from paceline.rendezvous.stores import connect, serve
from paceline.world import leaving
from paceline.world.placing import placed, world_of
from paceline.world.timeouts import seconds_of
from paceline.world.world import World

_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's


def init(
    backend: str = "auto",
    init_method: str | None = None,
    *,
    world_size: int | None = None,
    rank: int | None = None,
    timeout: float | timedelta | None = None,
    device: str | torch.device = "auto",
) -> World:
    """Join the job that the environment describes, or make a world of one where it describes none.

    Understood are torchrun's variables (``paceline run`` sets the same), Slurm's and MPI's. Where torch.distributed has
    been initialised already, its default group is taken over, on all ranks; ``shutdown`` then leaves that group to
    whoever made it. Called again, this returns the world that exists.

    Args:
        backend: ``auto`` is nccl (with gloo for CPU tensors) where the device is a GPU; else shm where all ranks are
            on one host, and hier across hosts. Or any name that ``torch.distributed.init_process_group`` takes; mpi
            too, where ``paceline[mpi]`` is installed.
        init_method: ``env://`` (the default), ``tcp://HOST:PORT`` or ``file:///PATH``.
        world_size, rank: where the environment does not say, or against what it says.
        timeout: seconds or a timedelta, for joining and for every collective later; torch's 30 minutes by default.
        device: ``auto`` is ``cuda:local_rank`` where there is CUDA, else ``cpu``.
    Returns:
        The world, which ``shutdown`` ends.
    Raises:
        EnvironmentVariableError: a launcher's variables are incomplete or contradict each other.
        RendezvousError: not all ranks came before the deadline.
        PeerError: a rank came, and died before all had.
        WorldError: arguments that cannot be honoured here, or given to a world that exists already.
    """
    timeout_s = seconds_of(_DEFAULT_TIMEOUT if timeout is None else timeout)
    _drop_what_is_not_ours()
    current = leaving.current()
    if dist.is_initialized():
        given = (backend, init_method, world_size, rank) != ("auto", None, None, None)
        if given or (current is not None and (timeout is not None or device != "auto")):
            raise WorldError(
                "init() was given arguments, but this process has joined a job already. Call shutdown() (or, for a "
                "group that torch has made, destroy_process_group()) first."
            )
        return current or _adopt(timeout_s, device)
    method = parse_method(init_method)
    placement = placed(method, world_size, rank)
    backend = check_backend(backend)
    check_device(device)
    if backend == "mpi":
        return _init_by_mpi(placement, method, timeout_s, device)
    meeting = meet(placement, method, timeout_s)
    hook = sys.excepthook
    try:
        world = world_of(placement, meeting, timeout_s, backend, device)
        dist.init_process_group(
            world.backend,
            store=dist.PrefixStore("group", meeting.store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=world.device if world.device.type == "cuda" and "nccl" in world.backend else None,
        )
    except BaseException as error:
        meeting.part(wait=False, last_words=leaving.last_words_of(error))
        meeting.dismiss()
        raise
    return leaving.enter(dataclasses.replace(world, _group=dist.GroupMember.WORLD, _hooks=(hook, sys.excepthook)))


def _init_by_mpi(placement: Placement, method: Method, timeout_s: float, device: str | torch.device) -> World:
    """MPI knows its ranks by itself, and they meet over it."""
    if not method.is_env:
        raise WorldError(f"init_method={method.text!r}: over MPI, ranks find each other by themselves. Leave it out.")
    hook = sys.excepthook
    dist.init_process_group("mpi", timeout=timedelta(seconds=timeout_s))
    try:
        of_mpi = (dist.get_rank(), dist.get_world_size())
        is_told = (placement.launcher, placement.rank, placement.world_size) != ("none", 0, 1)
        if is_told and of_mpi != (placement.rank, placement.world_size):
            raise WorldError(
                f"rank={placement.rank}, world_size={placement.world_size}: to MPI, this is rank {of_mpi[0]} of "
                f"{of_mpi[1]}. Leave both out; MPI's launcher sets them, as in `mpirun -n 4 python script.py`."
            )
        world = _adopt(timeout_s, device)
    except BaseException:
        dist.destroy_process_group()
        raise
    return leaving.enter(dataclasses.replace(world, _hooks=(hook, sys.excepthook)))


def _drop_what_is_not_ours() -> None:
    """Forget a world whose group was destroyed without ``shutdown``, and what a forked child has from its parent."""
    forget_group_of_parent()
    current = leaving.current()
    if current is not None and current._group is not dist.GroupMember.WORLD:
        leaving.end(wait=False)


def _adopt(timeout_s: float, device: str | torch.device) -> World:
    """A world around the default group that torch.distributed was given by somebody else."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    placement = Placement(rank, world_size)
    with contextlib.suppress(EnvironmentVariableError):  # whoever made the group did without
        told = read_placement(os.environ)
        if (told.rank, told.world_size) == (rank, world_size):
            placement = told
    store = _store_over_mpi(timeout_s) if dist.get_backend() == "mpi" else dist.distributed_c10d._get_default_store()
    # The store may have served an earlier adoption, whose barriers must not count.
    number = store.add(f"paceline/adoptions/{rank}", 1)
    meeting = Meeting(rank, world_size, dist.PrefixStore(f"paceline/{number}", store))
    meeting.join(Peer.myself(placement))
    meeting.await_all(time.monotonic() + timeout_s)
    world = world_of(placement, meeting, timeout_s, dist.get_backend(), device)
    return leaving.enter(dataclasses.replace(world, _group=dist.GroupMember.WORLD))


def _store_over_mpi(timeout_s: float) -> dist.Store:
    """c10d gives MPI's groups a store that holds nothing. So rank 0 serves one, whose address goes over MPI."""
    deadline = time.monotonic() + timeout_s
    rank = dist.get_rank()
    store: dist.Store = serve(None, deadline) if rank == 0 else dist.HashStore()
    told: list[Any] = [(host_identity(), socket.gethostname(), getattr(store, "port", 0))]
    dist.broadcast_object_list(told, src=0)
    host, name, port = told[0]
    if rank != 0:
        store = connect(("127.0.0.1" if host == host_identity() else name, port), rank, deadline)
    # Groups of other backends that are made later meet in it too.
    c10d = dist.distributed_c10d
    c10d._world.pg_map[c10d._get_default_group()] = ("mpi", dist.PrefixStore("group", store))
    return store
