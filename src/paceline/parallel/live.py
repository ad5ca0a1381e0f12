"""Which ranks of a process group still have data, for whatever exchanges messages within a forward.

Under ``join`` a rank that has run out of data takes part in the reducer's messages, and in nothing else. So what talks
between ranks during a forward, such as SyncBatchNorm, asks here for the group of those that are still there.

The invariant: what is answered depends on what the ranks have agreed on in the last roll call, and on nothing else.
So live ranks that ask alike get the same group, and make it together where it is new.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from paceline.errors import CommunicationError
from paceline.parallel.groups import cpu_backend_of, timeout_of


@dataclass(frozen=True)
class _Roll:
    """What a roll call has found.

    Attributes:
        everyone: the global ranks of the group.
        live: those that still have data.
    """

    everyone: frozenset[int]
    live: frozenset[int]
    divides_by_initial: bool


_rolls: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Roll]" = weakref.WeakKeyDictionary()
# Groups of live ranks, by the group they belong to and their global ranks.
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]" = (
    weakref.WeakKeyDictionary()
)


def live_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks of ``group`` that still have data: ``group`` itself, unless some have run out under ``join``.

    The ranks of a smaller group follow the roll call of a larger one that holds them all. A collective call of the live
    ranks where they have become other ones: they make a group of the same backend and timeout, once for each set.

    Args:
        group: None for the default group.
    Returns:
        None where there is no process group at all.
    Raises:
        CommunicationError: this rank has run out of data itself.
    """
    if group is None:
        if not dist.is_initialized():
            return None
        group = dist.distributed_c10d._get_default_group()
    if not _rolls:
        return group
    live = _live_ranks(group)
    if live is None or len(live) == dist.get_world_size(group):
        return group
    if dist.get_rank() not in live:
        raise CommunicationError(
            f"rank {dist.get_rank()}: it has run out of data while ranks {', '.join(map(str, live))} train on, so it "
            "has no part in what they exchange. Under join, call SyncBatchNorm, global_mean and their like within the "
            "loop over batches only."
        )
    made = _made.setdefault(group, {})
    if live not in made:
        backend = dist.get_backend(group)
        made[live] = dist.new_group(
            list(live),
            timeout=timeout_of(group),
            backend=cpu_backend_of(group) if backend == dist.Backend.MPI else backend,
            use_local_synchronization=True,
        )
    return made[live]


def divisor_of(group: dist.ProcessGroup | None) -> int:
    """By how many ``DistributedDataParallel`` over ``group`` divides the sum of the ranks' gradients.

    That is the number of live ranks, unless ``join`` was told to divide by the number of all.

    Args:
        group: None for the default group; without a process group the answer is 1.
    """
    if group is None:
        if not dist.is_initialized():
            return 1
        group = dist.distributed_c10d._get_default_group()
    live = _live_ranks(group) if _rolls else None
    if live is None or any(roll.divides_by_initial for roll in _rolls_of(group)):
        return dist.get_world_size(group)
    return len(live)


def declare_live(group: dist.ProcessGroup, ranks: Sequence[int], *, divides_by_initial: bool = False) -> None:
    """Let ``live_group`` and ``divisor_of`` answer for these ranks from now on. Alike on all ranks of ``group``.

    Args:
        ranks: the global ranks of ``group`` that still have data.
        divides_by_initial: whether gradients are divided by the number of all ranks.
    """
    everyone, live = frozenset(dist.get_process_group_ranks(group)), frozenset(ranks)
    assert live, "a roll call needs somebody who calls"
    assert live <= everyone, f"{sorted(live - everyone)} are not in the group"
    _rolls[group] = _Roll(everyone, live, divides_by_initial)


def forget_live(group: dist.ProcessGroup) -> None:
    """The join is over: all ranks count again. Groups made for it are kept for the next."""
    _rolls.pop(group, None)


def _rolls_of(group: object) -> list[_Roll]:
    """The roll calls in which all ranks of ``group`` took part."""
    if not isinstance(group, dist.ProcessGroup):  # what c10d gives to ranks outside a group that they helped to make
        return []
    ranks = frozenset(dist.get_process_group_ranks(group))
    return [roll for roll in _rolls.values() if roll.everyone >= ranks]


def _live_ranks(group: dist.ProcessGroup) -> tuple[int, ...] | None:
    """The global ranks of ``group`` that are live, in order; None where no roll call says anything about it."""
    rolls = _rolls_of(group)
    if not rolls:
        return None
    live = frozenset.intersection(*(roll.live for roll in rolls))
    return tuple(sorted(live.intersection(dist.get_process_group_ranks(group))))
