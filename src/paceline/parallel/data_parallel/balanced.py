"""Loss and backward in each replica: no device holds more than its share.

torch's DataParallel gathers all outputs on the first device, which computes the loss of all, and sums all gradients
there. Here each replica computes the loss of its share and runs its backward, in its own thread; gradients are summed
on the way, in a tree, while others are still being computed. Only the sums, and a number, reach the first device.

The invariant: the gradients of the module are those of the whole batch, or, after an exception, what they were before.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module

from paceline.errors import DataError, ReplicaError
from paceline.parallel.data_parallel.apply import run
from paceline.parallel.data_parallel.containers import parts_of, with_parts
from paceline.parallel.data_parallel.mirror import Mirror
from paceline.parallel.data_parallel.reduce import TreeReduction, plan_for
from paceline.parallel.data_parallel.replicate import build, tensors_to_copy
from paceline.parallel.data_parallel.weights import Call, Loss


class WithLoss(Module):
    """A module together with its loss: what is replicated, so that a loss with weights has them on every device."""

    def __init__(self, module: Module, loss: Loss) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> Tensor:
        """The loss of ``inputs``; of no target, or one."""
        loss = self.loss(self.module(*inputs, **kwargs), *targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise DataError(f"loss: expected a scalar tensor, not {what}.")
        return loss.squeeze()


def differentiate(loss: Tensor, factor: float) -> None:
    """Add ``factor`` times the loss's gradients to the leaves."""
    with torch.autocast(loss.device.type, enabled=False):
        torch.autograd.backward(loss, torch.full_like(loss, factor))


def train_replicas(
    mirror: Mirror,
    network: Module,
    devices: Sequence[torch.device],
    shares: Sequence[Call],
    weights: Sequence[float],
    scale: float,
) -> list[Tensor]:
    """Forward, loss and backward of each share in a replica; the sum of their gradients is added to the network's.

    Gradients must be enabled.

    Args:
        weights: of the shares' losses in that of the batch.
        scale: of all gradients.
    Returns:
        Each share's weighted loss, on its device, without gradient.
    Raises:
        ReplicaError: there is nothing to train.
    """
    sources = tensors_to_copy(network)
    rows = [
        [tensor.detach().requires_grad_(source.requires_grad) for tensor, source in zip(row, sources, strict=True)]
        for row in (sources, *mirror.fetch(sources, devices))
    ]
    replicas = build(network, devices, sources, rows)
    cut = [_Cut(share) for share in shares]
    reduction = TreeReduction(rows, plan_for(sources))
    trained: list[int] = []

    def job(index: int) -> Tensor:
        loss: Tensor = replicas[index](*cut[index].share)
        if weights[index] == 0:  # nothing in it counts, and a mean over nothing is NaN
            return torch.zeros_like(loss, requires_grad=False)
        if loss.requires_grad:
            trained.append(index)
            differentiate(loss, weights[index] * scale)
        return loss.detach() * weights[index]

    def job_to_the_end(index: int) -> Tensor:
        loss = job(index)
        reduction.end_backward(index)
        return loss

    try:
        losses = run([partial(job_to_the_end, index) for index in range(len(shares))], devices)
        if not trained:
            raise ReplicaError("no replica's loss depends on a tensor that needs a gradient: is everything frozen?")
        totals = reduction.total()
    finally:
        reduction.close()
    numbers = list(totals)
    grads = [totals.pop(number) for number in numbers]  # held by nobody else, so that autograd may keep them
    _deliver([sources[number] for number in numbers], grads, [pair for part in cut for pair in part.pairs])
    return losses


class _Cut:
    """A share cut off the graph that made it, so that each replica's backward stays within its thread."""

    def __init__(self, share: Sequence[Any]) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []  # a tensor of the share, and the leaf in its place
        self.share = self._cut(list(share))

    def _cut(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            if not item.requires_grad:
                return item
            leaf = item.detach().requires_grad_()
            self.pairs.append((item, leaf))
            return leaf
        parts = parts_of(item)
        return item if parts is None else with_parts(item, [self._cut(value) for _, value in parts])


def _deliver(sources: list[Tensor], grads: list[Tensor], inputs: list[tuple[Tensor, Tensor]]) -> None:
    """Give gradients to those to whom they belong, through autograd: hooks run once, on the sum."""
    reached = [(tensor, leaf.grad) for tensor, leaf in inputs if leaf.grad is not None]
    roots, seeds = [tensor for tensor, _ in reached], [grad for _, grad in reached]
    if sources:
        roots.append(_Delivery.apply(grads, *sources))  # type: ignore[no-untyped-call]
        seeds.append(torch.ones_like(roots[-1]))
    if roots:
        torch.autograd.backward(roots, seeds)


class _Delivery(Function):
    """A node whose backward hands out gradients that are known already. Autograd may keep their memory."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *sources: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.zeros((), device=sources[0].device)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> Any:
        grads = tuple(ctx.grads)
        ctx.grads.clear()
        return None, *grads
