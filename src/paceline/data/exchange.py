"""How ranks hand each other values and rows of bytes: through a process group, or, alone, not at all.

The invariant: all ranks make the same calls in the same order, and what each gets back is in order of rank.
"""

import pickle
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import DataError


class Ranks(Protocol):
    """The ranks that gather, of which a process alone is the smallest case."""

    names: Sequence[int]

    def all(self, value: Any) -> list[Any]:
        """The picklable value that each rank gave, in order of rank."""

    def rows(self, own: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Each rank's bytes, (counts[r], row_bytes), on a device of the group's choice."""

    def pack(self, objects: list[Any]) -> Any:
        """What to give to ``all`` in place of the objects."""

    def unpack(self, packed: Any) -> list[Any]:
        """The inverse of ``pack``; nothing becomes no objects."""


class Alone:
    """One process: everything comes back as it is, and nothing is pickled."""

    names: Sequence[int] = (0,)

    def all(self, value: Any) -> list[Any]:
        return [value]

    def rows(self, own: Tensor, counts: Sequence[int]) -> list[Tensor]:
        assert list(counts) == [len(own)]
        return [own]

    def pack(self, objects: list[Any]) -> Any:
        return objects

    def unpack(self, packed: Any) -> list[Any]:
        return packed or []


class Group:
    """Several processes, which may be any backend's."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        group = dist.group.WORLD if group is None else group
        if dist.get_rank(group) < 0:
            raise DataError(
                f"rank {dist.get_rank()} is not in the group that it was to gather with; call on members only"
            )
        self.names: Sequence[int] = dist.get_process_group_ranks(group)
        self._group = group
        self._device = _payload_device(dist.get_backend(group))

    def all(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * len(self.names)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def rows(self, own: Tensor, counts: Sequence[int]) -> list[Tensor]:
        row_bytes, most = own.shape[1], max(counts)
        if row_bytes * most == 0:
            return [own.new_empty((count, row_bytes)) for count in counts]
        # all_gather wants the same shape from all, so shorter ranks send some zeros that are cut off again.
        padded = torch.zeros((most, row_bytes), dtype=torch.uint8, device=self._device)
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self._group)
        return [part[:count] for part, count in zip(parts, counts, strict=True)]

    def pack(self, objects: list[Any]) -> Any:
        # Here and not inside all_gather_object, so that an object that can't be pickled is reported to all ranks.
        return pickle.dumps(objects)

    def unpack(self, packed: Any) -> list[Any]:
        return pickle.loads(packed) if packed else []


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """The ranks of a group; without one those of the default group, or this process alone where there is none.

    Raises:
        DataError: this process is not in ``group``.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Alone()
    return Group(group)


def _payload_device(backend: str) -> torch.device:
    """The CPU, unless the backend carries only tensors of some other kind, as nccl does."""
    kinds = dist.Backend.backend_capability.get(backend, ["cpu"])
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
