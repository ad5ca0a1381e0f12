"""What c10d's operations ask for, and of which tensors.

[Note: factors] ``PREMUL_SUM`` has a factor on each rank, by which that rank's values are multiplied before they are
added; ranks may have different ones, as with NCCL. So values are multiplied before a transport sees them, to which it
is a sum.

The invariant: an operation that is not defined for a tensor's dtype is refused before any other rank is involved.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.reductions import is_defined
from paceline.comm.transport import Reduction

_NAMES = {kind.value: name for name, kind in dist.ReduceOp.RedOpType.__members__.items()}
_BITWISE = ("BAND", "BOR", "BXOR")


class Reducing(NamedTuple):
    """What an operation of c10d's asks for.

    Attributes:
        name: c10d's, in lower case; what all ranks must have alike.
        factor: of this rank. [Note: factors]
    """

    name: str
    reduction: Reduction
    factor: complex | None = None

    def scale(self, tensor: Tensor) -> Tensor:
        """``tensor`` itself, or a multiple of it that is another tensor. [Note: factors]"""
        return tensor if self.factor is None else tensor * self.factor


def reducing_of(op: Any, tensors: Sequence[Tensor]) -> Reducing:
    """What ``op`` asks for, which must be defined for all ``tensors``.

    Raises:
        ValueError: it is not; the message names both.
    """
    kind = getattr(op, "op", op).value
    reducing = _reducing(kind, tensors[0].dtype)
    if len(tensors) > 1:
        for tensor in tensors:
            _reducing(kind, tensor.dtype)
    if reducing.name == "premul_sum":
        return reducing._replace(factor=_factor_of(op, tensors))
    return reducing


@functools.lru_cache(maxsize=512)
def _reducing(kind: int, dtype: torch.dtype) -> Reducing:
    name = _NAMES[kind]
    reduction = Reduction("sum" if name == "PREMUL_SUM" else name.lower())
    if not is_defined(reduction, dtype) or (name == "PREMUL_SUM" and dtype == torch.bool):
        other = torch.float32 if dtype.is_floating_point or dtype == torch.bool else torch.int64
        other = torch.int64 if name in _BITWISE else torch.float32 if dtype.is_complex else other
        raise ValueError(f"{name} is not defined for {dtype}. Convert the tensor first, to {other} perhaps.")
    return Reducing(name.lower(), reduction)


def _factor_of(op: Any, tensors: Sequence[Tensor]) -> complex:
    """This rank's factor. [Note: factors]"""
    factor = op.__getstate__()[1]
    if isinstance(factor, Tensor):  # of one element, as c10d sees to
        factor = factor.item()
    for tensor in tensors:
        if isinstance(factor, complex) and not tensor.is_complex():
            raise ValueError(f"PREMUL_SUM: {tensor.dtype} cannot be multiplied by {factor}. Use a real factor.")
        if not (tensor.is_floating_point() or tensor.is_complex()):
            if factor != factor // 1:
                raise ValueError(
                    f"PREMUL_SUM: {tensor.dtype} times {factor} is not {tensor.dtype}. Convert the tensor to a "
                    "floating-point dtype, or use a whole number."
                )
            factor = int(factor)
    return factor  # type: ignore[no-any-return]
