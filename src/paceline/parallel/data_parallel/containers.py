"""Containers that hold a batch, or what a model made of it: taken apart, and put together alike.

The invariant: a container's copy is of the same type, keeps whatever else it carries, and leaves the original alone.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any


def parts_of(item: object) -> list[tuple[Any, Any]] | None:
    """The parts of a list, tuple, named tuple, dict or dataclass, with their keys; None for anything else."""
    if isinstance(item, (dict, UserDict)):
        return list(item.items())
    if isinstance(item, (list, tuple)):
        return list(enumerate(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [(field.name, getattr(item, field.name)) for field in dataclasses.fields(item)]
    return None


def with_parts(item: Any, values: Sequence[Any]) -> Any:
    """A container like ``item`` that holds ``values``, in the order of ``parts_of``."""
    if isinstance(item, tuple):
        make: Callable[[Sequence[Any]], Any] = getattr(item, "_make", type(item))
        return make(values)
    made = copy.copy(item)
    if isinstance(item, list):
        made[:] = values
    elif isinstance(item, (dict, UserDict)):
        for key, value in zip(item, values, strict=True):
            made[key] = value
    else:
        for field, value in zip(dataclasses.fields(item), values, strict=True):
            object.__setattr__(made, field.name, value)  # also where it is frozen
    return made


def path_to(path: str, item: object, key: object) -> str:
    """How one would write the part of ``item`` at ``key``, for errors."""
    is_field = not isinstance(item, (dict, UserDict, list, tuple))
    return f"{path}.{key}" if is_field else f"{path}[{key!r}]"
