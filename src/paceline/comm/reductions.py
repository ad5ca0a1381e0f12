"""Reducing values of several ranks, in shared memory: which operation of torch stands for which of c10d.

The invariant: values are taken in the order of ranks, always, so a result is the same on all ranks and in all runs.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.transport import Reduction

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
# Several sums in these would lose digits at each step.
NARROW = (torch.float16, torch.bfloat16)
# In these torch adds, and the sums have the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@functools.lru_cache(maxsize=512)
def is_defined(reduction: Reduction, dtype: torch.dtype) -> bool:
    """Whether values of ``dtype`` can be reduced like that: of what torch can add or compare, it is asked itself."""
    if reduction.name not in _COMBINE:
        return False
    try:
        for num_parts in (1, 2, 3):
            parts = [torch.zeros(1, dtype=dtype, device="cpu") for _ in range(num_parts)]
            reduce_into(parts[0], parts, reduction)
    except (RuntimeError, TypeError):
        return False
    return True


def reduce_into(output: Tensor, parts: Sequence[Tensor], reduction: Reduction) -> None:
    """Write the reduction of ``parts``, which go by rank, into ``output``, which may be one of them.

    Sums of more than two halves are made in float32 and rounded once.
    """
    combine = _COMBINE[reduction.name]
    if output.dtype in _SIGNED and reduction.name == "sum":
        signed = _SIGNED[output.dtype]
        output, parts = output.view(signed), [part.view(signed) for part in parts]
    if len(parts) == 1:
        if output is not parts[0]:
            output.copy_(parts[0])
    elif len(parts) == 2 and not (output.dtype in NARROW and reduction.name == "avg"):  # whose sum could overflow
        combine(parts[0], parts[1], out=output)
    elif output.dtype in NARROW:
        total = combine(parts[0].float(), parts[1])
        for part in parts[2:]:
            combine(total, part, out=total)
        if reduction.name == "avg":
            divide(total, len(parts))
        output.copy_(total)
        return
    else:
        is_in_place = any(output.data_ptr() == part.data_ptr() for part in parts[2:])
        total = combine(parts[0], parts[1], out=None if is_in_place else output)
        for part in parts[2:]:
            combine(total, part, out=total)
        if is_in_place:
            output.copy_(total)
    if reduction.name == "avg" and len(parts) > 1:
        divide(output, len(parts))


def divide(sums: Tensor, count: int) -> None:
    """Make averages of ``count`` values of their sums."""
    if not (sums.is_floating_point() or sums.is_complex()):
        sums.div_(count, rounding_mode="trunc")
    elif count & (count - 1) == 0:
        sums *= 1 / count  # as exact for a power of two, and many times as fast
    else:
        sums /= count
