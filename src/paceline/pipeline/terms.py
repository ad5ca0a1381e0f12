"""What a pipeline was asked for, and what that makes of a batch.

The invariant: the loss of a batch is that of the undivided model: microbatches count by what their loss is a mean over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.parallel import gather
from paceline.parallel.data_parallel.weights import Weighing
from paceline.pipeline.make import make_schedule
from paceline.pipeline.microbatches import num_samples, sizes_of, split
from paceline.pipeline.schedule import Rule, Schedule
from paceline.pipeline.stage import Call

NO_TARGET = object()


@dataclass(frozen=True)
class Terms:
    """The arguments of ``Pipeline`` that say how a step runs."""

    rule: str | Rule
    num_lanes: int
    num_stages: int
    num_microbatches: int
    dim: int
    loss: Callable[..., Tensor]
    weighing: Weighing

    def schedule(self, num_microbatches: int) -> Schedule:
        return make_schedule(self.rule, self.num_lanes, self.num_stages, num_microbatches)

    def sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any], who: str = "") -> tuple[int, ...]:
        """Of the microbatches of a batch.

        Args:
            who: whom errors are about.
        Raises:
            DataError: there is no tensor to be cut, or sizes differ.
        """
        found = num_samples((args, kwargs), self.dim, "inputs")
        if found is None:
            raise DataError(f"{who}inputs: expected at least one tensor that holds a batch, got none.")
        return sizes_of(found, self.num_microbatches)

    def calls(self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int]) -> list[Call]:
        calls: list[Call] = split((args, kwargs), sizes, self.dim)
        return calls

    def targets(self, target: Any, sizes: Sequence[int]) -> list[tuple[Any, ...]]:
        """What the loss of each microbatch is called with, after the output.

        Raises:
            DataError: there are not as many targets as inputs.
        """
        if target is NO_TARGET:
            return [()] * len(sizes)
        found = num_samples(target, self.dim, "target")
        if found is not None and found != sum(sizes):
            raise DataError(
                f"target has size {found} along dimension {self.dim}, but the inputs have {sum(sizes)}. Pass the "
                "target of the same batch."
            )
        return [(part,) for part in split(target, sizes, self.dim)]

    def counts(
        self, calls: Sequence[Call] | None, targets: Sequence[tuple[Any, ...]], sizes: Sequence[int]
    ) -> list[float] | None:
        """What the loss of each microbatch is a mean over; None for a sum.

        Args:
            calls: None where this rank has not been given the inputs; then their sizes stand for them.
        Raises:
            DataError: they are needed.
        """
        if calls is None:
            if self.counts_calls(targets):
                raise DataError(
                    "`count` takes what the model is called with, which the last stage's rank has not been given. Pass "
                    "the inputs on that rank, too."
                )
            calls = [((torch.empty((1,) * self.dim + (size,)),), {}) for size in sizes]
        whole = [(*call, target) for call, target in zip(calls, targets, strict=True)]
        return self.weighing.counts(whole, self.dim)

    def counts_calls(self, targets: Sequence[tuple[Any, ...]]) -> bool:
        """Whether what the loss is a mean over is counted in the inputs."""
        return self.weighing.counts_calls and not any(targets)

    def joined(
        self, outputs: Sequence[Any], calls: Sequence[Call] | None, sizes: Sequence[int], device: torch.device
    ) -> Any:
        """The output for the batch; the loss of the batch, where the model returns its loss."""
        are_scalars = all(isinstance(output, Tensor) and output.dim() == 0 for output in outputs)
        if self.loss is not own_loss or not are_scalars:
            return gather(outputs, device, self.dim)
        counts = self.counts(calls, [()] * len(sizes), sizes)
        weights = [1.0] * len(sizes) if counts is None else weights_of(counts, sum(counts))
        return weighed(outputs, weights).to(device)


def own_loss(output: Tensor) -> Tensor:
    """The loss of a model that returns it."""
    return output


def weights_of(counts: Sequence[float], total: float) -> list[float]:
    """How much each microbatch counts; where nothing does, a mean is NaN, and so is the loss."""
    return [count / total for count in counts] if total else [1.0 / len(counts)] * len(counts)


def weighed(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The loss of the batch. What counts for nothing is left out: it may be 0 / 0."""
    parts = [loss * weight for loss, weight in zip(losses, weights, strict=True) if weight]
    return torch.stack(parts).sum() if parts else torch.zeros_like(losses[0])
