"""Reducing in two steps: what the ranks of one host have, and then what the hosts have made of that.

[Note: averages of halves] A sum may overflow where the average does not. So between hosts halves are scaled down, by a
power of two, which costs no digit that the average would have.

The invariant: the two steps together are the reduction of all ranks' values.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from paceline.comm.reductions import NARROW, divide, reduce_into
from paceline.comm.transport import Reduction

_SUM = Reduction("sum")


def sum_here(output: Tensor, parts: Sequence[Tensor], reduction: Reduction, size: int) -> None:
    """Reduce what the ranks of one host have, of ``size`` ranks on all. [Note: averages of halves]"""
    if reduction.name != "avg":
        reduce_into(output, parts, reduction)
    elif output.dtype in NARROW:
        output.copy_(_sum_in_float(parts).mul_(_scale(size)))
    else:
        reduce_into(output, parts, _SUM)


def sum_hosts(output: Tensor, parts: Sequence[Tensor], reduction: Reduction, size: int) -> None:
    """Reduce what ``sum_here`` has made on each host. [Note: averages of halves]"""
    if reduction.name == "avg" and output.dtype in NARROW:
        output.copy_(_sum_in_float(parts).div_(_scale(size) * size))
        return
    reduce_into(output, parts, _SUM if reduction.name == "avg" else reduction)
    if reduction.name == "avg":
        divide(output, size)


def _sum_in_float(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total


def _scale(size: int) -> float:
    """The largest power of two that is not larger than 1/size."""
    return float(2.0 ** -math.ceil(math.log2(size)))
