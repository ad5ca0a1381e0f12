"""What can be wrong with a call by itself, whatever the other ranks do, and what its options say.

The invariant: it is said before the call is submitted, so on the other ranks nothing has begun.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def root_of(opts: Any, size: int) -> int:
    """The root that c10d's ``opts`` name, in a group of ``size`` ranks."""
    root = int(opts.rootRank)
    if not 0 <= root < size:
        raise ValueError(f"the root is rank {root} of the group, which has {size} ranks, from 0.")
    return root


def check_peer(what: str, peer: int, rank: int, size: int) -> None:
    """Raise unless ``peer`` is another rank of the group than ``rank``."""
    if not 0 <= peer < size or peer == rank:
        raise ValueError(
            f"{what}: rank {peer} of the group is {'this rank itself' if peer == rank else 'not one of its'}; name "
            f"another of its ranks, 0 to {size - 1}."
        )


def check_dtype(what: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise ValueError(f"{what}: tensors of {tensor.dtype} and {other.dtype} in one call; use one dtype.")


def check_numel(what: str, tensor: Tensor, numel: int) -> None:
    if tensor.numel() != numel:
        raise ValueError(f"{what} has {tensor.numel()} elements; expected {numel}.")


def spelled_list(lists: Sequence[Sequence[Tensor]]) -> str:
    """What all ranks must have alike of several collectives in one call, each of a list by rank; none for one alone."""
    if len(lists) == 1:
        return ""
    each = [f"{spelled_sizes(tensors) or tensors[0].numel()} {tensors[0].dtype}" for tensors in lists]
    return f"{len(lists)} at once: {', '.join(each)}".replace("torch.", "")


def spelled_sizes(tensors: Sequence[Tensor]) -> str:
    """The sizes of ``tensors``; empty where all are the same."""
    numels = [tensor.numel() for tensor in tensors]
    return "" if numels.count(numels[0]) == len(numels) else f"sizes {', '.join(map(str, numels))}"


def check_list(what: str, tensors: Sequence[Tensor], other: Tensor, size: int) -> None:
    """Raise unless there is a tensor for each of ``size`` ranks, of the dtype that ``other`` has."""
    if len(tensors) != size:
        raise ValueError(f"{what}: a list of {len(tensors)} tensors, but the group has {size} ranks.")
    for tensor in tensors:
        check_dtype(what, tensor, other)


def list_of_root(
    what: str, lists: Sequence[Sequence[Tensor]], other: Tensor, *, root: int, rank: int, size: int
) -> Sequence[Tensor]:
    """The root's list, checked; empty on the other ranks, which must not pass any."""
    if rank != root:
        if any(lists):
            raise ValueError(f"{what}: only the root passes a list; this rank is {rank}, not {root}.")
        return ()
    if len(lists) != 1:
        raise ValueError(f"{what}: the root must pass a list of {size} tensors.")
    check_list(what, lists[0], other, size)
    return lists[0]


def splits_of(what: str, tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Elements for each of ``size`` ranks, from a list of rows; equal ones where it is empty."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(
                f"all_to_all_single: the {what} has {rows} rows, which cannot be split equally among {size} ranks. "
                f"Pass {what}_split_sizes."
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"all_to_all_single: {what}_split_sizes {list(splits)} must have {size} entries and add up to the {rows} "
            f"rows of the {what}."
        )
    row_numel = tensor.numel() // rows if rows else 0
    return [split * row_numel for split in splits]
