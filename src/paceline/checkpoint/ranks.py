"""How the ranks of a checkpoint act together: one does the work, and all know how it went.

The invariant: all ranks of a group make the same calls in the same order, and an error of the rank that works is raised
on all of them, so that nobody waits for what will not come.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from paceline.checkpoint.packing import Packed, bytes_of
from paceline.errors import CheckpointDamagedError, CheckpointError, CheckpointMissingError

T = TypeVar("T")

_WINDOW_BYTES = 32 << 20
_KINDS = {kind.__name__: kind for kind in (CheckpointError, CheckpointDamagedError, CheckpointMissingError)}


class Ranks(Protocol):
    """Those who save or load together, of which a process alone is the smallest case.

    Attributes:
        rank: of this process among them, from 0; the first one works.
        group: their process group; None for the default one, or where there is none.
    """

    rank: int
    world_size: int
    group: dist.ProcessGroup | None

    def all(self, value: Any) -> list[Any]:
        """The picklable value that each rank gave, by rank."""

    def told(self, value: Any) -> Any:
        """The picklable value that the first rank gave."""

    def broadcast(self, packed: Packed | None) -> Packed:
        """What the first rank has packed; the others give None."""


class Alone:
    """One process, which waits for no other."""

    rank = 0
    world_size = 1
    group: dist.ProcessGroup | None = None

    def all(self, value: Any) -> list[Any]:
        return [value]

    def told(self, value: Any) -> Any:
        return value

    def broadcast(self, packed: Packed | None) -> Packed:
        assert packed is not None
        return packed


class Group:
    """Several processes, which may be any backend's."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if dist.get_rank(group) < 0:
            raise CheckpointError(
                f"rank {dist.get_rank()} is not in the group that it was to save or load with; call on members only."
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._device = _payload_device(dist.get_backend(group))

    def all(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def told(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def broadcast(self, packed: Packed | None) -> Packed:
        told = None if packed is None else (packed.skeleton, [storage.nbytes() for storage in packed.storages])
        skeleton, sizes = self.told(told)
        storages = (
            [torch.empty(size, dtype=torch.uint8).untyped_storage() for size in sizes]
            if packed is None
            else packed.storages
        )
        for window in windows(sizes, _WINDOW_BYTES):
            parts = [bytes_of(storages[number])[start:stop] for number, start, stop in window]
            if len(parts) == 1 and parts[0].device == self._device:
                dist.broadcast(parts[0], group=self.group, group_src=0)
                continue
            staged = torch.cat([part.to(self._device) for part in parts])
            dist.broadcast(staged, group=self.group, group_src=0)
            if packed is None:
                for part, new in zip(parts, torch.split(staged, [len(part) for part in parts]), strict=True):
                    part.copy_(new)
        return Packed(skeleton, storages)


def ranks_of(group: dist.ProcessGroup | None, *, alone: bool) -> Ranks:
    """Those of a group; without one, of the default group; this process alone, where asked for or where none is there.

    Raises:
        CheckpointError: this process is not in ``group``; or both are given.
    """
    if alone and group is not None:
        raise CheckpointError("alone=True came with a group: this rank acts by itself, or with a group's. Give one.")
    if alone or not (dist.is_available() and dist.is_initialized()):
        return Alone()
    return Group(group)


def beside_of(ranks: Ranks) -> Ranks:
    """The same ranks, with a way to talk that a thread may have to itself. A collective call."""
    if ranks.world_size == 1:
        return Alone()
    members = dist.get_process_group_ranks(ranks.group or dist.distributed_c10d._get_default_group())
    return Group(dist.new_group(members, backend="gloo", use_local_synchronization=True))


def on_first(ranks: Ranks, work: Callable[[], T], *, tell: bool = True) -> T | None:
    """Let the first rank do something, while the others wait for it.

    Args:
        tell: the result, which then must be picklable, to the others; they get None otherwise.
    Returns:
        What ``work`` returned.
    Raises:
        CheckpointError: on all ranks, if the first one's work raised it; other errors are raised there as they are, and
            told to the others in a CheckpointError.
    """
    if ranks.rank != 0:
        kind, message, result = ranks.told(None)
        if kind is None:
            return result  # type: ignore[no-any-return]
        raise _KINDS[kind](message)
    try:
        result = work()
    except CheckpointError as error:
        ranks.told((type(error).__name__, str(error), None))
        raise
    except Exception:
        ranks.told(("CheckpointError", f"the first rank failed:\n{traceback.format_exc()}", None))
        raise
    ranks.told((None, "", result if tell else None))
    return result


def on_all(ranks: Ranks, work: Callable[[], T]) -> T:
    """Let each rank do its part, while it waits for the others.

    Returns:
        What ``work`` returned on this rank.
    Raises:
        CheckpointError: on all ranks, if it was raised on any; other errors are raised where they came up as they are.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    told = None
    if failure is not None:
        is_ours = isinstance(failure, CheckpointError)
        told = (type(failure).__name__, str(failure)) if is_ours else ("CheckpointError", _explained(ranks, failure))
    answers = [answer for answer in ranks.all(told) if answer is not None]
    if failure is not None:
        raise failure
    if answers:
        kind, message = answers[0]
        raise _KINDS[kind](message)
    return result


def _explained(ranks: Ranks, failure: Exception) -> str:
    return f"rank {ranks.rank} failed:\n{''.join(traceback.format_exception(failure))}"


def windows(sizes: Sequence[int], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut pieces of memory, laid end to end, into windows of ``limit`` bytes.

    Yields:
        For each window its parts: the number of a piece, and where the part starts and stops within it.
    """
    window: list[tuple[int, int, int]] = []
    room = limit
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            window.append((number, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield window
                window, room = [], limit
    if window:
        yield window


def _payload_device(backend: str) -> torch.device:
    """The CPU, unless the backend carries only tensors of some other kind, as nccl does."""
    kinds = dist.Backend.backend_capability.get(backend, ["cpu"])
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
