"""One field of many parameters at once.

The invariant: each function makes one pass, in C. Over many small parameters a loop in Python costs more than they do.
"""

import functools
import operator
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

_requires_grad_of, _grad_of, _layout_of = map(operator.attrgetter, ("requires_grad", "grad", "layout"))
_dtype_of, _shape_of, _device_of, _is_cpu = map(operator.attrgetter, ("dtype", "shape", "device", "is_cpu"))
_is_none = functools.partial(operator.is_, None)
_is_not_none = functools.partial(operator.is_not, None)


def grads_of(params: Sequence[Parameter]) -> list[Tensor | None]:
    return list(map(_grad_of, params))


def have_grad(params: Sequence[Parameter]) -> bytes:
    """By parameter, 1 where there is a gradient."""
    return bytes(map(_is_not_none, map(_grad_of, params)))


def any_has_grad(params: Sequence[Parameter]) -> bool:
    return any(map(_is_not_none, map(_grad_of, params)))


def trainable(params: Sequence[Parameter]) -> bytes:
    """By parameter, 1 where it trains."""
    return bytes(map(_requires_grad_of, params))


def are_dense(grads: Sequence[Tensor | None]) -> bool:
    """Whether all are there, and none is sparse."""
    return not any(map(_is_none, grads)) and set(map(_layout_of, grads)) == {torch.strided}


# Of each parameter the dtype, the shape, and where it lies: True for all on the CPU, else the device.
Kinds: TypeAlias = tuple[tuple[torch.dtype, ...], tuple[torch.Size, ...], tuple[torch.device | bool, ...]]


def kinds(params: Sequence[Parameter]) -> Kinds:
    """Of what dtypes and shapes they are, and where they lie; equal exactly where all that is."""
    on_cpu = tuple(map(_is_cpu, params))
    # torch makes an object each time that it is asked for a device.
    where = on_cpu if all(on_cpu) else tuple(map(_device_of, params))
    return tuple(map(_dtype_of, params)), tuple(map(_shape_of, params)), where


def kinds_on_any_rank(kinds: Kinds) -> tuple[object, ...]:
    """``kinds`` without what differs between ranks that are alike: each has GPUs of its own, of other numbers."""
    dtypes, shapes, where = kinds
    numbers = {place: number for number, place in enumerate(dict.fromkeys(where))}
    return dtypes, shapes, [(place if isinstance(place, bool) else place.type, numbers[place]) for place in where]
