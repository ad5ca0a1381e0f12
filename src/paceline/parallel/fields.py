"""One field of many parameters at once.

The invariant: each function makes one pass, in C. Over many small parameters a loop in Python costs more than they do.
"""

import functools
import operator
from collections.abc import Sequence

from torch.nn import Parameter

_requires_grad_of, _grad_of = operator.attrgetter("requires_grad"), operator.attrgetter("grad")
_dtype_of, _shape_of, _device_of, _is_cpu = map(operator.attrgetter, ("dtype", "shape", "device", "is_cpu"))
_is_not_none = functools.partial(operator.is_not, None)


def have_grad(params: Sequence[Parameter]) -> list[bool]:
    return list(map(_is_not_none, map(_grad_of, params)))


def trainable(params: Sequence[Parameter]) -> tuple[bool, ...]:
    return tuple(map(_requires_grad_of, params))


def kinds(params: Sequence[Parameter]) -> tuple[object, ...]:
    """Of what dtypes and shapes they are, and where they lie; equal exactly where all that is."""
    on_cpu = tuple(map(_is_cpu, params))
    # torch makes an object each time that it is asked for a device.
    where = on_cpu if all(on_cpu) else tuple(map(_device_of, params))
    return tuple(map(_dtype_of, params)), tuple(map(_shape_of, params)), where
