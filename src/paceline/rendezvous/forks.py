"""What a forked child has of its parent's job, and must neither use nor destroy.

The invariant: nothing here happens in a child that does not ask for it, such as a loader's worker, which may go on
reading its parent's rank.
"""

import ctypes
import os

import torch.distributed as dist

_group_of_parent: list[object] = []  # the default process group at the time of the fork


def make_immortal(value: object) -> None:
    """Never destroy ``value``: torch's destructors would wait for threads that only the parent has."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def forget_group_of_parent() -> None:
    """Make torch.distributed uninitialised, if what is initialised is the parent's."""
    group = dist.GroupMember.WORLD
    if group is None or group not in _group_of_parent:
        return
    c10d = dist.distributed_c10d
    state = c10d._world
    make_immortal(dict(state.pg_map))
    # What destroy_process_group does, less the shutdown of connections that are the parent's.
    c10d._update_default_pg(None)
    for of_groups in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(state, of_groups).clear()
    state.pg_coalesce_state.clear()
    c10d._unregister_all_process_groups()
    state.group_count = 0


def _note_group() -> None:
    _group_of_parent[:] = [] if dist.GroupMember.WORLD is None else [dist.GroupMember.WORLD]


os.register_at_fork(after_in_child=_note_group)
