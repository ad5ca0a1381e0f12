"""Errors that say which rank, which parameter and which message, where c10d knows only sockets and bytes."""

from collections.abc import Sequence
from typing import NoReturn

import torch.distributed as dist

from paceline import world
from paceline.errors import PacelineError, ReductionError, ReplicaMismatchError
from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.replicas.agreement import all_gather_object


class Explained:
    """A block in which an error of c10d becomes one that says what was being averaged, and on which rank.

    Args:
        bucket: None where it is about all of them.
        names: of all parameters.
    """

    def __init__(self, bucket: Bucket | None, names: Sequence[str], world_size: int) -> None:
        self._bucket, self._names, self._world_size = bucket, names, world_size

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError):
            return
        what = "gradients"
        if self._bucket is not None:
            indices = self._bucket.indices
            first, last = self._names[indices[0]], self._names[indices[-1]]
            span = repr(first) if first == last else f"{first!r} to {last!r}, {len(indices)} parameters"
            what = f"bucket {self._bucket.number} ({span})"
        why = str(error).removeprefix(f"rank {dist.get_rank()}: ")
        if not isinstance(error, PacelineError):
            gone = "" if (here := world.current()) is None else here.who_is_gone()
            usual = "most often another rank has ended or is stuck; its output says why"
            why = f"{gone or usual}.\nThe backend reports: {error}"
        raise ReductionError(
            f"rank {dist.get_rank()}: {what} could not be averaged over {self._world_size} ranks: {why}"
        ) from error


def raise_if_some_failed(num_failed: int, group: dist.ProcessGroup) -> None:
    """Raise on every rank if they have seen unequal numbers of backwards fail. A collective call."""
    everyones = all_gather_object(num_failed, group)
    ranks = dist.get_process_group_ranks(group)
    if min(everyones) < max(everyones):
        failed = [str(rank) for rank, number in zip(ranks, everyones, strict=True) if number > min(everyones)]
        which = f"rank{'s' if len(failed) > 1 else ''} {', '.join(failed)}"
        raise ReductionError(
            f"rank {dist.get_rank()}: a backward raised an error on {which}, where it was caught, and not on the "
            "others. So the ranks average gradients of different steps. Skip a step on all ranks or on none; to go on "
            "from here, start from a checkpoint."
        )


def raise_if_hooks_differ(hook: str | None, group: dist.ProcessGroup) -> None:
    """Raise on every rank if their communication hooks have other names. A collective call."""
    hooks = all_gather_object(hook, group)
    ranks = dist.get_process_group_ranks(group)
    other = next((at for at, hook in enumerate(hooks) if hook != hooks[0]), None)
    if other is not None:
        told = [f"rank {ranks[at]} has {hooks[at]}" for at in (0, other)]
        raise ReplicaMismatchError(
            f"the ranks' communication hooks differ: {' and '.join(told)}. Call register_comm_hook alike on every rank."
        )


def raise_first_difference(
    names: Sequence[str], states: Sequence[tuple[bool, str]], group: dist.ProcessGroup
) -> NoReturn:
    """Raise on every rank, naming the first parameter that is frozen, or cast, on some ranks only. A collective call.

    Args:
        states: this rank's (requires_grad, dtype) of each parameter; known to differ between ranks.
    """
    everyones = all_gather_object(list(states), group)
    ranks = dist.get_process_group_ranks(group)
    for name, by_rank in zip(names, zip(*everyones, strict=True), strict=True):
        for what, values in zip(("requires_grad", "dtype"), zip(*by_rank, strict=True), strict=True):
            other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise ReplicaMismatchError(
                    f"{name!r} has {what}={values[0]} on rank {ranks[0]} and {values[other]} on rank {ranks[other]}. "
                    "Freeze, unfreeze and cast parameters on every rank alike."
                )
    raise ReplicaMismatchError("the ranks' parameters are on other devices; move the model alike on every rank.")
