"""Which rank of how many this process is, for whoever deals out samples.

The invariant: a process that was taken for the only one, since no group was initialised yet, gives nothing out once it
turns out to be one of several.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from paceline.errors import DataError


@dataclass(frozen=True)
class Place:
    """A rank among replicas; ``is_assumed`` if that was neither given nor told by a group."""

    rank: int
    num_replicas: int
    is_assumed: bool = False

    def check(self, owner: str) -> None:
        """Look again, before samples are given out by this place.

        Args:
            owner: who was made with it, for errors.
        Raises:
            DataError: the process was taken for the only one, and a group of several has been initialised since.
        """
        group = _default_group()
        if self.is_assumed and group is not None and group[0] > 1:
            raise DataError(
                f"this {owner} was made before torch.distributed was initialised and took its process for the only "
                f"one, but the process is rank {group[1]} of {group[0]}: every rank would see the whole dataset. "
                "Make samplers and loaders after the process group, or give num_replicas and rank."
            )


def find_place(num_replicas: int | None, rank: int | None) -> Place:
    """What was not given comes from torch.distributed's default group.

    Raises:
        DataError: they do not fit together.
    """
    group = _default_group()
    world_size, world_rank = group or (1, 0)
    replicas = world_size if num_replicas is None else as_integer("num_replicas", num_replicas)
    if replicas < 1:
        raise DataError(f"num_replicas should be 1 or more, got {replicas}")
    if rank is None and replicas != world_size:
        raise DataError(
            f"num_replicas={replicas} came without a rank, and the rank can't be told from a world of {world_size}. "
            "Give both, or neither."
        )
    own = world_rank if rank is None else as_integer("rank", rank)
    if not 0 <= own < replicas:
        raise DataError(f"rank should be from 0 to {replicas - 1}, since num_replicas is {replicas}; got {own}")
    return Place(own, replicas, is_assumed=group is None and (num_replicas is None or rank is None))


def current_rank() -> int:
    """This process's rank in torch.distributed's default group; 0 where none is initialised."""
    group = _default_group()
    return 0 if group is None else group[1]


def _default_group() -> tuple[int, int] | None:
    """World size and rank in the default group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return None


def as_integer(name: str, value: Any) -> int:
    """The value of whatever stands for an integer, NumPy's and torch's among them.

    Raises:
        DataError: it stands for none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise DataError(f"{name} should be an integer, got {value!r} of type {type(value).__name__}") from None
