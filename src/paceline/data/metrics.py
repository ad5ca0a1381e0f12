"""Running metrics over all ranks, exact: the same bits on one rank and on many, in whatever order samples came.

The invariant: what a metric keeps are whole numbers. They are added, never averaged, so it matters not how unequal the
ranks' batches are; only the last step, the quotient, is rounded.
"""

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.data.exchange import ranks_of
from paceline.errors import DataError

# The smallest double's last bit, 2**-1074, and the 52 bits by which a mantissa of frexp can lie below it.
_UNIT = 1126


class Mean:
    """The mean of values, weighted or not, such as the loss of each sample.

    ``update`` and ``reset`` concern this rank alone; ``compute`` is a collective call.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._total = self._weight = 0
        self._odd = 0.0  # what came that is not finite

    def update(self, values: Any, weights: Any = 1.0) -> None:
        """Add values.

        Args:
            values: a number, or a tensor or array of any shape, of which the gradient is not followed.
            weights: the same, or of a shape that broadcasts to that of the values; 0 or more. A mean over a batch
                goes in as ``update(mean, len(batch))``.
        Raises:
            DataError: a weight is negative or not finite.
        """
        values, weights = np.broadcast_arrays(_as_doubles(values), _as_doubles(weights))
        if not np.all((weights >= 0) & np.isfinite(weights)):
            raise DataError("a weight of a Mean should be finite and 0 or more")
        with np.errstate(invalid="ignore", over="ignore"):
            products = (values * weights).ravel()
            is_finite = np.isfinite(products)
            self._odd += float(products[~is_finite].sum())
        self._total += _exact_sum(products[is_finite])
        self._weight += _exact_sum(weights.ravel())

    def compute(self, *, group: dist.ProcessGroup | None = None) -> float:
        """The mean over all ranks, the same on each; NaN where no rank has anything."""
        parts = ranks_of(group).all((self._total, self._weight, self._odd))
        odd = sum(part[2] for part in parts)
        total, weight = sum(part[0] for part in parts), sum(part[1] for part in parts)
        if odd != 0:  # infinite, or NaN
            return float(odd)
        return float(Fraction(total, weight)) if weight else float("nan")


class ConfusionCounts:
    """How often each class was taken for each other.

    Args:
        num_classes: 1 or more.
    """

    def __init__(self, num_classes: int) -> None:
        if num_classes < 1:
            raise DataError(f"num_classes should be 1 or more, got {num_classes}")
        self.num_classes = num_classes
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._counts = torch.zeros(self.num_classes, self.num_classes, dtype=torch.int64)

    def update(self, guesses: Tensor, targets: Tensor) -> None:
        """Add samples.

        Args:
            guesses: classes, of any shape; or scores of each class, with one dimension of num_classes more, at the end.
            targets: the right classes; integers. Samples whose target is negative are left out.
        Raises:
            DataError: shapes do not fit, or a class is not below ``num_classes``.
        """
        guesses = _as_guesses(guesses, targets)
        guesses, targets = guesses.flatten().long().cpu(), targets.flatten().long().cpu()
        is_counted = targets >= 0
        guesses, targets = guesses[is_counted], targets[is_counted]
        for name, classes in (("guess", guesses), ("target", targets)):
            if classes.numel() and not (int(classes.min()) >= 0 and int(classes.max()) < self.num_classes):
                raise DataError(
                    f"a {name} should be a class from 0 to {self.num_classes - 1}, got {int(classes.min())} to "
                    f"{int(classes.max())}"
                )
        pairs = torch.bincount(targets * self.num_classes + guesses, minlength=self.num_classes**2)
        self._counts += pairs.view_as(self._counts)

    def compute(self, *, group: dist.ProcessGroup | None = None) -> Tensor:
        """The counts over all ranks.

        Returns:
            int64, (num_classes, num_classes) on the CPU: by target, then by guess.
        """
        return torch.stack(ranks_of(group).all(self._counts)).sum(0)


class Accuracy:
    """The part of samples whose guess is right."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._num_right = self._num_samples = 0

    def update(self, guesses: Tensor, targets: Tensor) -> None:
        """Add samples; as for ``ConfusionCounts``."""
        guesses, targets = _as_guesses(guesses, targets).cpu(), targets.cpu()
        is_counted = targets >= 0
        self._num_right += int(((guesses == targets) & is_counted).sum())
        self._num_samples += int(is_counted.sum())

    def compute(self, *, group: dist.ProcessGroup | None = None) -> float:
        """The accuracy over all ranks, the same on each; NaN where no rank has anything."""
        parts = ranks_of(group).all((self._num_right, self._num_samples))
        num_samples = sum(part[1] for part in parts)
        return sum(part[0] for part in parts) / num_samples if num_samples else float("nan")


def _as_guesses(guesses: Tensor, targets: Tensor) -> Tensor:
    if guesses.dim() == targets.dim() + 1:
        if guesses.shape[-1] < 2:
            raise DataError(
                f"guesses of shape {tuple(guesses.shape)} hold the score of one class only, which would always be the "
                "largest. Give classes, such as (scores > 0).squeeze(-1)."
            )
        guesses = guesses.argmax(-1)
    elif guesses.is_floating_point() and not torch.equal(guesses, guesses.round()):
        raise DataError(
            "guesses of the targets' shape should be classes, got numbers that are not whole, it seems scores. Give "
            "classes, such as (scores > 0), or the scores of all classes along one more dimension, at the end."
        )
    if guesses.shape != targets.shape:
        raise DataError(
            f"guesses should have the targets' shape {tuple(targets.shape)}, or one dimension of scores more at the "
            f"end, got {tuple(guesses.shape)}"
        )
    return guesses


def _as_doubles(values: Any) -> npt.NDArray[np.float64]:
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, np.float64)


def _exact_sum(values: npt.NDArray[np.float64]) -> int:
    """The sum without rounding, in units of 2**-1126."""
    mantissas, exponents = np.frexp(values)
    whole = (mantissas * 2.0**53).astype(np.int64)
    total = 0
    for exponent in np.unique(exponents).tolist():
        words = whole[exponents == exponent]
        # In halves, so that sums of thousands of millions stay within 64 bits.
        part = (int((words >> 32).sum()) << 32) + int((words & 0xFFFFFFFF).sum())
        total += part << (exponent - 53 + _UNIT)
    return total
