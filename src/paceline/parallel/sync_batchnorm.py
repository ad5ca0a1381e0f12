"""``SyncBatchNorm``: batch normalisation over the samples of all ranks, on CPUs too.

Each rank describes its samples by (count, mean, M2), where M2 is the sum of squared deviations from the mean; all ranks
combine the descriptions in the same order. So ranks may hold unequal numbers of samples, or none.

The invariant: all ranks normalise by the same statistics, bit by bit, and outputs and gradients are those of one
process that holds the samples of all. A training forward exchanges one message, a backward to the input another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Module
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.parallel.live import live_group

_HALF = (torch.float16, torch.bfloat16)


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """Normalise each channel over the samples of all ranks; torch's class of that name, with its arguments.

    Ranks exchange statistics in training only, under ``no_grad`` as well; ``eval()`` needs no other rank. Every
    training forward, and every backward that reaches the input, is a collective call of all ranks that still have data:
    also of one whose batch is empty, whose loss must therefore depend on this layer's output (a sum over it will do).

    Shape:
        input: (N, C, ...), of at least two dimensions; N may be 0, and may differ between ranks.
        output: like the input, in its dtype and memory format.
    Raises:
        ValueError: as torch does: fewer than two dimensions, no channels, or one value per channel over all ranks.
        CommunicationError: this rank has run out of data, under ``join``.
    Source: Ioffe and Szegedy 2015, "Batch Normalization"; Chan, Golub and LeVeque 1979, "Updating Formulae and a
        Pairwise Algorithm for Computing Sample Variances".
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``."""
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        group = live_group(self.process_group) if self.training else None
        if group is None or dist.get_world_size(group) <= 1:
            return _BatchNorm.forward(self, input)
        if not input.is_cpu:
            return self._forward_of_torch(input, group)
        factor = self._count_batch()
        statistics = _gather_statistics(input.detach(), group)
        if statistics.count == 1:
            raise ValueError("Expected more than 1 value per channel when training, got 1 over all ranks together.")
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            statistics.update(self.running_mean, self.running_var, factor)
        output: Tensor = _Normalize.apply(input, self.weight, self.bias, statistics, self.eps, group)  # type: ignore[no-untyped-call]
        return output

    @classmethod
    def convert_sync_batchnorm(cls, module: Module, process_group: dist.ProcessGroup | None = None) -> Module:
        """Replace every ``BatchNorm*D`` layer of ``module``, however nested, in place.

        Parameters and buffers stay the tensors they are, so an optimizer of them stays right; a layer that is found in
        several places stays one layer.

        Args:
            process_group: of the new layers; by default all ranks.
        Returns:
            ``module``, or the new layer if it is a ``BatchNorm*D`` itself.
        """
        return cls._convert(module, process_group, {})

    @classmethod
    def _convert(cls, module: Module, process_group: dist.ProcessGroup | None, converted: dict[int, Module]) -> Module:
        if id(module) in converted:
            return converted[id(module)]
        output = cls._of(module, process_group) if isinstance(module, _BatchNorm) else module
        converted[id(module)] = output
        for name, child in module._modules.items():
            if child is not None:
                output.add_module(name, cls._convert(child, process_group, converted))
        return output

    @classmethod
    def _of(cls, layer: _BatchNorm, process_group: dist.ProcessGroup | None) -> Module:
        output = cls(
            layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, process_group
        )
        if layer.affine:
            output.weight, output.bias = layer.weight, layer.bias
        output.running_mean, output.running_var = layer.running_mean, layer.running_var
        output.num_batches_tracked = layer.num_batches_tracked
        output.training = layer.training
        if hasattr(layer, "qconfig"):
            output.qconfig = layer.qconfig
        return output

    def _count_batch(self) -> float:
        """Count the batch; return how much of the running statistics it makes up."""
        if not self.track_running_stats or self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum

    def _forward_of_torch(self, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        """torch's kernels, over the live ranks.

        An empty batch of half precision goes in as float32: torch would have it send half-precision zeros to ranks that
        expect float32.
        """
        is_odd = input.numel() == 0 and input.dtype in _HALF
        own, self.process_group = self.process_group, group
        try:
            output: Tensor = super().forward(input.float() if is_odd else input)
        finally:
            self.process_group = own
        return output.to(input.dtype)


@dataclass(frozen=True)
class _Statistics:
    """Of each channel, over all ranks, in float64.

    Attributes:
        mean: (C,)
        m2: the sum of squared deviations from it. (C,)
        count: how many values there are per channel.
    """

    mean: Tensor
    m2: Tensor
    count: int

    @property
    def var(self) -> Tensor:
        """The mean squared deviation. (C,)"""
        return self.m2 / max(1, self.count)

    def update(self, running_mean: Tensor, running_var: Tensor, factor: float) -> None:
        """Take a share of ``factor`` into the running statistics; nothing where there are no values."""
        if self.count > 1:
            with torch.no_grad():
                unbiased = self.m2 / (self.count - 1)
                running_mean.copy_(running_mean.double() * (1 - factor) + self.mean * factor)
                running_var.copy_(running_var.double() * (1 - factor) + unbiased * factor)


def _gather_statistics(input: Tensor, group: dist.ProcessGroup) -> _Statistics:
    """What all ranks hold. A collective call, of 2C + 1 numbers."""
    num_channels = input.shape[1]
    dims, _ = _around_channels(input)
    message = torch.zeros(2 * num_channels + 1, dtype=torch.float64, device="cpu")  # mean, M2, count
    if input.numel():
        count = input.numel() // num_channels
        rounded_mean = input.mean(dims, keepdim=True, dtype=_wide(input))
        deviation = input - rounded_mean
        rest = deviation.mean(dims).double()  # what rounding took from the mean: much, where that is far from zero
        message[:num_channels] = rounded_mean.flatten().double() + rest
        message[num_channels:-1] = (deviation.square_().sum(dims) - count * rest.square()).clamp_(min=0)
        message[-1] = count
    everyones = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, message, group=group)
    return _combine(everyones)


def _combine(everyones: Sequence[Tensor]) -> _Statistics:
    """The ranks' statistics, brought together in the order of ranks, the same on each of them.

    Args:
        everyones: each rank's mean, M2 and count. (2C + 1)
    """
    num_channels = len(everyones[0]) // 2
    mean, m2 = everyones[0].new_zeros(2, num_channels).unbind()
    total = 0
    for row in everyones:
        count = int(row[-1])
        if count == 0:
            continue
        delta = row[:num_channels] - mean
        mean.add_(delta, alpha=count / (total + count))
        m2.add_(row[num_channels:-1]).addcmul_(delta, delta, value=total * count / (total + count))
        total += count
    return _Statistics(mean, m2, total)


class _Normalize(Function):
    """Normalise by given statistics, of which the input was a part."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: _Statistics,
        eps: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        wide = _wide(input)
        invstd = (statistics.var + eps).rsqrt()
        mean, var = statistics.mean.to(wide), statistics.var.to(wide)
        ctx.save_for_backward(input, weight, bias, mean, invstd.to(wide))
        ctx.count, ctx.group = statistics.count, group
        if not input.numel():
            return torch.empty_like(input)
        if input.dtype in _HALF:  # for which the kernel wants all else in float32
            weight, bias = (None if param is None else param.to(wide) for param in (weight, bias))
        return batch_norm(input, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of this rank's samples, and of weight and bias as far as they come from them.

        With x' the normalised input, and means over the samples of all ranks:
        grad_input = weight / std * (grad - mean(grad) - x' * mean(grad * x')).
        """
        input, weight, bias, mean, invstd = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dims, shape = _around_channels(input)
        grad = grad_output.to(mean.dtype)
        deviation = input - mean.view(shape)
        sums = torch.stack([grad.sum(dims), (deviation * grad).sum(dims) * invstd])  # (2, C)
        grad_weight = sums[1].to(weight.dtype) if wants_weight else None
        grad_bias = sums[0].to(bias.dtype) if wants_bias else None
        if not wants_input:
            return None, grad_weight, grad_bias, None, None, None
        totals = sums.to(torch.float64, copy=True)  # the parameters' gradients stay those of this rank
        dist.all_reduce(totals, group=ctx.group)
        mean_grad, mean_product = (totals / max(1, ctx.count)).to(mean.dtype)
        scale = invstd if weight is None else invstd * weight.to(mean.dtype)
        slope, offset = (scale * invstd * mean_product).view(shape), (scale * mean_grad).view(shape)
        grad_input = deviation.mul_(-slope).addcmul_(grad, scale.view(shape)).sub_(offset)
        return grad_input.to(input.dtype), grad_weight, grad_bias, None, None, None


def _around_channels(input: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions to reduce, and the shape in which one value per channel meets the input."""
    return [0, *range(2, input.dim())], [1, -1, *[1] * (input.dim() - 2)]


def _wide(input: Tensor) -> torch.dtype:
    """The dtype of statistics: float32 at least."""
    return torch.promote_types(input.dtype, torch.float32)
