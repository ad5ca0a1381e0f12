"""Loss and backward in each replica: no device holds more than its share.

torch's DataParallel gathers all outputs on the first device, which computes the loss of all, and sums all gradients
there. Here each replica computes the loss of its share and runs its backward, in its own thread; gradients are summed
on the way, in a tree, while others are still being computed. Only the sums, and a number, reach the first device.

The invariant: the gradients of the module are those of the whole batch, or, after an exception, what they were before.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module

from paceline.errors import DataError
from paceline.parallel.data_parallel.apply import run
from paceline.parallel.data_parallel.containers import parts_of, with_parts
from paceline.parallel.data_parallel.mirror import Mirror
from paceline.parallel.data_parallel.reduce import TreeReduction, plan_for
from paceline.parallel.data_parallel.replicate import build, tensors_to_copy
from paceline.parallel.data_parallel.weights import Loss


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


def train_share(network: Module, share: Sequence[Any], weight: float, scale: float) -> Tensor:
    """Forward, loss and backward of one share.

    Args:
        weight: of the share's loss in that of the batch.
        scale: of all gradients.
    Returns:
        The weighted loss, without gradient.
    """
    with torch.inference_mode(False), torch.enable_grad():
        loss: Tensor = network(*share)
    if weight == 0:  # nothing in it counts; a mean over nothing is NaN
        return torch.zeros_like(loss, requires_grad=False)
    with torch.autocast(loss.device.type, enabled=False):
        torch.autograd.backward(loss, torch.full_like(loss, weight * scale))
    return loss.detach() * weight


def train_replicas(
    mirror: Mirror,
    network: Module,
    devices: Sequence[torch.device],
    shares: Sequence[Sequence[Any]],
    weights: Sequence[float],
    scale: float,
) -> list[Tensor]:
    """``train_share`` in a replica for each share, and the sum of their gradients added to the network's.

    Returns:
        Each replica's weighted loss, on its device.
    """
    sources = tensors_to_copy(network)
    rows = [
        [tensor.detach().requires_grad_(source.requires_grad) for tensor, source in zip(row, sources, strict=True)]
        for row in (sources, *mirror.fetch(sources, devices))
    ]
    replicas = build(network, devices, sources, rows)
    cut = [_Cut(share) for share in shares]
    reduction = TreeReduction(rows, plan_for(sources))

    def job(index: int) -> Tensor:
        loss = train_share(replicas[index], cut[index].share, weights[index], scale)
        reduction.end_backward(index)
        return loss

    try:
        losses = run([lambda index=index: job(index) for index in range(len(shares))], devices)  # type: ignore[misc]
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
        with torch.enable_grad():
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
