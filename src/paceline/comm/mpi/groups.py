"""How groups over MPI come to be, and how they and MPI end.

Importing this starts MPI, if nobody has.

The invariant: no rank waits without end for those that do not come to make a group, nor at exit for one that has
failed: that one tells the others why, and then ends them.
"""

import atexit
import contextlib
import os
import pathlib
import sys
import threading
import time
import traceback
import weakref
from typing import Any

import torch.distributed as dist

from paceline.comm.engine import Engine
from paceline.comm.group import CollectiveGroup
from paceline.comm.group.companion import make_companion
from paceline.comm.mpi.leaving import see_off, see_off_until
from paceline.comm.mpi.library import MPI
from paceline.comm.mpi.transport import Mpi
from paceline.environment import read_placement
from paceline.errors import CommunicationError

_LEAVING_S = 10.0  # for the other ranks to leave too, before MPI is ended
_LAST_WORDS_S = 2.0  # for them to tell why this rank failed, before it ends them

_pid = os.getpid()
_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()
_connecting: list[threading.Thread] = []  # that have taken too long


def make_mpi(options: Any) -> CollectiveGroup:
    """What c10d calls for ``backend="mpi"``. A collective call of the group's ranks.

    Args:
        options: as of c10d's ``DistributedBackendOptions``; for the group of all ranks, ``global_ranks_in_group`` is
            empty.
    Raises:
        CommunicationError: this process is another rank to its launcher than to MPI, MPI cannot be used by several
            threads, or not all ranks came in time.
    """
    atexit.unregister(_end)  # last registered, it is the first to run: before what it needs is gone
    atexit.register(_end)
    _check_process()
    _check_rank()
    see_off()
    ranks, timeout_s = list(options.global_ranks_in_group), options.timeout.total_seconds()
    comm, num_local = _connect_within(timeout_s, ranks)
    ranks = ranks or list(range(comm.Get_size()))
    group = CollectiveGroup(Mpi(comm, ranks, num_local), ranks, timeout_s, make_companion(options))
    _engines.add(group.engine)
    return group


def _check_process() -> None:
    if os.getpid() != _pid:
        raise CommunicationError(
            "this process was forked from one that uses MPI, and cannot use it itself. Make groups in the ranks only."
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise CommunicationError(
            "MPI was started for fewer threads than the backend 'mpi' needs, MPI_THREAD_MULTIPLE. Leave mpi4py.rc as "
            "it is, or use an MPI library that was built with threads."
        )


def _check_rank() -> None:
    """c10d's ranks, or those that a launcher has set, must be MPI's."""
    mpis = (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
    if dist.is_initialized():
        told, teller = (dist.get_rank(), dist.get_world_size()), "in the default group"
    else:
        placement = read_placement(os.environ)
        told, teller = (placement.rank, placement.world_size), f"by its environment ({placement.launcher})"
        if placement.launcher == "none":
            told = mpis
    if told != mpis:
        raise CommunicationError(
            f"this process is rank {told[0]} of {told[1]} {teller}, but rank {mpis[0]} of {mpis[1]} to MPI. Start the "
            "job with MPI's own launcher and no other, as in `mpirun -n 4 python script.py`."
        )


def _connect_within(timeout_s: float, ranks: list[int]) -> tuple[MPI.Intracomm, int]:
    """``_connect``, in a thread that is left to itself if it takes too long: what it calls waits without end."""
    outcome: list[tuple[MPI.Intracomm, int]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(_connect(ranks))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="paceline mpi", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not outcome:
        _connecting.append(thread)
        members = f"ranks {', '.join(map(str, ranks))}" if ranks else "all ranks"
        raise CommunicationError(
            f"rank {MPI.COMM_WORLD.Get_rank()}: not all ranks came to make the group of {members} within "
            f"{timeout_s:g} s. All must call init_process_group and new_group alike."
        )
    return outcome[0]


def _connect(ranks: list[int]) -> tuple[MPI.Intracomm, int]:
    """A communicator of these ranks alone, and how many of them are on this host."""
    world = MPI.COMM_WORLD
    if ranks:
        everyone = world.Get_group()
        members = everyone.Incl(ranks)
        comm = world.Create_group(members)
        members.Free()
        everyone.Free()
    else:
        comm = world.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    num_local = local.Get_size()
    local.Free()
    return comm, num_local


def _end() -> None:
    """At exit, before mpi4py ends MPI: that waits for all ranks, so a rank that has failed must end them instead."""
    if os.getpid() != _pid or MPI.Is_finalized():
        return
    error = getattr(sys, "last_value", None)  # set once an exception has ended the script
    if error is not None or any(thread.is_alive() for thread in _connecting):
        MPI._set_abort_status(1)  # as `python -m mpi4py` does: at the end, MPI_Abort in the place of MPI_Finalize
    _remove_leftovers()
    deadline = time.monotonic() + (_LEAVING_S if error is None else _LAST_WORDS_S)
    with contextlib.suppress(MPI.Exception):
        for engine in list(_engines):
            engine.depart("".join(traceback.format_exception(error)) if error is not None else "")
            engine.close()
        see_off_until(deadline)


def _remove_leftovers() -> None:
    """Open MPI 5 leaves a file in /dev/shm for each process that no launcher has started."""
    if MPI.COMM_WORLD.Get_size() == 1 and read_placement(os.environ).launcher == "none":
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
            if "/dev/shm/sm_segment." in line:
                pathlib.Path(line.split()[-1]).unlink(missing_ok=True)
