"""How much the loss of each share counts in the loss of the whole batch.

A loss that is a mean over a share counts by what it is a mean over: its samples, or the tokens that are not padding, or
the weights of their classes. Added up with these weights, the means of unequal shares are the mean of the batch.

The invariant: the weights of a mean add up to 1; those of a sum are all 1.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import DataError
from paceline.parallel.data_parallel.containers import parts_of

Loss: TypeAlias = Callable[..., Tensor]
Count: TypeAlias = Callable[..., "float | Tensor"]
# What the module is called with for a share, and its target, if there is one.
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]

_OVER_CLASSES = (functional.cross_entropy, functional.nll_loss)


class Weighing:
    """The rule by which the shares of a loss are weighed.

    Attributes:
        counts_calls: whether, where there is no target, it must know what the module is called with.
    """

    def __init__(self, loss: Loss, count: Count | None) -> None:
        """Find it.

        Args:
            loss: a criterion of torch's, or any callable that returns a mean over the samples.
            count: of a share's target, or without one of what the module is called with, what the loss is a mean
                over, where that is not the number of samples.
        Raises:
            DataError: the loss is one per sample, or cannot be called.
        """
        if not callable(loss):
            raise DataError(f"loss: expected a callable that returns a scalar, not {type(loss).__name__}.")
        function, keywords = _unwrapped(loss)
        reduction = keywords.get("reduction", getattr(function, "reduction", "mean"))
        if reduction == "none":
            raise DataError("loss: reduction='none' gives no scalar to differentiate. Use 'mean' or 'sum'.")
        self._is_sum = reduction == "sum"
        self._count = count or _count_of_classes(function, keywords)
        self.counts_calls = self._count is not None and not self._is_sum

    def weigh(self, calls: Sequence[Call], dim: int) -> list[float]:
        """A weight for each share; where nothing counts in any, all alike: a mean over nothing is NaN anyway."""
        counts = self.counts(calls, dim)
        if counts is None:
            return [1.0] * len(calls)
        if sum(counts) == 0:
            counts = [1.0] * len(counts)
        return [count / sum(counts) for count in counts]

    def counts(self, calls: Sequence[Call], dim: int) -> list[float] | None:
        """What the loss of each share is a mean over; None where it is a sum."""
        return None if self._is_sum else [self._count_of(call, dim) for call in calls]

    def _count_of(self, call: Call, dim: int) -> float:
        inputs, kwargs, targets = call
        if self._count is None:
            return float(_num_samples(call, dim))
        return float(self._count(*targets) if targets else self._count(*inputs, **kwargs))


def _unwrapped(loss: Any) -> tuple[Any, dict[str, Any]]:
    """The function within ``functools.partial``, and its keywords."""
    keywords: dict[str, Any] = {}
    while isinstance(loss, functools.partial):
        keywords = {**loss.keywords, **keywords}
        loss = loss.func
    return loss, keywords


def _count_of_classes(function: Any, keywords: dict[str, Any]) -> Count | None:
    """The count of torch's losses over classes, which leave out one class and may weigh the others."""
    if isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return functools.partial(_count_for, function)
    if function in _OVER_CLASSES:
        return functools.partial(
            _count_labels, weight=keywords.get("weight"), ignore_index=keywords.get("ignore_index", -100)
        )
    return None


def _count_for(criterion: Any, target: Tensor) -> Tensor:
    """As the criterion is now: it may have been given other weights."""
    return _count_labels(target, criterion.weight, criterion.ignore_index)


def _count_labels(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    if target.is_floating_point():  # probabilities of classes: a mean over the samples
        return torch.tensor(float(target.size(0)))
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return weight.to(target.device)[target[counts]].sum()


def _num_samples(share: Any, dim: int) -> int:
    """The size of the first tensor in it; 1 where there is none."""
    if isinstance(share, Tensor):
        return share.size(dim) if share.dim() else 0
    return next((size for _, part in parts_of(share) or () if (size := _num_samples(part, dim))), 0)
