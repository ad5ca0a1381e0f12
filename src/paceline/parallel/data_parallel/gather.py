"""Putting together what the replicas returned.

The invariant: the result is of the same structure as each replica's, and nothing that differs between them is dropped.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel._functions import Gather

from paceline.errors import DataError
from paceline.parallel.data_parallel.containers import parts_of, path_to, with_parts
from paceline.parallel.data_parallel.devices import DeviceLike, as_device
from paceline.parallel.data_parallel.place import working_for


def gather(outputs: Any, target_device: DeviceLike, dim: int = 0) -> Any:
    """Join the outputs of replicas on one device; torch's function of that name.

    Tensors are concatenated along ``dim``; those without dimensions become a vector, one element for each replica.
    Containers, dataclasses too, are joined part by part. Anything else must be equal in all.

    Args:
        outputs: a sequence, one output for each replica, alike in structure.
        target_device: where the result lies; -1 and "cpu" are the CPU.
        dim: the dimension of the batch.
    Raises:
        DataError: outputs of different structure, or objects that differ and cannot be joined.
    """
    return _join(list(outputs), as_device(target_device), dim, "output")


def _join(outputs: list[Any], device: torch.device, dim: int, path: str) -> Any:
    first = outputs[0]
    kinds = {type(output) for output in outputs}
    if all(isinstance(output, Tensor) for output in outputs):
        return _join_tensors(outputs, device, dim)
    if len(kinds) > 1:
        names = ", ".join(kind.__name__ for kind in dict.fromkeys(type(output) for output in outputs))
        raise DataError(f"{path}: replicas returned different types: {names}. Return the same from each.")
    taken_apart = [parts_of(output) for output in outputs]
    if taken_apart[0] is None:
        if all(_are_equal(first, output) for output in outputs[1:]):
            return first
        raise DataError(
            f"{path}: replicas returned objects of type {type(first).__name__} that differ, which cannot be joined. "
            "Return tensors, or containers of them."
        )
    by_key = [dict(parts or ()) for parts in taken_apart]
    if any(parts.keys() != by_key[0].keys() for parts in by_key):
        raise DataError(
            f"{path}: all dicts must have the same number of keys, and the same ones, and all lists the same length; "
            f"the replicas' have {', '.join(str(list(parts)) for parts in by_key)}."
        )
    joined = [_join([parts[key] for parts in by_key], device, dim, path_to(path, first, key)) for key in by_key[0]]
    return with_parts(first, joined)


def _join_tensors(tensors: list[Tensor], device: torch.device, dim: int) -> Tensor:
    if dim == 0 and all(tensor.dim() == 0 for tensor in tensors):
        tensors = [tensor.unsqueeze(0) for tensor in tensors]
    if len(tensors) == 1:
        return tensors[0].to(device)
    if all(tensor.device.type != "cpu" for tensor in tensors):
        joined: Tensor = Gather.apply("cpu" if device.type == "cpu" else device.index, dim, *tensors)  # type: ignore[no-untyped-call]
        return joined
    with working_for(0):
        return torch.cat([tensor.to(device) for tensor in tensors], dim)


def _are_equal(one: object, other: object) -> bool:
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:  # an object that cannot be compared, such as an array
        return False
