"""The mean over everything that all ranks hold, where they hold unequal numbers of tokens or samples.

The invariant: the value is the same on all ranks, bit by bit, and gradients averaged by ``DistributedDataParallel`` are
those of one process that holds it all. A mean of the ranks' own means is not: it weighs a rank's tokens by how few
they are.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from paceline.errors import DataError
from paceline.parallel.live import divisor_of, live_group

_WITHOUT_FLOAT64 = {"mps"}


def global_mean(loss_sum: Tensor, count: float | Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of all ranks' ``loss_sum`` over the sum of their ``count``. A collective call, in evaluation too.

        loss = cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        global_mean(loss, (targets != -100).sum()).backward()

    The gradient is the number of ranks times that of the quotient, which is what ``DistributedDataParallel`` divides
    by. Not to be used where gradients are summed over the ranks, or not reduced at all.

    When gradients are accumulated over several backwards (``no_sync``), ``count`` is this rank's count over all of the
    accumulation, the same in each call, while ``loss_sum`` is that of the one micro-step. Then the values, and the
    gradients, add up to those of the mean over all.

    A rank that has nothing passes a count of 0. Its ``loss_sum`` should still come from the model, as a sum over
    nothing does, so that backward can be called and gradients of the other ranks come in. Where no rank has anything,
    value and gradients are 0.

    Args:
        loss_sum: 0-d, floating point; the *sum* of this rank's losses, in any dtype. Ranks may differ in dtype.
        count: how many tokens or samples (or what total weight) that sum is over; a number, or a 0-d tensor on the
            device of ``loss_sum``, which stays there: the host waits for no device.
        group: the ranks that ``DistributedDataParallel`` averages over; by default all. Without a process group this is
            ``loss_sum / count``.
    Returns:
        0-d, of the dtype and device of ``loss_sum``. NaN on all ranks where a count on a device is negative or NaN.
    Raises:
        DataError: at once, before any other rank is involved: ``loss_sum`` is not a 0-d floating-point tensor;
            ``count`` is negative, not finite, not 0-d, wants a gradient, or is on another device; this rank is not in
            ``group``.
        CommunicationError: this rank has run out of data, under ``join``.
    """
    _check(loss_sum, count, group)
    live = live_group(group)
    is_alone = live is None or dist.get_world_size(live) <= 1
    mean: Tensor = _GlobalMean.apply(loss_sum, count, None if is_alone else live, divisor_of(group))  # type: ignore[no-untyped-call]
    return mean


class _GlobalMean(Function):
    """``loss_sum`` to the mean over ``group``; the gradient is multiplied by ``divisor``."""

    @staticmethod
    def forward(
        ctx: Any, loss_sum: Tensor, count: float | Tensor, group: dist.ProcessGroup | None, divisor: int
    ) -> Tensor:
        dtype = torch.float32 if loss_sum.device.type in _WITHOUT_FLOAT64 else torch.float64
        totals = torch.empty(2, dtype=dtype, device=loss_sum.device)
        totals[0] = loss_sum
        if isinstance(count, Tensor):
            count = count.to(dtype)
            count = torch.where(count >= 0, count, math.nan)
        totals[1] = count
        if group is not None:
            dist.all_reduce(totals, group=group)
        total, total_count = totals.unbind()
        is_empty = total_count == 0
        ctx.save_for_backward(torch.where(is_empty, 0.0, divisor / total_count))
        return torch.where(is_empty, 0.0, total / total_count).to(loss_sum.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        (factor,) = ctx.saved_tensors
        return (grad_output * factor).to(grad_output.dtype), None, None, None


def _check(loss_sum: Tensor, count: float | Tensor, group: dist.ProcessGroup | None) -> None:
    """Refuse what has no mean, as far as the host can see it."""
    who = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
    if not isinstance(loss_sum, Tensor) or loss_sum.dim() != 0 or not loss_sum.is_floating_point():
        is_tensor = isinstance(loss_sum, Tensor)
        given = f"{loss_sum.dtype} of shape {tuple(loss_sum.shape)}" if is_tensor else repr(loss_sum)
        raise DataError(
            f"{who}loss_sum: expected a 0-d floating-point tensor, got {given}. Pass the *sum* of this rank's losses, "
            "as loss functions give it with reduction='sum'."
        )
    if dist.is_initialized() and dist.get_rank(group) < 0:
        raise DataError(
            f"{who}it is not in the group whose mean it asks for. Call global_mean on the group's ranks only."
        )
    if isinstance(count, Tensor):
        if count.dim() != 0:
            raise DataError(f"{who}count: expected a number or a 0-d tensor, got shape {tuple(count.shape)}.")
        if count.requires_grad:
            raise DataError(f"{who}count wants a gradient, which would not be computed. Pass count.detach().")
        if count.device != loss_sum.device:
            raise DataError(
                f"{who}count is on {count.device} and loss_sum on {loss_sum.device}. Count where the loss is computed, "
                "or pass a number."
            )
        if count.device.type != "cpu":
            return  # looking at it would make the host wait
    if not 0 <= count < math.inf:
        raise DataError(f"{who}count: expected a finite number, not less than 0, got {float(count)}.")
