"""Do all ranks hold the same parameters? Compared by name, told by name.

The invariant: after ``agree`` returns, parameter number i has one name, shape, dtype and device on every rank; where it
raises, it raises on every rank, with the same first difference.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ReplicaMismatchError


@dataclass(frozen=True)
class Spec:
    """What the ranks must agree on about one parameter or buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    device: str
    stride: tuple[int, ...]  # the first rank's counts for all: only memory's order depends on it


def specs_of(tensors: Mapping[str, torch.Tensor]) -> list[Spec]:
    """Of a rank's parameters and buffers by name.

    Ranks have devices of their own, so a device is told by its type; and where a rank has several of a type, by which
    of them it is, counted as they come in the order of names.
    """
    numbers: dict[str, list[torch.device]] = {}
    for name in sorted(tensors):
        device = tensors[name].device
        if device not in (known := numbers.setdefault(device.type, [])):
            known.append(device)

    def device_of(tensor: torch.Tensor) -> str:
        kind = tensor.device.type
        known = numbers[kind]
        return kind if len(known) == 1 else f"{kind} {known.index(tensor.device) + 1} of {len(known)}"

    return [
        Spec(
            name,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor.requires_grad,
            device_of(tensor),
            tuple(tensor.stride()) if tensor.layout == torch.strided else (),
        )
        for name, tensor in tensors.items()
    ]


def agree(specs: Sequence[Spec], group: dist.ProcessGroup, extra: Any = None) -> tuple[list[Spec], list[Any]]:
    """Compare ``specs`` across the ranks of ``group``, and pass ``extra`` around.

    Returns:
        The first rank's specs, whose order counts for all ranks; and every rank's ``extra``.
    Raises:
        ReplicaMismatchError: on every rank, naming the first difference and both ranks.
    """
    digest = hashlib.blake2b(repr(specs).encode(), digest_size=16).digest()
    told = all_gather_object((digest, extra), group)
    extras = [theirs for _, theirs in told]
    if len({theirs for theirs, _ in told}) == 1:
        return list(specs), extras
    everyones = all_gather_object(list(specs), group)
    ranks = dist.get_process_group_ranks(group)
    for rank, theirs in zip(ranks[1:], everyones[1:], strict=True):
        difference = first_difference(everyones[0], theirs, f"rank {ranks[0]}", f"rank {rank}")
        if difference:
            raise ReplicaMismatchError(
                f"the ranks' models differ: {difference}. Build, freeze and replace parameters alike on every rank."
            )
    return everyones[0], extras


def first_difference(ours: Sequence[Spec], theirs: Sequence[Spec], us: str, them: str) -> str:
    """In words, how two ranks' specs differ, other than in order and strides; empty where they don't."""
    counts = f" ({len(ours)} against {len(theirs)} parameters and buffers)" if len(ours) != len(theirs) else ""
    by_name = {spec.name: spec for spec in theirs}
    for spec in ours:
        if spec.name not in by_name:
            return f"{us} has {spec.name!r}, of shape {spec.shape}, and {them} has not{counts}"
        other = by_name.pop(spec.name)
        for what, mine, its in (
            ("the shape", spec.shape, other.shape),
            ("the dtype", spec.dtype, other.dtype),
            ("requires_grad", spec.requires_grad, other.requires_grad),
            ("the device", spec.device, other.device),
        ):
            if mine != its:
                return f"{what} of {spec.name!r} is {mine} on {us} and {its} on {them}"
    for spec in by_name.values():
        return f"{them} has {spec.name!r}, of shape {spec.shape}, and {us} has not{counts}"
    return ""


def all_gather_object(item: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's ``item``, in the group's order of ranks."""
    items: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group=group)
    return items
