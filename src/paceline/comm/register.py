"""Making the backends known to c10d, once paceline and torch are both there, in whichever order they were imported.

torch calls ``register`` itself when it is imported, through the entry point ``torch.backends`` of the installed
package; ``import paceline`` does where torch had been imported before.

The invariant: this costs no import of more than torch.distributed; what makes a group is imported when one is made.
"""

import importlib.util
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from paceline.environment import read_placement
from paceline.errors import EnvironmentVariableError


def register() -> None:
    """Let ``torch.distributed`` know ``shm`` and its kin. Twice does no harm."""
    if not dist.is_available() or "shm" in dist.Backend.backend_list:
        return
    if sys.platform == "linux":  # which has files without names, and semaphores that processes can share
        dist.Backend.register_backend("shm", _make_shm, extended_api=True, devices=["cpu"])
        dist.Backend.register_backend("hier", _make_hier, extended_api=True, devices=["cpu"])
    if not dist.is_mpi_available() and importlib.util.find_spec("mpi4py") is not None:
        _stand_in_for_mpi()


def _make_shm(options: Any, _: object) -> dist.ProcessGroup:
    from paceline.comm.make import make_shm

    return make_shm(options)


def _make_hier(options: Any, _: object) -> dist.ProcessGroup:
    from paceline.comm.make_hier import make_hier

    return make_hier(options)


def _stand_in_for_mpi() -> None:
    """Give this torch, which was built without MPI, what it would have had.

    Programs that take MPI wherever torch has it, such as Accelerate, must not do so under other launchers. So they are
    told that it is there only under MPI's, while whoever names it gets it anywhere.
    """
    c10d: Any = dist.distributed_c10d
    c10d.ProcessGroupMPI = _ProcessGroupMPI
    c10d._MPI_AVAILABLE = _is_started_by_mpi()
    c10d.is_mpi_available = lambda: True  # what c10d itself asks; torch.distributed has kept the original


def _is_started_by_mpi() -> bool:
    try:
        return read_placement(os.environ).launcher in ("open mpi", "mpich")
    except EnvironmentVariableError:
        return False


class _ProcessGroupMPI:
    """As torch's own."""

    @staticmethod
    def create(ranks: list[int]) -> dist.ProcessGroup:
        """What c10d calls for ``backend="mpi"``."""
        from paceline.comm.mpi.groups import make_mpi

        # c10d passes the ranks alone; what it passes other backends is in its local variables.
        told = sys._getframe(1).f_locals
        options = SimpleNamespace(
            global_ranks_in_group=ranks,
            timeout=told.get("timeout") or dist.distributed_c10d.default_pg_timeout,
            store=told.get("backend_prefix_store"),
            group_rank=told.get("group_rank", -1),
            group_size=told.get("group_size", -1),
        )
        return make_mpi(options)
