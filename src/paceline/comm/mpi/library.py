"""MPI itself, as mpi4py has it, or an error that says how to get it. Importing this starts MPI, if nobody has.

The invariant: the whole package takes MPI from here, so whatever is imported first, what is missing is said alike.
"""

from paceline.errors import CommunicationError

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # mpi4py finds its library when it is imported
    raise CommunicationError(
        f"the backend 'mpi' needs mpi4py and an MPI library ({str(error).splitlines()[0]}). Install both with `pip "
        "install 'paceline[mpi]'`, or mpi4py alone where the system has an MPI of its own."
    ) from error

__all__ = ["MPI"]
