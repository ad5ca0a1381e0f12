"""The backend ``mpi``: collectives among the ranks that an MPI launcher has started, over mpi4py and any MPI library.

``groups`` makes the process groups and ends them; ``transport`` is what each of them stands on: its collectives begin
in ``meetings``, its messages are ``letters``, who leaves says so in ``notices``, and all that goes over one ``wire``.

Nothing is imported here: ``library`` starts MPI, so what needs it is imported when a group is made.

The invariant: on a mismatch all ranks raise, none has written to a result, and the group goes on. A rank that leaves
says so, and how many collectives it has finished, so nobody waits for it in one that it has not.
"""

__all__: list[str] = []
